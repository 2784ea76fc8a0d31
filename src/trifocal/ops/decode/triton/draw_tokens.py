"""The end of a decode step: samples the next tokens, and updates the state of their sequences.

A small vocabulary takes one kernel, whose program has all logits of a sequence in its registers. A large one is read in
parts by many programs: one kernel finds the largest logits, one adds up weights relative to them, and the last one
samples from the part that holds the token.

The result is defined by `inference.sampler`: probabilities are whole numbers, whose sums are exact in any order.
Exponentials are in fp64, so that rounding to whole numbers hides how they were computed; the rest rounds as PyTorch
does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.tiles import cdiv, next_power_of_2
from trifocal.ops.triton.common import unit_stride
from trifocal.ops.triton.dependent_launch import dependent_launch, wait_for_inputs
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.validation import check_contiguous

# The largest vocabulary that one program takes, and the parts of a larger one: fp64 takes most of a program's time.
_MAX_TOKENS = 4096
_PART = 1024
_TOKENS_OF_WARP = 256
_MAX_WARPS = 8

_ONE = tl.constexpr(2.0**34)
_TO_WHOLE = tl.constexpr(2.0**52)
_TINY = tl.constexpr(2.0**-126)


@triton.jit
def whole_number(x):
    """exp of numbers that are at most 0, as whole numbers, int64; 2**34 is 1."""
    scaled = tl.exp(x.to(tl.float64)) * _ONE
    # fp64 of this size has no fraction, so the addition rounds, ties to the even number.
    return ((scaled + _TO_WHOLE) - _TO_WHOLE).to(tl.int64)


@triton.jit
def load_logits(logits, seen, index, exists, penalty):
    """Logits, and logits after the penalty; 0 for tokens that do not exist."""
    raw = tl.load(logits + index, mask=exists, other=0.0).to(tl.float32)
    was_seen = tl.load(seen + index, mask=exists, other=0) != 0
    lower = tl.where(raw > 0, tl.div_rn(raw, penalty), raw * penalty)
    # A penalty of 1 changes nothing, in any bit.
    return raw, tl.where(was_seen, lower, raw)


@triton.jit
def largest(raw, scored, exists):
    """The largest logit, infinite if one is not finite; the largest after the penalty, and the first that has it."""
    is_finite = tl.abs(raw) < float("inf")
    highest = tl.max(tl.where(exists, tl.where(is_finite, raw, float("inf")), -float("inf")), 0)
    most, place = tl.max(tl.where(exists, scored, -float("inf")), 0, return_indices=True)
    return highest, most, place


@triton.jit
def load_rule(temperatures, top_k, penalties, row):
    """Penalty, temperature, whether the likeliest token is taken, and whether the model's own weights will do."""
    penalty = tl.load(penalties + row)
    given = tl.load(temperatures + row)
    is_greedy = (given == 0.0) | (tl.load(top_k + row) == 1)
    # A greedy draw looks at no weights.
    takes_own = is_greedy | ((given == 1.0) & (penalty == 1.0))
    return penalty, tl.maximum(given, _TINY), is_greedy, takes_own


@triton.jit
def weigh(raw, scored, exists, highest, most, temperature, takes_own, keep, FILTERED: tl.constexpr):
    """Weights that tokens are drawn by, and those of the model itself; 0 for tokens that do not exist. Whether no logit
    is broken, and the largest one: broken logits count as zeros."""
    is_whole = highest < float("inf")
    raw, scored = tl.where(is_whole, raw, 0.0), tl.where(is_whole, scored, 0.0)
    highest, most = tl.where(is_whole, highest, 0.0), tl.where(is_whole, most, 0.0)
    own = tl.where(exists, whole_number(raw - highest), 0)
    weights = own
    if takes_own == 0:
        weights = tl.where(exists, whole_number(tl.div_rn(scored - most, temperature)), 0)
    if FILTERED:
        weights = tl.where(tl.load(keep, mask=exists, other=0) != 0, weights, 0)
    return weights, own, is_whole, highest


