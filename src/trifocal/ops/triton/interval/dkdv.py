"""d_k and d_v of attention to a range of keys; see `interval.common`.

Backward takes the gradient of the mixed output and the branch's gate instead of their product `gate * d_o`, which would
be one more tensor a branch. The compressed branch has few key tiles, which very different numbers of queries see: its
rows are shared by several programs, whose sums are added up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import dispatch, tiles
from trifocal.ops.tiles import cdiv, split_width
from trifocal.ops.triton.common import (
    add_product,
    load_parts,
    nothing_lost,
    store_parts,
    strides,
    unit_stride,
    zeros_in_parts,
)
from trifocal.ops.triton.interval.common import (
    IntervalProblem,
    full_tiles,
    load_rows,
    log2_sum,
    place_rows,
    row_sources,
    seeing_queries,
)
from trifocal.ops.triton.interval.d_q import launch_d_q
from trifocal.ops.triton.launch import Kernel

# fmt: off

@triton.jit
def _sum_dkdv(
    d_k, d_v, keys, values, q_sources, d_o_sources,
    batch, group, lse, delta, gate, q_time_stride, q_head_stride, d_o_time_stride, d_o_head_stride,
    gate_time_stride, gate_head_stride, num_queries, row_origin, key_begin, key_end, count, split, jump, score_scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    ROWS: tl.constexpr, MASKED: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr,
):
    """Add the shares of `count` tiles of rows to d_k and d_v; tiles from number `split` on lie `jump` further."""
    d_k_1, d_k_2 = d_k
    d_v_1, d_v_2 = d_v
    lost_k_1, lost_k_2 = nothing_lost(d_k_1, keys[0]), nothing_lost(d_k_2, keys[0])
    lost_v_1, lost_v_2 = nothing_lost(d_v_1, keys[0]), nothing_lost(d_v_2, keys[0])
    for number in tl.range(0, count):
        first_row = row_origin + (number + tl.where(number >= split, jump, 0)) * ROWS
        first_query = first_row // Q_PER_KV
        row = first_row + tl.arange(0, ROWS)
        query, head = place_rows(row, num_queries, Q_PER_KV)
        place = (query * (GROUPS * Q_PER_KV) + head).to(tl.int64)
        # Asked for before the products: where they are needed, each would cost the latency of a load.
        row_lse = log2_sum(lse + place)
        row_delta = tl.load(delta + place)
        row_gate = row_delta
        if GATED:
            row_gate = tl.load(gate + query.to(tl.int64) * gate_time_stride + head * gate_head_stride)
        q_1 = load_rows(
            q_sources[0], batch, group, first_query, query, head, q_time_stride, q_head_stride,
            0, D_1, D, ROWS, TMA)
        scores = tl.dot(keys[0], tl.trans(q_1), input_precision="ieee")
        if D_2 > 0:
            q_2 = load_rows(
                q_sources[1], batch, group, first_query, query, head, q_time_stride, q_head_stride,
                D_1, D_2, D, ROWS, TMA)
            scores = tl.dot(keys[1], tl.trans(q_2), scores, input_precision="ieee")
        p = tl.exp2(scores * score_scale - row_lse[None, :])
        if GATED:
            p = p * row_gate.to(tl.float32)[None, :]
        if MASKED:
            # By the row's own number: rows behind the last query must not count as that query.
            visible = (row[None, :] >= (key_begin * Q_PER_KV)[:, None]) & (row[None, :] < (key_end * Q_PER_KV)[:, None])
            p = tl.where(visible, p, 0.0)
        d_o_1 = load_rows(
            d_o_sources[0], batch, group, first_query, query, head, d_o_time_stride, d_o_head_stride,
            0, V_1, V, ROWS, TMA)
        d_v_1, lost_v_1 = add_product(d_v_1, lost_v_1, p.to(d_o_1.dtype), d_o_1)
        d_p = tl.dot(values[0], tl.trans(d_o_1), input_precision="ieee")
        if V_2 > 0:
            d_o_2 = load_rows(
                d_o_sources[1], batch, group, first_query, query, head, d_o_time_stride, d_o_head_stride,
                V_1, V_2, V, ROWS, TMA)
            d_v_2, lost_v_2 = add_product(d_v_2, lost_v_2, p.to(d_o_2.dtype), d_o_2)
            d_p = tl.dot(values[1], tl.trans(d_o_2), d_p, input_precision="ieee")
        d_scores = p * (d_p - row_delta[None, :])
        if MASKED:
            d_scores = tl.where(visible, d_scores, 0.0)
        d_scores = d_scores.to(q_1.dtype)
        d_k_1, lost_k_1 = add_product(d_k_1, lost_k_1, d_scores, q_1)
        if D_2 > 0:
            d_k_2, lost_k_2 = add_product(d_k_2, lost_k_2, d_scores, q_2)
    return (d_k_1, d_k_2), (d_v_1, d_v_2)


@Kernel
@triton.jit(do_not_specialize=[
    "num_queries", "num_keys", "query_shift", "window_size", "batches", "parts",
    "gate_batch_stride", "gate_time_stride", "gate_head_stride",
])
def interval_dkdv_kernel(
    q_source_1, q_source_2, k, v, d_o_source_1, d_o_source_2, lse, delta, gate, d_k, d_v, query_begin, query_end,
    q_batch_stride, q_time_stride, q_head_stride, k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride, d_o_batch_stride, d_o_time_stride, d_o_head_stride,
    gate_batch_stride, gate_time_stride, gate_head_stride,
    batches, parts, num_queries, num_keys, query_shift, window_size, scale, score_scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr,
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
    masks = (query_shift, window_size, query_begin, query_end)
    key_begin, key_end = seeing_queries(key, num_queries, masks, COMPRESSED, BLOCK, STRIDE, PACKED)
    begin, full_end = seeing_queries(first_key, num_queries, masks, COMPRESSED, BLOCK, STRIDE, PACKED)
    full_begin, end = seeing_queries(last_key, num_queries, masks, COMPRESSED, BLOCK, STRIDE, PACKED)
    part_rows = tl.cdiv(tl.cdiv((end - begin) * Q_PER_KV, parts), ROWS) * ROWS
    row_origin = begin * Q_PER_KV + part * part_rows
    row_limit = tl.maximum(tl.minimum(row_origin + part_rows, end * Q_PER_KV), row_origin)
    tiles, first_full, last_full = full_tiles(row_origin, row_limit, full_begin * Q_PER_KV, full_end * Q_PER_KV, ROWS)
    full = last_full - first_full

    keep = first_key + in_tile < num_keys
    k += batch.to(tl.int64) * k_batch_stride + group * k_head_stride + first_key.to(tl.int64) * k_time_stride
    v += batch.to(tl.int64) * v_batch_stride + group * v_head_stride + first_key.to(tl.int64) * v_time_stride
    keys = load_parts(k, in_tile * k_time_stride, keep, D, D_1, D_2, True)
    values = load_parts(v, in_tile * v_time_stride, keep, V, V_1, V_2, True)
    if not TMA:
        q_source_1 += batch.to(tl.int64) * q_batch_stride + group * Q_PER_KV * q_head_stride
        q_source_2 += batch.to(tl.int64) * q_batch_stride + group * Q_PER_KV * q_head_stride
        d_o_source_1 += batch.to(tl.int64) * d_o_batch_stride + group * Q_PER_KV * d_o_head_stride
        d_o_source_2 += batch.to(tl.int64) * d_o_batch_stride + group * Q_PER_KV * d_o_head_stride
    lse += (batch.to(tl.int64) * num_queries * GROUPS + group) * Q_PER_KV
    delta += (batch.to(tl.int64) * num_queries * GROUPS + group) * Q_PER_KV
    if GATED:
        gate += batch.to(tl.int64) * gate_batch_stride + group * Q_PER_KV * gate_head_stride

    d_keys, d_values = zeros_in_parts(KEYS, D_1, D_2), zeros_in_parts(KEYS, V_1, V_2)
    d_keys, d_values = _sum_dkdv(
        d_keys, d_values, keys, values, (q_source_1, q_source_2), (d_o_source_1, d_o_source_2),
        batch, group, lse, delta, gate, q_time_stride, q_head_stride, d_o_time_stride, d_o_head_stride,
        gate_time_stride, gate_head_stride, num_queries, row_origin, key_begin, key_end,
        full, 0, first_full, score_scale,
        GROUPS, Q_PER_KV, D, D_1, D_2, V, V_1, V_2, ROWS, False, GATED, TMA)
    d_keys, d_values = _sum_dkdv(
        d_keys, d_values, keys, values, (q_source_1, q_source_2), (d_o_source_1, d_o_source_2),
        batch, group, lse, delta, gate, q_time_stride, q_head_stride, d_o_time_stride, d_o_head_stride,
        gate_time_stride, gate_head_stride, num_queries, row_origin, key_begin, key_end,
        tiles - full, first_full, full, score_scale,
        GROUPS, Q_PER_KV, D, D_1, D_2, V, V_1, V_2, ROWS, True, GATED, TMA)
    first_place = ((part * batches + batch).to(tl.int64) * num_keys + first_key) * GROUPS + group
    d_k += first_place * D
    d_v += first_place * V
    store_parts(d_k, in_tile * (GROUPS * D), keep, scale, d_keys, D, D_1, D_2)
    store_parts(d_v, in_tile * (GROUPS * V), keep, 1.0, d_values, V, V_1, V_2)

# fmt: on


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


def launch_backward(problem: IntervalProblem, d_q: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for inputs in any strides: d_q, d_k, d_v, contiguous; a given d_q [B, T, H, D] is added to in place."""
    problem = problem._replace(**{name: unit_stride(getattr(problem, name)) for name in ("d_o", "q", "k", "v")})
    return launch_d_q(problem, d_q), *launch_dkdv(problem)


