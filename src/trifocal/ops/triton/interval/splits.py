"""Splits of d_k and d_v: the rows of a key tile shared by several programs, and the sums of their parts.

The compressed branch has few key tiles, which very different numbers of queries see. Without parts one program would
take far longer than the others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import dispatch
from trifocal.ops.tiles import cdiv
from trifocal.ops.triton.interval.common import IntervalProblem
from trifocal.ops.triton.launch import Kernel


@triton.jit
def _sum_parts(parts_of_x, d_x, parts, count, SIZE: tl.constexpr, ADD: tl.constexpr):
    """Add parts [parts, count] in order; with ADD, to what is there."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    keep = place < count
    value = tl.zeros([SIZE], tl.float32)
    if ADD:
        value = tl.load(d_x + place, mask=keep, other=0.0)
    for _ in tl.range(0, parts):
        value += tl.load(parts_of_x + place, mask=keep, other=0.0)
        parts_of_x += count
    tl.store(d_x + place, value.to(d_x.dtype.element_ty), mask=keep)


@Kernel
@triton.jit(do_not_specialize=["parts"])
def sum_parts_kernel(
    d_k_parts, d_v_parts, d_k, d_v, parts, d_k_count, d_v_count, SIZE: tl.constexpr, ADD: tl.constexpr
):
    """SIZE numbers of d_k, or d_v, from their parts. Bytes: the parts in, the sums out, once."""
    if tl.program_id(1) == 0:
        _sum_parts(d_k_parts, d_k, parts, d_k_count, SIZE, ADD)
    else:
        _sum_parts(d_v_parts, d_v, parts, d_v_count, SIZE, ADD)


def empty_parts(
    problem: IntervalProblem, key_tiles: int, rows: int, *, one_of_many: bool = False
) -> tuple[Tensor, Tensor, int]:
    """Memory for d_k and d_v, and how many parts: of the compressed branch fp32 sums to add up, [parts, B, S, G, *].

    Args:
        problem: Inputs.
        key_tiles: Tiles of keys, of one batch entry and group.
        rows: Rows of a tile.
        one_of_many: Whether the queries are a chunk of many: then fewer parts, whose sums are added chunk by chunk.
    """
    q, k, v = problem.q, problem.k, problem.v
    if problem.branch.is_window:
        return k.new_empty(k.shape), v.new_empty(v.shape), 1
    programs = key_tiles * q.shape[0] * k.shape[2]
    rule = dispatch.interval_parts_of_chunk if one_of_many else dispatch.interval_parts
    parts = rule(q, programs, problem.q_per_kv, rows)
    d_k, d_v = (x.new_empty(parts, *x.shape, dtype=torch.float32) for x in (k, v))
    return d_k, d_v, parts


def add_parts(
    problem: IntervalProblem, d_k_parts: Tensor, d_v_parts: Tensor, totals: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Sums of the parts of d_k and d_v; memory for them comes from `empty_parts`.

    Args:
        problem: Inputs.
        d_k_parts, d_v_parts: The parts.
        totals: Sums in fp32, of one batch entry and these keys or more, to add the parts to in place; None for new ones
            in the types of k and v.
    """
    k, v = problem.k, problem.v
    if problem.branch.is_window:
        return d_k_parts, d_v_parts
    d_k, d_v = totals or (k.new_empty(k.shape), v.new_empty(v.shape))
    d_k_count, d_v_count = k.numel(), v.numel()
    if d_k_count:
        sum_parts_kernel[cdiv(max(d_k_count, d_v_count), 512), 2](
            d_k_parts, d_v_parts, d_k, d_v, d_k_parts.shape[0], d_k_count, d_v_count, SIZE=512, ADD=totals is not None
        )
    return d_k, d_v
