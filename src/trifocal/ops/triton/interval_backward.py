"""The backward kernels of interval attention; see `interval`.

No atomics: every sum has one order, so two runs give equal bits. The compressed branch has few key tiles, and they are
seen by very different numbers of queries: the rows of each are split into `parts` programs, whose sums a small kernel
adds in order.

Backward takes the gradient of the mixed output and the branch's gate instead of their product `gate * d_o`, which
would be one more tensor a branch.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.triton.common import (
    Tile,
    add_product,
    choose_tile,
    load_tile,
    multiprocessors,
    nothing_lost,
    split_width,
    store_tile,
    strides,
    tma_fits,
    unit_stride,
)
from trifocal.ops.triton.interval import (
    IntervalProblem,
    choose_hopper,
    full_tiles,
    key_sources,
    load_keys,
    load_rows,
    place_rows,
    place_rows_of_program,
    row_sources,
    seeing_queries,
)
from trifocal.ops.triton.launch import Kernel, cdiv

LOG2_E = tl.constexpr(math.log2(math.e))

# fmt: off

@triton.jit
def log2_sum(pointers):
    """Log-sum-exp in base 2; +inf where nothing is seen, so that every probability of the row comes out as 0."""
    lse = tl.load(pointers)
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@triton.jit
def _gather_d_q(
    d_q_1, d_q_2, q_1, q_2, d_o_1, d_o_2, lse, delta, gate, k_source_1, k_source_2, v_source_1, v_source_2,
    batch, group, k_stride, v_stride, key_origin, key_limit, row_begin, row_end, count, split, jump, score_scale,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr,
):
    """Add what `count` key tiles give to d_q; tiles from number `split` on lie `jump` tiles further."""
    for number in tl.range(0, count):
        first_key = key_origin + (number + tl.where(number >= split, jump, 0)) * KEYS
        key = first_key + tl.arange(0, KEYS)
        keep = key < key_limit
        k_1 = load_keys(
            k_source_1, batch, group, first_key, k_stride, keep, 0, D_1, D, KEYS, MASKED, PACKED, TMA)
        scores = tl.dot(q_1, tl.trans(k_1), input_precision="ieee")
        if D_2 > 0:
            k_2 = load_keys(
                k_source_2, batch, group, first_key, k_stride, keep, D_1, D_2, D, KEYS, MASKED, PACKED, TMA)
            scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision="ieee")
        v_1 = load_keys(
            v_source_1, batch, group, first_key, v_stride, keep, 0, V_1, V, KEYS, MASKED, PACKED, TMA)
        d_p = tl.dot(d_o_1, tl.trans(v_1), input_precision="ieee")
        if V_2 > 0:
            v_2 = load_keys(
                v_source_2, batch, group, first_key, v_stride, keep, V_1, V_2, V, KEYS, MASKED, PACKED, TMA)
            d_p = tl.dot(d_o_2, tl.trans(v_2), d_p, input_precision="ieee")
        p = tl.exp2(scores * score_scale - lse[:, None])
        if GATED:
            p = p * gate[:, None]
        d_scores = p * (d_p - delta[:, None])
        if MASKED:
            visible = (key[None, :] >= row_begin[:, None]) & (key[None, :] < row_end[:, None])
            d_scores = tl.where(visible, d_scores, 0.0)
        d_scores = d_scores.to(k_1.dtype)
        d_q_1 = tl.dot(d_scores, k_1, d_q_1, input_precision="ieee")
        if D_2 > 0:
            d_q_2 = tl.dot(d_scores, k_2, d_q_2, input_precision="ieee")
    return d_q_1, d_q_2


@Kernel
@triton.jit(do_not_specialize=[
    "num_queries", "query_shift", "window_size", "gate_batch_stride", "gate_time_stride", "gate_head_stride",
])
def interval_d_q_kernel(
    q, k_source_1, k_source_2, v_source_1, v_source_2, d_o, lse, delta, gate, d_q, ids, positions, first_blocks,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    d_o_batch_stride, d_o_time_stride, d_o_head_stride,
    gate_batch_stride, gate_time_stride, gate_head_stride,
    num_queries, query_shift, window_size, scale, score_scale,
    GROUPS: tl.constexpr, REP: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    COMPRESSED: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, PACKED: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TMA: tl.constexpr,
):
    """d_q of one tile of rows, in the order of the forward kernel; with ADD, added to what d_q holds."""
    batch, group, first_query, row, query, head, row_begin, row_end, begin, end, tiles, first_full, full = (
        place_rows_of_program(
            num_queries, query_shift, window_size, ids, positions, first_blocks,
            GROUPS, REP, COMPRESSED, BLOCK, STRIDE, PACKED, ROWS, KEYS))

    if not TMA:
        k_source_1 += batch.to(tl.int64) * k_batch_stride + group * k_head_stride
        k_source_2 += batch.to(tl.int64) * k_batch_stride + group * k_head_stride
        v_source_1 += batch.to(tl.int64) * v_batch_stride + group * v_head_stride
        v_source_2 += batch.to(tl.int64) * v_batch_stride + group * v_head_stride
    q += batch.to(tl.int64) * q_batch_stride + group * REP * q_head_stride
    d_o += batch.to(tl.int64) * d_o_batch_stride + group * REP * d_o_head_stride
    q_1 = load_rows(
        q, batch, group, first_query, query, head, q_time_stride, q_head_stride, 0, D_1, D, ROWS, REP, False)
    d_o_1 = load_rows(
        d_o, batch, group, first_query, query, head, d_o_time_stride, d_o_head_stride, 0, V_1, V, ROWS, REP, False)
    q_2, d_o_2 = q_1, d_o_1
    if D_2 > 0:
        q_2 = load_rows(
            q, batch, group, first_query, query, head, q_time_stride, q_head_stride, D_1, D_2, D, ROWS, REP, False)
    if V_2 > 0:
        d_o_2 = load_rows(
            d_o, batch, group, first_query, query, head, d_o_time_stride, d_o_head_stride,
            V_1, V_2, V, ROWS, REP, False)
    first_place = ((batch.to(tl.int64) * num_queries + first_query) * GROUPS + group) * REP
    place = (query - first_query) * (GROUPS * REP) + head
    row_lse = log2_sum(lse + first_place + place)
    row_delta = tl.load(delta + first_place + place)
    row_gate = row_delta
    if GATED:
        gate += batch.to(tl.int64) * gate_batch_stride + group * REP * gate_head_stride
        row_gate = tl.load(gate + query.to(tl.int64) * gate_time_stride + head * gate_head_stride).to(tl.float32)

    d_q_1 = tl.zeros([ROWS, D_1], tl.float32)
    d_q_2 = row_delta
    if D_2 > 0:
        d_q_2 = tl.zeros([ROWS, D_2], tl.float32)
    d_q_1, d_q_2 = _gather_d_q(
        d_q_1, d_q_2, q_1, q_2, d_o_1, d_o_2, row_lse, row_delta, row_gate,
        k_source_1, k_source_2, v_source_1, v_source_2, batch, group, k_time_stride, v_time_stride,
        begin, end, row_begin, row_end, full, 0, first_full, score_scale,
        D, D_1, D_2, V, V_1, V_2, KEYS, False, PACKED, GATED, TMA)
    d_q_1, d_q_2 = _gather_d_q(
        d_q_1, d_q_2, q_1, q_2, d_o_1, d_o_2, row_lse, row_delta, row_gate,
        k_source_1, k_source_2, v_source_1, v_source_2, batch, group, k_time_stride, v_time_stride,
        begin, end, row_begin, row_end, tiles - full, first_full, full, score_scale,
        D, D_1, D_2, V, V_1, V_2, KEYS, True, PACKED, GATED, TMA)
    keep = row < num_queries * REP
    d_q += first_place * D
    d_q_1 *= scale
    if ADD:
        d_q_1 += load_tile(d_q, place * D, keep, 0, D_1, D, True).to(tl.float32)
    store_tile(d_q, place * D, keep, d_q_1, 0, D_1, D)
    if D_2 > 0:
        d_q_2 *= scale
        if ADD:
            d_q_2 += load_tile(d_q, place * D, keep, D_1, D_2, D, True).to(tl.float32)
        store_tile(d_q, place * D, keep, d_q_2, D_1, D_2, D)


@triton.jit
def _gather_d_k_d_v(
    d_k_1, d_k_2, d_v_1, d_v_2, k_1, k_2, v_1, v_2, q_source_1, q_source_2, d_o_source_1, d_o_source_2,
    batch, group, lse, delta, gate, q_time_stride, q_head_stride, d_o_time_stride, d_o_head_stride,
    gate_time_stride, gate_head_stride, num_queries, row_origin, key_begin, key_end, count, split, jump, score_scale,
    GROUPS: tl.constexpr, REP: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    ROWS: tl.constexpr, MASKED: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr,
):
    """Add what `count` tiles of rows give to d_k and d_v; tiles from number `split` on lie `jump` further."""
    lost_k_1, lost_k_2 = nothing_lost(d_k_1, k_1), nothing_lost(d_k_2, k_1)
    lost_v_1, lost_v_2 = nothing_lost(d_v_1, v_1), nothing_lost(d_v_2, v_1)
    for number in tl.range(0, count):
        first_row = row_origin + (number + tl.where(number >= split, jump, 0)) * ROWS
        first_query = first_row // REP
        row = first_row + tl.arange(0, ROWS)
        query, head = place_rows(row, num_queries, REP)
        place = (query * (GROUPS * REP) + head).to(tl.int64)
        # Asked for before the products: where they are needed, each would cost the latency of a load.
        row_lse = log2_sum(lse + place)
        row_delta = tl.load(delta + place)
        row_gate = row_delta
        if GATED:
            row_gate = tl.load(gate + query.to(tl.int64) * gate_time_stride + head * gate_head_stride)
        q_1 = load_rows(
            q_source_1, batch, group, first_query, query, head, q_time_stride, q_head_stride,
            0, D_1, D, ROWS, REP, TMA)
        scores = tl.dot(k_1, tl.trans(q_1), input_precision="ieee")
        if D_2 > 0:
            q_2 = load_rows(
                q_source_2, batch, group, first_query, query, head, q_time_stride, q_head_stride,
                D_1, D_2, D, ROWS, REP, TMA)
            scores = tl.dot(k_2, tl.trans(q_2), scores, input_precision="ieee")
        p = tl.exp2(scores * score_scale - row_lse[None, :])
        if GATED:
            p = p * row_gate.to(tl.float32)[None, :]
        if MASKED:
            # By the row's own number: rows behind the last query must not count as that query.
            visible = (row[None, :] >= (key_begin * REP)[:, None]) & (row[None, :] < (key_end * REP)[:, None])
            p = tl.where(visible, p, 0.0)
        d_o_1 = load_rows(
            d_o_source_1, batch, group, first_query, query, head, d_o_time_stride, d_o_head_stride,
            0, V_1, V, ROWS, REP, TMA)
        d_v_1, lost_v_1 = add_product(d_v_1, lost_v_1, p.to(d_o_1.dtype), d_o_1)
        d_p = tl.dot(v_1, tl.trans(d_o_1), input_precision="ieee")
        if V_2 > 0:
            d_o_2 = load_rows(
                d_o_source_2, batch, group, first_query, query, head, d_o_time_stride, d_o_head_stride,
                V_1, V_2, V, ROWS, REP, TMA)
            d_v_2, lost_v_2 = add_product(d_v_2, lost_v_2, p.to(d_o_2.dtype), d_o_2)
            d_p = tl.dot(v_2, tl.trans(d_o_2), d_p, input_precision="ieee")
        d_scores = p * (d_p - row_delta[None, :])
        if MASKED:
            d_scores = tl.where(visible, d_scores, 0.0)
        d_scores = d_scores.to(q_1.dtype)
        d_k_1, lost_k_1 = add_product(d_k_1, lost_k_1, d_scores, q_1)
        if D_2 > 0:
            d_k_2, lost_k_2 = add_product(d_k_2, lost_k_2, d_scores, q_2)
    return d_k_1, d_k_2, d_v_1, d_v_2


@Kernel
@triton.jit(do_not_specialize=[
    "num_queries", "num_keys", "query_shift", "window_size", "batches", "parts",
    "gate_batch_stride", "gate_time_stride", "gate_head_stride",
])
def interval_d_k_d_v_kernel(
    q_source_1, q_source_2, k, v, d_o_source_1, d_o_source_2, lse, delta, gate, d_k, d_v, query_begin, query_end,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    d_o_batch_stride, d_o_time_stride, d_o_head_stride,
    gate_batch_stride, gate_time_stride, gate_head_stride,
    batches, parts, num_queries, num_keys, query_shift, window_size, scale, score_scale,
    GROUPS: tl.constexpr, REP: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    COMPRESSED: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, PACKED: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TMA: tl.constexpr,
):
    """d_k and d_v of one tile of keys, or one part of its rows: into [parts, B, keys, G, D] and [.., V]."""
    first_key = (tl.program_id(0) // parts) * KEYS
    part = tl.program_id(0) % parts
    batch = tl.program_id(1) // GROUPS
    group = tl.program_id(1) % GROUPS
    in_tile = tl.arange(0, KEYS)
    last_key = tl.minimum(first_key + KEYS, num_keys) - 1
    key = tl.minimum(first_key + in_tile, last_key)
    key_begin, key_end = seeing_queries(
        key, num_queries, query_shift, window_size, query_begin, query_end, COMPRESSED, BLOCK, STRIDE, PACKED)
    begin, full_end = seeing_queries(
        first_key, num_queries, query_shift, window_size, query_begin, query_end, COMPRESSED, BLOCK, STRIDE, PACKED)
    full_begin, end = seeing_queries(
        last_key, num_queries, query_shift, window_size, query_begin, query_end, COMPRESSED, BLOCK, STRIDE, PACKED)
    part_rows = tl.cdiv(tl.cdiv((end - begin) * REP, parts), ROWS) * ROWS
    row_origin = begin * REP + part * part_rows
    row_limit = tl.maximum(tl.minimum(row_origin + part_rows, end * REP), row_origin)
    tiles, first_full, last_full = full_tiles(row_origin, row_limit, full_begin * REP, full_end * REP, ROWS)
    full = last_full - first_full

    keep = first_key + in_tile < num_keys
    k += batch.to(tl.int64) * k_batch_stride + group * k_head_stride + first_key.to(tl.int64) * k_time_stride
    v += batch.to(tl.int64) * v_batch_stride + group * v_head_stride + first_key.to(tl.int64) * v_time_stride
    k_1 = load_tile(k, in_tile * k_time_stride, keep, 0, D_1, D, True)
    k_2 = k_1
    if D_2 > 0:
        k_2 = load_tile(k, in_tile * k_time_stride, keep, D_1, D_2, D, True)
    v_1 = load_tile(v, in_tile * v_time_stride, keep, 0, V_1, V, True)
    v_2 = v_1
    if V_2 > 0:
        v_2 = load_tile(v, in_tile * v_time_stride, keep, V_1, V_2, V, True)
    if not TMA:
        q_source_1 += batch.to(tl.int64) * q_batch_stride + group * REP * q_head_stride
        q_source_2 += batch.to(tl.int64) * q_batch_stride + group * REP * q_head_stride
        d_o_source_1 += batch.to(tl.int64) * d_o_batch_stride + group * REP * d_o_head_stride
        d_o_source_2 += batch.to(tl.int64) * d_o_batch_stride + group * REP * d_o_head_stride
    lse += (batch.to(tl.int64) * num_queries * GROUPS + group) * REP
    delta += (batch.to(tl.int64) * num_queries * GROUPS + group) * REP
    if GATED:
        gate += batch.to(tl.int64) * gate_batch_stride + group * REP * gate_head_stride

    d_k_1 = tl.zeros([KEYS, D_1], tl.float32)
    d_k_2 = d_k_1
    if D_2 > 0:
        d_k_2 = tl.zeros([KEYS, D_2], tl.float32)
    d_v_1 = tl.zeros([KEYS, V_1], tl.float32)
    d_v_2 = d_v_1
    if V_2 > 0:
        d_v_2 = tl.zeros([KEYS, V_2], tl.float32)
    d_k_1, d_k_2, d_v_1, d_v_2 = _gather_d_k_d_v(
        d_k_1, d_k_2, d_v_1, d_v_2, k_1, k_2, v_1, v_2, q_source_1, q_source_2, d_o_source_1, d_o_source_2,
        batch, group, lse, delta, gate, q_time_stride, q_head_stride, d_o_time_stride, d_o_head_stride,
        gate_time_stride, gate_head_stride, num_queries, row_origin, key_begin, key_end,
        full, 0, first_full, score_scale,
        GROUPS, REP, D, D_1, D_2, V, V_1, V_2, ROWS, False, GATED, TMA)
    d_k_1, d_k_2, d_v_1, d_v_2 = _gather_d_k_d_v(
        d_k_1, d_k_2, d_v_1, d_v_2, k_1, k_2, v_1, v_2, q_source_1, q_source_2, d_o_source_1, d_o_source_2,
        batch, group, lse, delta, gate, q_time_stride, q_head_stride, d_o_time_stride, d_o_head_stride,
        gate_time_stride, gate_head_stride, num_queries, row_origin, key_begin, key_end,
        tiles - full, first_full, full, score_scale,
        GROUPS, REP, D, D_1, D_2, V, V_1, V_2, ROWS, True, GATED, TMA)
    first_place = ((part * batches + batch).to(tl.int64) * num_keys + first_key) * GROUPS + group
    d_k += first_place * D
    d_v += first_place * V
    store_tile(d_k, in_tile * (GROUPS * D), keep, d_k_1 * scale, 0, D_1, D)
    if D_2 > 0:
        store_tile(d_k, in_tile * (GROUPS * D), keep, d_k_2 * scale, D_1, D_2, D)
    store_tile(d_v, in_tile * (GROUPS * V), keep, d_v_1, 0, V_1, V)
    if V_2 > 0:
        store_tile(d_v, in_tile * (GROUPS * V), keep, d_v_2, V_1, V_2, V)


@triton.jit
def _sum_parts(parts_of_x, d_x, parts, count, SIZE: tl.constexpr):
    """Add parts [parts, count] in order."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    keep = place < count
    value = tl.zeros([SIZE], tl.float32)
    for _ in tl.range(0, parts):
        value += tl.load(parts_of_x + place, mask=keep, other=0.0)
        parts_of_x += count
    tl.store(d_x + place, value.to(d_x.dtype.element_ty), mask=keep)


