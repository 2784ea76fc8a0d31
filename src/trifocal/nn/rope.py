"""Rotary position embedding: a score of a rotated query and a rotated key depends only on their distance.

Convention: every head is rotated by itself, and dimension `i` pairs with dimension `i + D/2` ("half-split").
Pair `i` turns by `position * theta ** (-2i / D)`, or slower where frequencies are scaled for long sequences.
Source: arXiv:2104.09864; of the scaled ones, the formulas of transformers' `ROPE_INIT_FUNCTIONS`.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from trifocal.ops.validation import check_rank, check_whole_number

RopeType = Literal["default", "linear", "yarn", "llama3"]
_ORIGINAL = "original_max_position_embeddings"
# The fields that each type reads.
_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary frequencies for sequences longer than those of pretraining. Names and formulas are those of transformers.

    Args:
        rope_type: `"default"` (not scaled), `"linear"`, `"yarn"` or `"llama3"`.
        factor: Length of the sequences, in multiples of those of pretraining.
        original_max_position_embeddings: Tokens of a sequence in pretraining.
        attention_factor: Factor on cosines and sines, for `"yarn"`; 0 takes its formula.
        beta_fast: Turns in a pretraining sequence above which `"yarn"` keeps a frequency.
        beta_slow: Turns below which `"yarn"` divides it by the factor.
        truncate: Whether `"yarn"` rounds the bounds between them to whole pairs.
        low_freq_factor: Turns below which `"llama3"` divides a frequency by the factor.
        high_freq_factor: Turns above which `"llama3"` keeps it.

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
        """The fields that a type reads; ValueError if there is no such type."""
        if rope_type not in _FIELDS:
            raise ValueError(f"rope_scaling.rope_type must be one of {', '.join(_FIELDS)}, got {rope_type!r}")
        return _FIELDS[rope_type]


UNSCALED = RopeScaling()


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling = UNSCALED, device: torch.device | None = None
) -> tuple[Tensor, float]:
    """Radians that each pair turns from a token to the next.

    Args:
        head_dim: D, even.
        theta: Base of the frequencies.
        scaling: For sequences longer than those of pretraining.
        device: Device of the result.

    Returns:
        [D/2] in fp64, and the factor on cosines and sines.

    Raises:
        ValueError: If D is not even, or the base not above 0.
    """
    check_whole_number("head_dim", head_dim, 2)
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")
    if not theta > 0:
        raise ValueError(f"theta must be above 0, got {theta}")
    kind, factor, original = scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64)
    frequencies = theta ** (-pairs / head_dim)
    if kind == "linear":
        return frequencies / factor, 1.0
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
    return frequencies, 1.0


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype, scaling: RopeScaling = UNSCALED
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles.

    Angles are computed in fp64: in fp32 an angle near one million is off by 0.06 radians.

    Args:
        positions: Position of each token in its document, [T], an integer type.
        head_dim: D, even.
        theta: Base of the frequencies; the slowest pair turns once in about `2 * pi * theta` tokens.
        dtype: Type of the tables.
        scaling: For sequences longer than those of pretraining.

    Returns:
        Cosine and sine, each [T, D/2], times the attention factor of the scaling.

    Raises:
        ValueError: If the positions are not [T], or as of `rotary_frequencies`.
    """
    check_rank("positions", positions, "[T]")
    frequencies, factor = rotary_frequencies(head_dim, theta, scaling, positions.device)
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