def launch_dkdv(problem: IntervalProblem) -> tuple[Tensor, Tensor]:
    """The second part of `launch_backward`."""
    d_o, q, k, v, lse, delta, gate, scale, branch = problem
    window, packed = branch.is_window, branch.is_packed
    configuration = dispatch.interval_on_hopper("dkdv", q, k, v, d_o, window=window, packed=packed)
    if configuration is not None:
        return dispatch.hopper("interval.dkdv").launch_dkdv(problem, **configuration)
    batch, num_queries = q.shape[:2]
    num_keys, num_groups = k.shape[1:3]
    q_per_kv = problem.q_per_kv
    tile = tiles.interval_tile("dkdv", q, v, window=window)
    tma = tile.BLOCK_M % q_per_kv == 0 and q_per_kv & (q_per_kv - 1) == 0 and dispatch.tma_fits(q, d_o)
    d_width, v_width = split_width(q.shape[3]), split_width(v.shape[3])
    key_tiles = cdiv(num_keys, tile.BLOCK_N)
    d_k, d_v, parts = empty_parts(problem, key_tiles, tile.BLOCK_M)
    if num_keys:
        interval_dkdv_kernel[key_tiles * parts, batch * num_groups](
            *row_sources(q, d_width, tile.BLOCK_M, num_groups, tma), k, v,
            *row_sources(d_o, v_width, tile.BLOCK_M, num_groups, tma), lse, delta, gate, d_k, d_v, branch.query_begin,
            branch.query_end, *strides(q), *strides(k), *strides(v), *strides(d_o), *problem.gate_strides, batch, parts,
            num_queries, num_keys, branch.query_shift, branch.window_size, scale, problem.score_scale, num_groups,
            q_per_kv, *d_width, *v_width, **problem.constants(), ROWS=tile.BLOCK_M, KEYS=tile.BLOCK_N, TMA=tma,
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        )  # fmt: skip
    return add_parts(problem, d_k, d_v)