@Kernel
@triton.jit(do_not_specialize=["parts"])
def sum_parts_kernel(d_k_parts, d_v_parts, d_k, d_v, parts, d_k_count, d_v_count, SIZE: tl.constexpr):
    """SIZE numbers of d_k, or d_v, from their parts. Bytes: the parts in, the sums out, once."""
    if tl.program_id(1) == 0:
        _sum_parts(d_k_parts, d_k, parts, d_k_count, SIZE)
    else:
        _sum_parts(d_v_parts, d_v, parts, d_v_count, SIZE)

# fmt: on


def launch_backward(
    problem: IntervalProblem,
    d_q: Tensor | None = None,
    d_q_tile: Tile | None = None,
    d_k_d_v_tile: Tile | None = None,
    parts: int | None = None,
    tma: bool | None = None,
    hopper_d_q: dict[str, Any] | None = None,
    hopper_d_k_d_v: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention.

    Args:
        problem: Inputs, in any strides.
        d_q: Gradient of the queries from elsewhere, contiguous, [B, T, H, D], that this one is added to in place.
        d_q_tile, d_k_d_v_tile, parts, tma: Configuration instead of the table's, for measurements.
        hopper_d_q, hopper_d_k_d_v: Configurations of the Hopper kernels, to take them.

    Returns:
        d_q, d_k, d_v, contiguous, in the types of q, k, v.
    """
    problem = problem._replace(**{name: unit_stride(getattr(problem, name)) for name in ("d_o", "q", "k", "v")})
    d_q = launch_d_q(problem, d_q, d_q_tile, tma, hopper_d_q)
    return d_q, *launch_d_k_d_v(problem, d_k_d_v_tile, parts, tma, hopper_d_k_d_v)


def launch_d_q(
    problem: IntervalProblem,
    d_q: Tensor | None = None,
    tile: Tile | None = None,
    tma: bool | None = None,
    hopper: dict[str, Any] | None = None,
) -> Tensor:
    """The first part of `launch_backward`."""
    d_o, q, k, v, lse, delta, gate, scale, branch = problem
    if tile is None and hopper is None:
        hopper = choose_hopper("d_q", branch, q, k, v, d_o)
    if hopper is not None:
        from trifocal.ops.triton.interval_hopper_d_q import launch_hopper_d_q

        return launch_hopper_d_q(problem, d_q, **hopper)
    batch, num_queries = q.shape[:2]
    num_groups, rep = k.shape[2], problem.rep
    tile = tile or choose_tile("d_q", q, v, window=branch.window_size > 0)
    tma = tma_fits(k, v) if tma is None else tma
    d_width, v_width = split_width(q.shape[3]), split_width(v.shape[3])
    add = d_q is not None
    if d_q is None:
        d_q = q.new_empty(q.shape)
    interval_d_q_kernel[cdiv(num_queries * rep, tile.rows), batch * num_groups](
        q,
        *key_sources(k, d_width, tile.keys, tma),
        *key_sources(v, v_width, tile.keys, tma),
        d_o,
        lse,
        delta,
        gate,
        d_q,
        branch.ids,
        branch.positions,
        branch.first_blocks,
        *strides(q),
        *strides(k),
        *strides(v),
        *strides(d_o),
        *problem.gate_strides,
        num_queries,
        branch.query_shift,
        branch.window_size,
        scale,
        problem.score_scale,
        num_groups,
        rep,
        *d_width,
        *v_width,
        **problem.constants(),
        ADD=add,
        ROWS=tile.rows,
        KEYS=tile.keys,
        TMA=tma,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
    )
    return d_q


def launch_d_k_d_v(
    problem: IntervalProblem,
    tile: Tile | None = None,
    parts: int | None = None,
    tma: bool | None = None,
    hopper: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """The second part of `launch_backward`."""
    d_o, q, k, v, lse, delta, gate, scale, branch = problem
    if tile is None and hopper is None:
        hopper = choose_hopper("d_k_d_v", branch, q, k, v, d_o)
    if hopper is not None:
        from trifocal.ops.triton.interval_hopper_d_k_d_v import launch_hopper_d_k_d_v

        return launch_hopper_d_k_d_v(problem, parts, **hopper)
    batch, num_queries = q.shape[:2]
    num_keys, num_groups = k.shape[1:3]
    rep = problem.rep
    tile = tile or choose_tile("d_k_d_v", q, v, window=branch.window_size > 0)
    if tma is None:
        tma = tile.rows % rep == 0 and rep & (rep - 1) == 0 and tma_fits(q, d_o)
    d_width, v_width = split_width(q.shape[3]), split_width(v.shape[3])
    tiles = cdiv(num_keys, tile.keys)
    d_k, d_v, parts = empty_parts(problem, tiles, tile, parts)
    if num_keys:
        interval_d_k_d_v_kernel[tiles * parts, batch * num_groups](
            *row_sources(q, d_width, tile.rows, num_groups, tma),
            k,
            v,
            *row_sources(d_o, v_width, tile.rows, num_groups, tma),
            lse,
            delta,
            gate,
            d_k,
            d_v,
            branch.query_begin,
            branch.query_end,
            *strides(q),
            *strides(k),
            *strides(v),
            *strides(d_o),
            *problem.gate_strides,
            batch,
            parts,
            num_queries,
            num_keys,
            branch.query_shift,
            branch.window_size,
            scale,
            problem.score_scale,
            num_groups,
            rep,
            *d_width,
            *v_width,
            **problem.constants(),
            ROWS=tile.rows,
            KEYS=tile.keys,
            TMA=tma,
            num_warps=tile.warps,
            num_stages=tile.stages,
            maxnreg=tile.registers,
        )
    return add_parts(problem, d_k, d_v)


def empty_parts(problem: IntervalProblem, key_tiles: int, tile: Tile, parts: int | None) -> tuple[Tensor, Tensor, int]:
    """Memory for d_k and d_v, and how many parts: of the compressed branch fp32 sums to add up, [parts, B, S, G, *]."""
    q, k, v = problem.q, problem.k, problem.v
    if problem.branch.window_size > 0:
        return k.new_empty(k.shape), v.new_empty(v.shape), 1
    parts = parts or choose_parts(q, key_tiles * q.shape[0] * k.shape[2], problem.rep, tile)
    d_k, d_v = (x.new_empty(parts, *x.shape, dtype=torch.float32) for x in (k, v))
    return d_k, d_v, parts


def add_parts(problem: IntervalProblem, d_k_parts: Tensor, d_v_parts: Tensor) -> tuple[Tensor, Tensor]:
    """d_k and d_v of what `empty_parts` gave memory for."""
    k, v = problem.k, problem.v
    if problem.branch.window_size > 0:
        return d_k_parts, d_v_parts
    d_k, d_v = k.new_empty(k.shape), v.new_empty(v.shape)
    d_k_count, d_v_count = d_k.numel(), d_v.numel()
    if d_k_count:
        sum_parts_kernel[cdiv(max(d_k_count, d_v_count), 512), 2](
            d_k_parts, d_v_parts, d_k, d_v, d_k_parts.shape[0], d_k_count, d_v_count, SIZE=512
        )
    return d_k, d_v


def choose_parts(q: Tensor, programs: int, heads_per_group: int, tile: Tile) -> int:
    """Into how many programs the rows of a key tile are split, so that no multiprocessor waits long for another.

    Sixteen programs a multiprocessor, half of them long; but each with at least four tiles of rows, and no more
    than 32, since each writes sums of its own.
    """
    wanted = cdiv(16 * multiprocessors(q.device), max(1, programs))
    return max(1, min(32, wanted, q.shape[1] * heads_per_group // (4 * tile.rows)))
