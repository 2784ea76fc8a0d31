"""Drawing the next token of every sequence on the device, without a host look.

A draw depends only on the sequence's logits, settings, seed and position. Probabilities become whole numbers before
they are added: such sums are exact, so that their order, which depends on the batch, does not matter. `draw` says in
PyTorch what is drawn; `draw_step` is the end of a decode step, on a GPU one kernel, or three.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trifocal.errors import UserError
from trifocal.ops import dispatch
from trifocal.ops.validation import check_number, check_whole_number

ONE = 2.0**34
"""The whole number that stands for the likeliest token's weight; 2**19 such numbers are exact in fp64."""
NO_TOKEN = -1
"""Drawn from logits that are not finite."""

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The fields of `Sampling` that `generation_config.json` may have, under the same names."""

_GOLDEN = 0x9E3779B97F4A7C15
# Outside of these a logit could overflow.
_PENALTIES = 1e-6, 1e6


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of a sequence are drawn: penalty, top-k, temperature, top-p, min-p, in this order.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token, of equal ones the first.
        top_k: Draw from the k most likely tokens, of equal ones those of lower index; 0 from all.
        top_p: Draw from the fewest most likely tokens whose probabilities reach p together, at least one; 1 from all.
        min_p: Draw from tokens with at least this share of the most likely one's probability; 0 from all.
        repetition_penalty: Divides positive logits of tokens that the sequence has, and multiplies negative ones.
        seed: With the position it decides the draw, 64 bits.

    Raises:
        ValueError: If a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            check_number(name, getattr(self, name))
        check_whole_number("top_k", self.top_k, 0)
        check_whole_number("seed", self.seed, -(2**63), 2**64 - 1)
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p must be from 0 to 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 to 1, got {self.min_p}")
        lowest, highest = _PENALTIES
        if not lowest <= self.repetition_penalty <= highest:
            raise ValueError(
                f"repetition_penalty must be from {lowest} to {highest:,.0f}, got {self.repetition_penalty}"
            )

    @classmethod
    def of(
        cls, generation: Mapping[str, Any], *, seed: int = 0, default_temperature: float = 1.0, **given: Any
    ) -> "Sampling":
        """Given settings; where one is absent or "auto", that of `generation`, the model's `generation_config.json`, or
        the default. ValueError if a value is out of range; a UserError if it is one of the model's.
        """
        values = {name: generation[name] for name in SETTINGS if name in generation}
        try:
            cls(**values)
        except (TypeError, ValueError) as error:
            raise UserError(f"generation_config.json of the model: {error}; correct it there") from error
        values |= {name: value for name, value in given.items() if value != "auto"}
        return cls(**({"temperature": default_temperature} | values), seed=seed)

    @property
    def filters(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_k > 1 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class SamplingTensors:
    """The settings of B sequences, on the device.

    Attributes:
        temperature, top_p, min_p, repetition_penalty: [B], fp32.
        top_k: [B], int32.
        seed: [B], int64.
        seen: Which tokens each sequence has, [B, vocab_size], bool; only looked at where there is a penalty.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    seed: Tensor
    seen: Tensor

    @classmethod
    def empty(cls, count: int, vocab_size: int, device: torch.device) -> "SamplingTensors":
        """Settings that take the most likely token."""
        zeros, ones = torch.zeros(count, device=device), torch.ones(count, device=device)
        return cls(
            temperature=zeros,
            top_k=torch.zeros(count, dtype=torch.int32, device=device),
            top_p=ones,
            min_p=zeros.clone(),
            repetition_penalty=ones.clone(),
            seed=torch.zeros(count, dtype=torch.int64, device=device),
            seen=torch.zeros(count, vocab_size, dtype=torch.bool, device=device),
        )

    def rows(self, rows: slice) -> "SamplingTensors":
        """Views of some rows."""
        return SamplingTensors(**{name: x[rows] for name, x in vars(self).items()})

    def copy_row(self, source: int, target: int) -> None:
        """Copy all of one row to another."""
        for x in vars(self).values():
            x[target].copy_(x[source])

    def set_row(self, row: int, sampling: Sampling, tokens: Tensor | None) -> None:
        """Set one row; `tokens` are those that the sequence has, needed for a penalty."""
        for name in SETTINGS:
            setting = getattr(self, name)
            # The largest number of the type does what a larger one would; one under the smallest becomes 0.
            largest = (torch.finfo if setting.dtype.is_floating_point else torch.iinfo)(setting.dtype).max
            setting[row : row + 1].fill_(min(getattr(sampling, name), largest))
        self.seed[row : row + 1].fill_(_signed(sampling.seed))
        if sampling.repetition_penalty != 1:
            assert tokens is not None
            self.seen[row].zero_().index_fill_(0, tokens, True)