def empty_parts(problem: IntervalProblem, key_tiles: int, rows: int) -> tuple[Tensor, Tensor, int]:
    """Memory for d_k and d_v, and how many parts: of the compressed branch fp32 sums to add up, [parts, B, S, G, *]."""
    q, k, v = problem.q, problem.k, problem.v
    if problem.branch.is_window:
        return k.new_empty(k.shape), v.new_empty(v.shape), 1
    parts = dispatch.interval_parts(q, key_tiles * q.shape[0] * k.shape[2], problem.q_per_kv, rows)
    d_k, d_v = (x.new_empty(parts, *x.shape, dtype=torch.float32) for x in (k, v))
    return d_k, d_v, parts


def add_parts(problem: IntervalProblem, d_k_parts: Tensor, d_v_parts: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the parts of d_k and d_v; memory for them comes from `empty_parts`."""
    k, v = problem.k, problem.v
    if problem.branch.is_window:
        return d_k_parts, d_v_parts
    d_k, d_v = k.new_empty(k.shape), v.new_empty(v.shape)
    d_k_count, d_v_count = d_k.numel(), d_v.numel()
    if d_k_count:
        sum_parts_kernel[cdiv(max(d_k_count, d_v_count), 512), 2](
            d_k_parts, d_v_parts, d_k, d_v, d_k_parts.shape[0], d_k_count, d_v_count, SIZE=512
        )
    return d_k, d_v
