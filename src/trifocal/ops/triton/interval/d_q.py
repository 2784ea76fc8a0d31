"""d_q of attention to a range of keys; see `interval.common`."""

import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import dispatch, tiles
from trifocal.ops.tiles import cdiv, split_width
from trifocal.ops.triton.common import load_tile, store_tile, strides, zeros_in_parts
from trifocal.ops.triton.interval.common import (
    IntervalProblem,
    key_sources,
    load_and_multiply_keys,
    load_rows,
    log2_sum,
    place_rows_of_program,
)
from trifocal.ops.triton.launch import Kernel

# fmt: off

@triton.jit
def _sum_d_q(
    d_q_1, d_q_2, queries, d_o, lse, delta, gate, k_sources, v_sources, batch, group,
    k_stride, v_stride, key_origin, key_limit, row_begin, row_end, count, split, jump, score_scale,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr,
):
    """Add the shares of `count` key tiles to d_q; tiles from number `split` on lie `jump` tiles further."""
    for number in tl.range(0, count):
        first_key = key_origin + (number + tl.where(number >= split, jump, 0)) * KEYS
        key = first_key + tl.arange(0, KEYS)
        keep = key < key_limit
        scores, keys = load_and_multiply_keys(
            queries, k_sources, batch, group, first_key, k_stride, keep, D, D_1, D_2, KEYS, MASKED, PACKED, TMA)
        d_p, _values = load_and_multiply_keys(
            d_o, v_sources, batch, group, first_key, v_stride, keep, V, V_1, V_2, KEYS, MASKED, PACKED, TMA)
        p = tl.exp2(scores * score_scale - lse[:, None])
        if GATED:
            p = p * gate[:, None]
        d_scores = p * (d_p - delta[:, None])
        if MASKED:
            visible = (key[None, :] >= row_begin[:, None]) & (key[None, :] < row_end[:, None])
            d_scores = tl.where(visible, d_scores, 0.0)
        d_scores = d_scores.to(keys[0].dtype)
        d_q_1 = tl.dot(d_scores, keys[0], d_q_1, input_precision="ieee")
        if D_2 > 0:
            d_q_2 = tl.dot(d_scores, keys[1], d_q_2, input_precision="ieee")
    return d_q_1, d_q_2