def draw_step(
    logits: Tensor,
    settings: SamplingTensors,
    lengths: Tensor,
    num_new: Tensor | None,
    tokens: Tensor,
    drawn: Tensor,
    *,
    filtered: bool,
    backend: dispatch.Backend = "auto",
) -> None:
    """Draw one token a sequence as `draw` does, and update tokens, lengths and `seen` in place.

    The kernel draws the same tokens as `draw` unless a probability, in whole numbers, rounds otherwise, one in about a
    million; it draws them for every sequence, so that a sequence with filters does not change another's bits.

    logits are [B, vocab_size]. lengths [B], int32, grow by `num_new` [B], int32, first, or stay if it is None; the
    drawn token stands behind them. tokens [B], int64, get the drawn tokens, 0 for `NO_TOKEN`; drawn [B, 2], fp64, gets
    tokens and log-probabilities.
    """
    if dispatch.resolve("draw", backend, logits, None, None) == "triton":
        # Importing it imports Triton.
        from trifocal.ops.decode.triton.draw_tokens import draw_tokens

        keep = kept(logits, settings) if filtered else None
        with torch.cuda.device_of(logits):
            draw_tokens(
                logits, keep, settings.temperature, settings.top_k, settings.repetition_penalty, settings.seed,
                settings.seen, lengths, num_new, tokens, drawn,
            )  # fmt: skip
        return
    position = lengths if num_new is None else lengths + num_new
    found, log_p = draw(logits, settings, position, filtered=filtered)
    # Where logits are broken, the sequence continues with any token until the host ends it.
    tokens.copy_(found.clamp(min=0))
    drawn[:, 0], drawn[:, 1] = found, log_p
    # Last, so that a step that fails can be run again.
    lengths.copy_(position)