@triton.jit
def mix(x):
    """The finalizer of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def load_largest(maxima, row, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr):
    """The largest value of all parts, and the place of its part."""
    part = tl.arange(0, PARTS_PAD)
    pointers = maxima + (row * PARTS + part) * 2
    highest = tl.max(tl.load(pointers, mask=part < PARTS, other=-float("inf")), 0)
    most, place = tl.max(tl.load(pointers + 1, mask=part < PARTS, other=-float("inf")), 0, return_indices=True)
    return highest, most, place


# Rows of these begin anywhere: a version for each alignment would be compiled in the middle of serving.
_ANYWHERE = [
    "logits", "keep", "temperatures", "top_k", "penalties", "seeds", "seen", "lengths", "num_new", "tokens", "drawn",
    "maxima", "likeliest", "sums",
]  # fmt: skip


@Kernel
@triton.jit(do_not_specialize_on_alignment=["logits", "penalties", "seen"])
def draw_maxima_kernel(
    logits, penalties, seen, maxima, likeliest, logits_stride, V: tl.constexpr, TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The largest logits of one part of a sequence's vocabulary, and the likeliest token."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait_for_inputs(DEPENDENT)
    index = part * TILE + tl.arange(0, TILE)
    exists = index < V
    raw, scored = load_logits(logits + row * logits_stride, seen + row * V, index, exists, tl.load(penalties + row))
    highest, most, place = largest(raw, scored, exists)
    number = row * tl.num_programs(0) + part
    tl.store(maxima + 2 * number, highest)
    tl.store(maxima + 2 * number + 1, most)
    tl.store(likeliest + number, part * TILE + place)


@Kernel
@triton.jit(do_not_specialize_on_alignment=["logits", "keep", "temperatures", "top_k", "penalties", "seen"])
def draw_sums_kernel(
    logits, keep, temperatures, top_k, penalties, seen, maxima, sums, logits_stride, V: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, FILTERED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sums of the weights of one part of a sequence's vocabulary."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait_for_inputs(DEPENDENT)
    index = part * TILE + tl.arange(0, TILE)
    exists = index < V
    penalty, temperature, _, takes_own = load_rule(temperatures, top_k, penalties, row)
    raw, scored = load_logits(logits + row * logits_stride, seen + row * V, index, exists, penalty)
    highest, most, _ = load_largest(maxima, row, PARTS, PARTS_PAD)
    weights, own, _, _ = weigh(
        raw, scored, exists, highest, most, temperature, takes_own, keep + row * V + index, FILTERED
    )  # fmt: skip
    tl.store(sums + 2 * (row * PARTS + part), tl.sum(weights, 0))
    tl.store(sums + 2 * (row * PARTS + part) + 1, tl.sum(own, 0))


@Kernel
@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def draw_tokens_kernel(
    logits, keep, temperatures, top_k, penalties, seeds, seen, lengths, num_new, tokens, drawn, maxima, likeliest, sums,
    logits_stride, V: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
    FILTERED: tl.constexpr, GROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Draw one sequence's token. With FILTERED only those to keep; with GROWS its length grows by its new tokens."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(DEPENDENT)
    logits += row * logits_stride
    seen += row * V
    penalty, temperature, is_greedy, takes_own = load_rule(temperatures, top_k, penalties, row)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position = tl.load(lengths + row)
    if GROWS:
        position += tl.load(num_new + row)
    # Number `position` of the generator SplitMix64 that starts at the mixed seed.
    mixed = mix(mix(seed) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    share = (mixed >> 11).to(tl.float64) * 1.1102230246251565e-16

    index = tl.arange(0, TILE)
    if PARTS == 1:
        raw, scored = load_logits(logits, seen, index, index < V, penalty)
        highest, most, token_of_most = largest(raw, scored, index < V)
    else:
        highest, most, place = load_largest(maxima, row, PARTS, PARTS_PAD)
        token_of_most = tl.load(likeliest + row * PARTS + place)
        # The part that holds the target, which the parts before it do not reach.
        part = tl.arange(0, PARTS_PAD)
        pointers = sums + 2 * (row * PARTS + part)
        totals = tl.load(pointers, mask=part < PARTS, other=0)
        own_total = tl.sum(tl.load(pointers + 1, mask=part < PARTS, other=0), 0)
        total = tl.sum(totals, 0)
        target = tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)
        is_before = tl.cumsum(totals, 0) <= target
        target -= tl.sum(tl.where(is_before, totals, 0), 0)
        index += tl.minimum(tl.sum(is_before.to(tl.int32), 0), PARTS - 1) * TILE
        raw, scored = load_logits(logits, seen, index, index < V, penalty)
    exists = index < V
    weights, own, is_whole, highest = weigh(
        raw, scored, exists, highest, most, temperature, takes_own, keep + row * V + index, FILTERED
    )  # fmt: skip
    if PARTS == 1:
        own_total = tl.sum(own, 0)
        total = tl.sum(weights, 0)
        target = tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)
    num_before = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    token = tl.where(is_greedy, token_of_most, tl.minimum(tl.min(index, 0) + num_before, V - 1))

    relative = tl.load(logits + token, mask=is_whole, other=0.0).to(tl.float32) - highest
    own_share = own_total.to(tl.float64) / _ONE
    log_p = (relative.to(tl.float64) - tl.log(own_share)).to(tl.float32)
    # A sequence whose logits are broken continues with any token until the host knows.
    tl.store(tokens + row, tl.where(is_whole, token, 0).to(tl.int64))
    tl.store(drawn + 2 * row, tl.where(is_whole, token, -1).to(tl.float64))
    tl.store(drawn + 2 * row + 1, tl.where(is_whole, log_p, float("nan")).to(tl.float64))
    # Until here other warps may not have read these.
    tl.debug_barrier()
    if GROWS:
        tl.store(lengths + row, position)
    tl.store(seen + token, 1, mask=is_whole)


def draw_tokens(
    logits: Tensor,
    keep: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    repetition_penalty: Tensor,
    seed: Tensor,
    seen: Tensor,
    lengths: Tensor,
    num_new: Tensor | None,
    tokens: Tensor,
    drawn: Tensor,
) -> None:
    """See `inference.sampler.draw_step`: from logits [B, vocab_size], write `tokens`, int64 [B], and `drawn`, fp64
    [B, 2]. `keep`, bool [B, vocab_size], has the tokens that may be drawn, None for all; `temperature` to `seen` are
    fields of `SamplingTensors`; without `num_new` the lengths stay.
    """
    check_contiguous(
        temperature=temperature, top_k=top_k, repetition_penalty=repetition_penalty, seed=seed, seen=seen,
        lengths=lengths, num_new=num_new, tokens=tokens, drawn=drawn,
    )  # fmt: skip
    logits, keep = unit_stride(logits), None if keep is None else keep.contiguous()
    rows, vocab_size = logits.shape
    whole = next_power_of_2(vocab_size)
    tile = whole if whole <= _MAX_TOKENS else _PART
    parts = cdiv(vocab_size, tile)
    seen = seen.view(torch.uint8)
    keep, filtered = seen if keep is None else keep.view(torch.uint8), keep is not None
    sizes = {"V": vocab_size, "TILE": tile}
    parts_sizes = {"PARTS": parts, "PARTS_PAD": next_power_of_2(parts), "FILTERED": filtered}
    options = {"num_warps": min(_MAX_WARPS, max(1, tile // _TOKENS_OF_WARP)), **dependent_launch(logits.device)}
    maxima, likeliest, sums = drawn, tokens, tokens
    if parts > 1:
        maxima = torch.empty(rows, parts, 2, dtype=torch.float32, device=logits.device)
        likeliest = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
        sums = torch.empty(rows, parts, 2, dtype=torch.int64, device=logits.device)
        draw_maxima_kernel[parts, rows](
            logits, repetition_penalty, seen, maxima, likeliest, logits.stride(0), **sizes, **options
        )  # fmt: skip
        draw_sums_kernel[parts, rows](
            logits, keep, temperature, top_k, repetition_penalty, seen, maxima, sums, logits.stride(0),
            **sizes, **parts_sizes, **options,
        )  # fmt: skip
    draw_tokens_kernel[(rows,)](
        logits, keep, temperature, top_k, repetition_penalty, seed, seen, lengths,
        lengths if num_new is None else num_new, tokens, drawn, maxima, likeliest, sums, logits.stride(0),
        **sizes, **parts_sizes, GROWS=num_new is not None, **options,
    )  # fmt: skip
