"""Forward of attention to a range of keys; see `interval.common`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import dispatch, tiles
from trifocal.ops.tiles import cdiv, split_width
from trifocal.ops.triton.common import LN_2, LOG2_E, load_parts, nothing_yet, store_parts, strides, unit_stride
from trifocal.ops.triton.interval.common import (
    Branch,
    key_sources,
    load_and_multiply_keys,
    load_keys,
    place_rows_of_program,
)
from trifocal.ops.triton.launch import Kernel

# fmt: off

@triton.jit
def _attend(
    softmax, queries, k_sources, v_sources, batch, group,
    k_stride, v_stride, key_origin, key_limit, row_begin, row_end, count, split, jump, score_scale,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr,
):
    """Take `count` key tiles into the running softmax; tiles from number `split` on lie `jump` tiles further."""
    o_1, o_2, running_max, running_sum = softmax
    for number in tl.range(0, count):
        first_key = key_origin + (number + tl.where(number >= split, jump, 0)) * KEYS
        key = first_key + tl.arange(0, KEYS)
        keep = key < key_limit
        scores, _keys = load_and_multiply_keys(
            queries, k_sources, batch, group, first_key, k_stride, keep, D, D_1, D_2, KEYS, MASKED, PACKED, TMA)
        if MASKED:
            visible = (key[None, :] >= row_begin[:, None]) & (key[None, :] < row_end[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1) * score_scale)
        p = tl.exp2(scores * score_scale - new_max[:, None])
        decay = tl.exp2(running_max - new_max)
        running_max = new_max
        running_sum = running_sum * decay + tl.sum(p, 1)
        v_1 = load_keys(
            v_sources[0], batch, group, first_key, v_stride, keep, 0, V_1, V, KEYS, MASKED, PACKED, TMA)
        p = p.to(v_1.dtype)
        o_1 = tl.dot(p, v_1, o_1 * decay[:, None], input_precision="ieee")
        if V_2 > 0:
            v_2 = load_keys(
                v_sources[1], batch, group, first_key, v_stride, keep, V_1, V_2, V, KEYS, MASKED, PACKED, TMA)
            o_2 = tl.dot(p, v_2, o_2 * decay[:, None], input_precision="ieee")
    return o_1, o_2, running_max, running_sum


@Kernel
@triton.jit(do_not_specialize=["num_queries", "query_shift", "window_size"])
def interval_forward_kernel(
    q, k_source_1, k_source_2, v_source_1, v_source_2, o, lse, ids, positions, first_blocks,
    q_batch_stride, q_time_stride, q_head_stride, k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride, num_queries, query_shift, window_size, score_scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    COMPRESSED: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TMA: tl.constexpr,
):
    """o and lse of one tile of rows."""
    masks = (query_shift, window_size, ids, positions, first_blocks)
    batch, group, first_query, row, query, head, row_begin, row_end, begin, end, tiles, first_full, full = (
        place_rows_of_program(num_queries, masks, GROUPS, Q_PER_KV, COMPRESSED, BLOCK, STRIDE, PACKED, ROWS, KEYS))

    if not TMA:
        k_source_1 += batch.to(tl.int64) * k_batch_stride + group * k_head_stride
        k_source_2 += batch.to(tl.int64) * k_batch_stride + group * k_head_stride
        v_source_1 += batch.to(tl.int64) * v_batch_stride + group * v_head_stride
        v_source_2 += batch.to(tl.int64) * v_batch_stride + group * v_head_stride
    q += batch.to(tl.int64) * q_batch_stride + group * Q_PER_KV * q_head_stride
    q += first_query.to(tl.int64) * q_time_stride
    q_offsets = (query - first_query) * q_time_stride + head * q_head_stride
    queries = load_parts(q, q_offsets, query >= 0, D, D_1, D_2, False)
    softmax = nothing_yet(ROWS, V_1, V_2)
    softmax = _attend(
        softmax, queries, (k_source_1, k_source_2), (v_source_1, v_source_2), batch, group,
        k_time_stride, v_time_stride, begin, end, row_begin, row_end, full, 0, first_full, score_scale,
        D, D_1, D_2, V, V_1, V_2, KEYS, False, PACKED, TMA)
    softmax = _attend(
        softmax, queries, (k_source_1, k_source_2), (v_source_1, v_source_2), batch, group,
        k_time_stride, v_time_stride, begin, end, row_begin, row_end, tiles - full, first_full, full, score_scale,
        D, D_1, D_2, V, V_1, V_2, KEYS, True, PACKED, TMA)

    o_1, o_2, running_max, running_sum = softmax
    sees = running_sum > 0
    inverse = tl.where(sees, 1.0 / tl.where(sees, running_sum, 1.0), 0.0)
    keep = row < num_queries * Q_PER_KV
    # o and lse are contiguous, so one number places a row: ((batch * T + query) * G + group) * R + head.
    first_place = ((batch.to(tl.int64) * num_queries + first_query) * GROUPS + group) * Q_PER_KV
    place = (query - first_query) * (GROUPS * Q_PER_KV) + head
    store_parts(o + first_place * V, place * V, keep, inverse[:, None], (o_1, o_2), V, V_1, V_2)
    natural = tl.where(sees, (running_max + tl.log2(tl.where(sees, running_sum, 1.0))) * LN_2, float("-inf"))
    tl.store(lse + first_place + place, natural, mask=keep)

# fmt: on


def launch_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, branch: Branch) -> tuple[Tensor, Tensor]:
    """Attend: q [B, T, H, D], k [B, S, G, D], v [B, S, G, V] -> o [B, T, H, V], in q's type, and lse [B, T, H], fp32,
    natural log, -inf where nothing is seen. S may be 0.
    """
    batch, num_queries, num_heads, _ = q.shape
    num_groups = k.shape[2]
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    configuration = dispatch.interval_on_hopper("forward", q, k, v, window=branch.is_window, packed=branch.is_packed)
    if configuration is not None:
        return dispatch.hopper("interval.forward").launch_forward(q, k, v, scale, branch, **configuration)
    tile = tiles.interval_tile("forward", q, v, window=branch.is_window)
    tma = dispatch.tma_fits(k, v)
    d_width, v_width = split_width(q.shape[3]), split_width(v.shape[3])
    o = q.new_empty(batch, num_queries, num_heads, v_width.size)
    lse = q.new_empty(batch, num_queries, num_heads, dtype=torch.float32)
    q_per_kv = num_heads // num_groups
    interval_forward_kernel[cdiv(num_queries * q_per_kv, tile.BLOCK_M), batch * num_groups](
        q, *key_sources(k, d_width, tile.BLOCK_N, tma), *key_sources(v, v_width, tile.BLOCK_N, tma), o, lse, branch.ids,
        branch.positions, branch.first_blocks, *strides(q), *strides(k), *strides(v), num_queries, branch.query_shift,
        branch.window_size, scale * LOG2_E, num_groups, q_per_kv, *d_width, *v_width, **branch.constants(),
        ROWS=tile.BLOCK_M, KEYS=tile.BLOCK_N, TMA=tma, num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=tile.registers,
    )  # fmt: skip
    return o, lse