@Kernel
@triton.jit(do_not_specialize=[
    "num_queries", "query_shift", "window_size", "gate_batch_stride", "gate_time_stride", "gate_head_stride",
])
def interval_d_q_kernel(
    q, k_source_1, k_source_2, v_source_1, v_source_2, d_o, lse, delta, gate, d_q, ids, positions, first_blocks,
    q_batch_stride, q_time_stride, q_head_stride, k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride, d_o_batch_stride, d_o_time_stride, d_o_head_stride,
    gate_batch_stride, gate_time_stride, gate_head_stride, num_queries, query_shift, window_size, scale, score_scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    COMPRESSED: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, PACKED: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TMA: tl.constexpr,
):
    """d_q of one tile of rows, in the order of the forward kernel; with ADD, added to the old values of d_q."""
    masks = (query_shift, window_size, ids, positions, first_blocks)
    batch, group, first_query, row, query, head, row_begin, row_end, begin, end, tiles, first_full, full = (
        place_rows_of_program(num_queries, masks, GROUPS, Q_PER_KV, COMPRESSED, BLOCK, STRIDE, PACKED, ROWS, KEYS))

    if not TMA:
        k_source_1 += batch.to(tl.int64) * k_batch_stride + group * k_head_stride
        k_source_2 += batch.to(tl.int64) * k_batch_stride + group * k_head_stride
        v_source_1 += batch.to(tl.int64) * v_batch_stride + group * v_head_stride
        v_source_2 += batch.to(tl.int64) * v_batch_stride + group * v_head_stride
    q += batch.to(tl.int64) * q_batch_stride + group * Q_PER_KV * q_head_stride
    d_o += batch.to(tl.int64) * d_o_batch_stride + group * Q_PER_KV * d_o_head_stride
    q_1 = load_rows(
        q, batch, group, first_query, query, head, q_time_stride, q_head_stride, 0, D_1, D, ROWS, False)
    d_o_1 = load_rows(
        d_o, batch, group, first_query, query, head, d_o_time_stride, d_o_head_stride, 0, V_1, V, ROWS, False)
    q_2, d_o_2 = q_1, d_o_1
    if D_2 > 0:
        q_2 = load_rows(
            q, batch, group, first_query, query, head, q_time_stride, q_head_stride, D_1, D_2, D, ROWS, False)
    if V_2 > 0:
        d_o_2 = load_rows(
            d_o, batch, group, first_query, query, head, d_o_time_stride, d_o_head_stride,
            V_1, V_2, V, ROWS, False)
    first_place = ((batch.to(tl.int64) * num_queries + first_query) * GROUPS + group) * Q_PER_KV
    place = (query - first_query) * (GROUPS * Q_PER_KV) + head
    row_lse = log2_sum(lse + first_place + place)
    row_delta = tl.load(delta + first_place + place)
    row_gate = row_delta
    if GATED:
        gate += batch.to(tl.int64) * gate_batch_stride + group * Q_PER_KV * gate_head_stride
        row_gate = tl.load(gate + query.to(tl.int64) * gate_time_stride + head * gate_head_stride).to(tl.float32)

    d_q_1, d_q_2 = zeros_in_parts(ROWS, D_1, D_2)
    d_q_1, d_q_2 = _sum_d_q(
        d_q_1, d_q_2, (q_1, q_2), (d_o_1, d_o_2), row_lse, row_delta, row_gate,
        (k_source_1, k_source_2), (v_source_1, v_source_2), batch, group, k_time_stride, v_time_stride,
        begin, end, row_begin, row_end, full, 0, first_full, score_scale,
        D, D_1, D_2, V, V_1, V_2, KEYS, False, PACKED, GATED, TMA)
    d_q_1, d_q_2 = _sum_d_q(
        d_q_1, d_q_2, (q_1, q_2), (d_o_1, d_o_2), row_lse, row_delta, row_gate,
        (k_source_1, k_source_2), (v_source_1, v_source_2), batch, group, k_time_stride, v_time_stride,
        begin, end, row_begin, row_end, tiles - full, first_full, full, score_scale,
        D, D_1, D_2, V, V_1, V_2, KEYS, True, PACKED, GATED, TMA)
    keep = row < num_queries * Q_PER_KV
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

# fmt: on


def launch_d_q(problem: IntervalProblem, d_q: Tensor | None = None) -> Tensor:
    """The first part of `dkdv.launch_backward`."""
    d_o, q, k, v, lse, delta, gate, scale, branch = problem
    window, packed = branch.is_window, branch.is_packed
    configuration = dispatch.interval_on_hopper("d_q", q, k, v, d_o, window=window, packed=packed)
    if configuration is not None:
        return dispatch.hopper("interval.d_q").launch_d_q(problem, d_q, **configuration)
    batch, num_queries = q.shape[:2]
    num_groups, q_per_kv = k.shape[2], problem.q_per_kv
    tile = tiles.interval_tile("d_q", q, v, window=window)
    tma = dispatch.tma_fits(k, v)
    d_width, v_width = split_width(q.shape[3]), split_width(v.shape[3])
    add = d_q is not None
    if d_q is None:
        d_q = q.new_empty(q.shape)
    interval_d_q_kernel[cdiv(num_queries * q_per_kv, tile.BLOCK_M), batch * num_groups](
        q, *key_sources(k, d_width, tile.BLOCK_N, tma), *key_sources(v, v_width, tile.BLOCK_N, tma), d_o, lse, delta,
        gate, d_q, branch.ids, branch.positions, branch.first_blocks, *strides(q), *strides(k), *strides(v),
        *strides(d_o), *problem.gate_strides, num_queries, branch.query_shift, branch.window_size, scale,
        problem.score_scale, num_groups, q_per_kv, *d_width, *v_width, **problem.constants(), ADD=add,
        ROWS=tile.BLOCK_M, KEYS=tile.BLOCK_N, TMA=tma, num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=tile.registers,
    )  # fmt: skip
    return d_q
