"""Rotary position embedding: a score of a rotated query and a rotated key depends on their distance alone.

Convention: every head is rotated by itself, and dimension `i` pairs with dimension `i + D/2` ("half-split").
Pair `i` turns by `position * theta ** (-2i / D)`, or slower where frequencies are scaled for long sequences.
Source: arXiv:2104.09864; of the scaled ones, the formulas of transformers' `ROPE_INIT_FUNCTIONS`.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
_ORIGINAL = "original_max_position_embeddings"
# The fields that each type reads.
_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "proportional": ("factor", "partial_rotary_factor"),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary frequencies for sequences longer than those of pretraining. Names and formulas are those of transformers.

    Args:
        rope_type: `"default"` (not scaled), `"linear"`, `"dynamic"`, `"yarn"`, `"longrope"`, `"llama3"` or
            `"proportional"`. `"dynamic"` and `"longrope"` depend on the length of the sequence, or of each document of
            a pack; in decoding on the longest sequence that the caches are made for.
        factor: Length of the sequences, in multiples of those of pretraining.
        original_max_position_embeddings: Tokens of a sequence in pretraining. For `"dynamic"`, transformers'
            `max_position_embeddings`.
        attention_factor: Factor on cosines and sines, for `"yarn"` and `"longrope"`; 0 takes the type's formula.
        beta_fast: Turns in a pretraining sequence above which `"yarn"` keeps a frequency.
        beta_slow: Turns below which `"yarn"` divides it by the factor.
        truncate: Whether `"yarn"` rounds the bounds between them to whole pairs.
        low_freq_factor: Turns below which `"llama3"` divides a frequency by the factor.
        high_freq_factor: Turns above which `"llama3"` keeps it.
        short_factor: Divisors of `"longrope"` up to the length of pretraining, one for each pair.
        long_factor: Its divisors beyond it.
        partial_rotary_factor: Share of the pairs that `"proportional"` turns.

    Raises:
        ValueError: If a field does not fit the type, or another field; the message names it.
    """

    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        kind, read = self.rope_type, ("rope_type", *self.fields_of(self.rope_type))
        for field in fields(self):
            if field.name not in read and getattr(self, field.name) != field.default:
                raise ValueError(f'rope_scaling.{field.name} has no effect with the rope_type "{kind}"; leave it out')
        for name in ("factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"rope_scaling.{name} must be a positive number, got {value}")
        if not 0 <= self.attention_factor < math.inf:
            raise ValueError(f"rope_scaling.attention_factor must not be negative, got {self.attention_factor}")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"rope_scaling.partial_rotary_factor must lie in (0, 1], got {self.partial_rotary_factor}")
        if _ORIGINAL in _FIELDS[kind] and self.original_max_position_embeddings < 2:
            raise ValueError(
                f"rope_scaling.{_ORIGINAL} must be at least 2 for {kind}, got {self.original_max_position_embeddings}"
            )
        if kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                "rope_scaling.low_freq_factor must be below high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )

    @staticmethod
    def fields_of(rope_type: str) -> tuple[str, ...]:
        """The fields that a type reads.

        Raises:
            ValueError: If there is no such type.
        """
        if rope_type not in _FIELDS:
            raise ValueError(f"rope_scaling.rope_type must be one of {', '.join(_FIELDS)}, got {rope_type!r}")
        return _FIELDS[rope_type]

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies depend on the length of the sequence."""
        return self.rope_type in ("dynamic", "longrope")

    def check_head_dim(self, head_dim: int) -> None:
        """Refuse a width of heads that does not fit.

        Raises:
            ValueError: If lists have not one number for each pair, or the formula needs more pairs.
        """
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if self.rope_type == "longrope" and (len(factors) != head_dim // 2 or not min(factors) > 0):
                raise ValueError(
                    f"rope_scaling.{name} must be head_dim / 2 = {head_dim // 2} positive numbers, got {len(factors)}"
                )
        if self.rope_type == "dynamic" and head_dim < 4:
            raise ValueError(f"rope_scaling.rope_type dynamic needs a head_dim of at least 4, got {head_dim}")


UNSCALED = RopeScaling()


def rotary_frequencies(
    head_dim: int,
    theta: float,
    scaling: RopeScaling = UNSCALED,
    length: int | Tensor = 0,
    device: torch.device | None = None,
) -> tuple[Tensor, float]:
    """Radians that each pair turns from a token to the next.

    Args:
        head_dim: D, even.
        theta: Base of the frequencies.
        scaling: For sequences longer than those of pretraining.
        length: Tokens of the sequence, its past included; or of the document of each token, [T]. Only `"dynamic"` and
            `"longrope"` read it.
        device: Device of the result.

    Returns:
        [D/2] in fp64, or [T, D/2] with a length for each token; and the factor on cosines and sines.
    """
    kind, factor, original = scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64)
    if kind == "dynamic":
        stretched = factor * _tokens(length, pairs).clamp(min=original) / original - (factor - 1)
        return (theta * stretched ** (head_dim / (head_dim - 2))) ** (-pairs / head_dim), 1.0
    frequencies = theta ** (-pairs / head_dim)
    if kind == "linear":
        return frequencies / factor, 1.0
    if kind == "proportional":
        turning = 2 * int(scaling.partial_rotary_factor * head_dim // 2)
        return frequencies.where(pairs < turning, 0.0) / factor, 1.0
    if kind == "llama3":
        turns = original * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / factor + kept * frequencies, 1.0
    if kind == "yarn":
        bounds = [
            head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        ]
        low, high = (math.floor(bounds[0]), math.ceil(bounds[1])) if scaling.truncate else bounds
        low, high = max(low, 0), min(high, head_dim - 1)
        # Not a division by zero where one pair is between them.
        divided = ((pairs / 2 - low) / (high - low or 0.001)).clamp(0, 1)
        slowed = divided * frequencies / factor + (1 - divided) * frequencies
        return slowed, scaling.attention_factor or (1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0)
    if kind == "longrope":
        # Number by number: a tensor of them would be copied from the host, which no CUDA graph records.
        short, long = (
            torch.cat([pairs.new_full((1,), factor) for factor in factors])
            for factors in (scaling.short_factor, scaling.long_factor)
        )
        divisors = torch.where(_tokens(length, pairs) > original, long, short)
        grown = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return frequencies / divisors, scaling.attention_factor or grown
    return frequencies, 1.0


def _tokens(length: int | Tensor, like: Tensor) -> Tensor:
    """Lengths as [1] or [T, 1] in the type of the frequencies."""
    return length.to(like.dtype)[..., None] if isinstance(length, Tensor) else like.new_full((1,), length)


def rotary_tables(
    positions: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling = UNSCALED,
    length: int | Tensor = 0,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles.

    Angles are computed in fp64: in fp32 an angle near one million is off by 0.06 radians.

    Args:
        positions: Position of each token in its document, [T], an integer type.
        head_dim: D, even.
        theta: Base of the frequencies; the slowest pair turns once in about `2 * pi * theta` tokens.
        dtype: Type of the tables.
        scaling, length: Arguments of `rotary_frequencies`.

    Returns:
        Cosine and sine, each [T, D/2], times the attention factor of the scaling.
    """
    frequencies, factor = rotary_frequencies(head_dim, theta, scaling, length, positions.device)
    angles = positions.to(torch.float64)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of each token by its position's angles.

    Args:
        x: Queries or keys, [B, T, H, D].
        cos: From `rotary_tables`, [T, D/2]; its type is that of the arithmetic, so fp32 for bf16 inputs.
        sin: Sines, the same shape.

    Returns:
        The rotated tensor, [B, T, H, D], in the type of `x`.
    """
    # Without a concatenation, so that a compiler makes one pass of it, without fp32 tensors in memory.
    cos, sin = cos[:, None, None], sin[:, None, None]
    signs = torch.arange(-1, 2, 2, device=sin.device, dtype=sin.dtype)[:, None]
    halves = x.to(cos.dtype).unflatten(-1, (2, -1))
    return (halves * cos + halves.flip(-2) * (sin * signs)).flatten(-2).to(x.dtype)