def draw(logits: Tensor, settings: SamplingTensors, position: Tensor, *, filtered: bool) -> tuple[Tensor, Tensor]:
    """Draw one token a sequence from logits [B, vocab_size], fp32 or fp64; `seen` of the settings gets it.

    `position` [B] is where the drawn token will stand; `filtered` says whether a sequence has `Sampling.filters`, and
    one that has none draws the same either way. Returns tokens, [B], int64, `NO_TOKEN` where logits are not finite; and
    their log-probabilities by the model itself, without temperature, penalty and filters, [B], in the type of the
    logits, natural log.
    """
    if logits.device.type == "cpu" and len(logits) > 1:
        # PyTorch's functions round differently on a CPU where a vector ends.
        parts = [
            draw(logits[i : i + 1], settings.rows(slice(i, i + 1)), position[i : i + 1], filtered=filtered)
            for i in range(len(logits))
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    finite = (logits - logits == 0).all(-1)
    logits = logits.where(finite[:, None], 0.0)
    scored = penalised(logits, settings)
    drawn = pick(weights_of(scored, settings, filtered=filtered), uniform(settings.seed, position))
    greedy = (settings.temperature == 0) | (settings.top_k == 1)
    # The first of equal ones, as PyTorch promises.
    tokens = scored.argmax(-1).where(greedy, drawn)

    relative = logits - logits.amax(-1, keepdim=True)
    log_total = (_whole(relative).sum(-1).double() / ONE).log()
    log_p = relative.gather(-1, tokens[:, None])[:, 0].double() - log_total
    was_seen = settings.seen.gather(1, tokens[:, None])
    settings.seen.scatter_(1, tokens[:, None], was_seen | finite[:, None])
    return tokens.where(finite, NO_TOKEN), log_p.to(logits.dtype).where(finite, torch.nan)


def penalised(logits: Tensor, settings: SamplingTensors) -> Tensor:
    """Logits after the repetition penalty, [B, vocab_size]."""
    penalty = settings.repetition_penalty[:, None].to(logits.dtype)
    lower = torch.where(logits > 0, logits / penalty, logits * penalty)
    return lower.where(settings.seen & (penalty != 1), logits)


def kept(logits: Tensor, settings: SamplingTensors) -> Tensor:
    """The tokens that the filters leave, [B, vocab_size], bool; all for a sequence without filters."""
    finite = (logits - logits == 0).all(-1, keepdim=True)
    scored = penalised(logits.float().where(finite, 0.0), settings)
    has_filters = (settings.top_k > 1) | (settings.top_p < 1) | (settings.min_p > 0)
    return (weights_of(scored, settings, filtered=True) > 0) | ~has_filters[:, None]


def weights_of(scored: Tensor, settings: SamplingTensors, *, filtered: bool) -> Tensor:
    """The probability of each token in proportion, whole numbers up to `ONE`, [B, vocab_size]; 0 for one left out."""
    # Relative to the largest, so that a low temperature makes only unlikely logits infinite. A temperature under the
    # smallest number would be 0, and 0 / 0 is NaN.
    temperature = settings.temperature[:, None].to(scored.dtype).clamp(min=torch.finfo(torch.float32).tiny)
    weights = _whole((scored - scored.amax(-1, keepdim=True)) / temperature)
    if not filtered:
        return weights
    order = scored.sort(dim=-1, descending=True, stable=True).indices
    ranked = weights.gather(-1, order)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    top_k = settings.top_k[:, None]
    ranked = ranked.masked_fill((top_k > 0) & (rank >= top_k), 0)
    # A token stays if the more likely ones do not reach top_p without it; the first always does.
    reached = (ranked.cumsum(-1) - ranked).double()
    top_p = settings.top_p[:, None].double()
    beyond = (reached >= top_p * ranked.sum(-1, keepdim=True).double()) & (top_p < 1)
    beyond |= ranked.double() < settings.min_p[:, None].double() * ONE
    ranked = ranked.masked_fill(beyond & (rank > 0), 0)
    return torch.zeros_like(weights).scatter_(-1, order, ranked)


def pick(weights: Tensor, u: Tensor) -> Tensor:
    """The first token whose weight and those before it exceed the share `u` of all, [B]."""
    total = weights.sum(-1)
    target = (u * total.double()).long().minimum(total - 1)
    return (weights.cumsum(-1) <= target[:, None]).sum(-1)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """A number from 0 to under 1 for each seed and position, [B], fp64: number `position` of the SplitMix64 generator
    that starts at the mixed seed. Source: Steele, Lea, Flood, OOPSLA 2014.
    """
    mixed = _mix(_mix(seed) + (position.long() + 1) * _signed(_GOLDEN))
    return _shift(mixed, 11).double() * 2.0**-53


def _whole(logits: Tensor) -> Tensor:
    """exp of logits that are at most 0, as whole numbers; `ONE` is 1."""
    return (logits.double().exp() * ONE).round().long()


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64, on 64 bits."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right with zeros: PyTorch's shift repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The same 64 bits as a signed number."""
    return (number + 2**63) % 2**64 - 2**63
