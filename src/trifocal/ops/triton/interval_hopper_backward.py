"""The backward kernels of interval attention for Hopper, in Gluon; see `interval_hopper` for how programs are divided.

| kernel | both halves of the warps share | each half holds | loop |
|---|---|---|---|
| d_q | key and value tiles | 64 rows of q, d_o and d_q | key tiles, as in forward |
| d_k, d_v | tiles of 64 rows of q, d_o | 64 keys, values, d_k and d_v | row tiles, those that need a mask first |

With keys as the rows of the scores, probabilities and d_scores stay in registers: they are left factors of the products
that make d_v and d_k. lse, delta and gates of a row tile come through the copy engine too, from [B, T, H] in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trifocal.ops.triton.common import Tile, multiprocessors, split_width
from trifocal.ops.triton.interval import Branch, seeing_queries, visible_keys
from trifocal.ops.triton.interval_backward import LOG2_E, choose_parts, sum_parts
from trifocal.ops.triton.interval_hopper import (
    PART_ROWS,
    allocate_tiles,
    copy_tile,
    first_key_of,
    multiply,
    part_descriptors,
    place_tile,
    split_heads,
    store_rows,
    tile_descriptor,
)

LINE = tl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# fmt: off

@triton.jit(do_not_specialize=[
    "rows", "row_stride", "num_queries", "gate_batch_stride", "gate_time_stride", "gate_head_stride",
])
def row_numbers_kernel(
    lse, delta, gate, numbers, gate_batch_stride, gate_time_stride, gate_head_stride, rows, row_stride, num_queries,
    HEADS: tl.constexpr, REP: tl.constexpr, GATED: tl.constexpr, SIZE: tl.constexpr,
):
    """What the copy engine reads of rows, [3, B, shares, rows]: lse in base 2, +inf where nothing is seen; delta; gate.

    A row is a query and a head of one share, so that the rows of a tile lie side by side.
    """
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    keep = row < rows
    query = row // REP
    batch = tl.program_id(1) // (HEADS // REP)
    head = (tl.program_id(1) % (HEADS // REP)) * REP + row % REP
    source = (batch.to(tl.int64) * num_queries + query) * HEADS + head
    target = numbers + tl.program_id(1).to(tl.int64) * row_stride + row
    plane = tl.num_programs(1).to(tl.int64) * row_stride
    value = tl.load(lse + source, mask=keep, other=0.0)
    tl.store(target, tl.where(value == float("-inf"), float("inf"), value * LOG2_E), mask=keep)
    tl.store(target + plane, tl.load(delta + source, mask=keep, other=0.0), mask=keep)
    if GATED:
        place = batch.to(tl.int64) * gate_batch_stride + query.to(tl.int64) * gate_time_stride + head * gate_head_stride
        tl.store(target + 2 * plane, tl.load(gate + place, mask=keep, other=0.0).to(tl.float32), mask=keep)


@gluon.jit
def place_keys(
    parts, batches, num_queries, num_keys, query_shift, window_size, query_begin, query_end,
    GROUPS: gl.constexpr, REP: gl.constexpr, COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    PACKED: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
):
    """This program's keys, and its part of the rows that see any of them."""
    first_key = (gl.program_id(0) // parts) * KEYS
    part = gl.program_id(0) % parts
    batch = gl.program_id(1) // GROUPS
    group = gl.program_id(1) % GROUPS
    last_key = gl.minimum(first_key + KEYS, num_keys) - 1
    begin, first_end = seeing_queries(
        first_key, num_queries, query_shift, window_size, query_begin, query_end, COMPRESSED, BLOCK, STRIDE, PACKED)
    last_begin, end = seeing_queries(
        last_key, num_queries, query_shift, window_size, query_begin, query_end, COMPRESSED, BLOCK, STRIDE, PACKED)
    part_rows = gl.cdiv(gl.cdiv((end - begin) * REP, parts), ROWS) * ROWS
    row_origin = begin * REP + part * part_rows
    row_limit = gl.maximum(gl.minimum(row_origin + part_rows, end * REP), row_origin)
    return first_key, part, batch, group, row_origin, row_limit


@gluon.jit
def load_rows_of_keys(
    descriptors, buffers, barriers, masks, counts,
    GROUPS: gl.constexpr, REP: gl.constexpr, COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    PACKED: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, SHARES: gl.constexpr,
):
    """The loader of d_k, d_v: keys and values once, then tiles of rows."""
    q_sources, k_sources, v_source, d_o_source, lse_source, delta_source, gate_source = descriptors
    q_tiles, k_tiles, v_tiles, d_o_tiles, lse_tiles, delta_tiles, gate_tiles = buffers
    keys_ready, q_ready, q_free, d_o_ready, d_o_free = barriers
    query_shift, window_size, query_begin, query_end = masks
    parts, batches, num_queries, num_keys = counts
    ROW_BYTES: gl.constexpr = ROWS * 4
    COLUMN_BYTES: gl.constexpr = (D_1 + D_2) * 2
    first_key, part, batch, group, row_origin, row_limit = place_keys(
        parts, batches, num_queries, num_keys, query_shift, window_size, query_begin, query_end,
        GROUPS, REP, COMPRESSED, BLOCK, STRIDE, PACKED, ROWS, KEYS)
    mbarrier.expect(keys_ready, KEYS * COLUMN_BYTES + 2 * v_source.block_type.nbytes)
    for half in gl.static_range(2):
        key = first_key + half * (KEYS // 2)
        copy_tile(k_sources, batch, key, group, keys_ready, k_tiles, half, D_1, D_2)
        tma.async_copy_global_to_shared(v_source, [batch, key, group, 0], keys_ready, v_tiles.index(half))
    tiles = gl.cdiv(row_limit - row_origin, ROWS)
    for number in range(tiles * SHARES):
        share = group * SHARES + number // tiles
        head = share * REP
        row = row_origin + number % tiles * ROWS
        query = row // REP
        stage = number % STAGES
        free = (number // STAGES & 1) ^ 1
        ready = q_ready.index(stage)
        mbarrier.wait(q_free.index(stage), free)
        mbarrier.expect(ready, ROWS * COLUMN_BYTES + (2 if GATED else 1) * ROW_BYTES)
        copy_tile(q_sources, batch, query, head, ready, q_tiles, stage, D_1, D_2)
        tma.async_copy_global_to_shared(lse_source, [batch, share, row], ready, lse_tiles.index(stage))
        if GATED:
            tma.async_copy_global_to_shared(gate_source, [batch, share, row], ready, gate_tiles.index(stage))
        ready = d_o_ready.index(stage)
        mbarrier.wait(d_o_free.index(stage), free)
        mbarrier.expect(ready, d_o_source.block_type.nbytes + ROW_BYTES)
        tma.async_copy_global_to_shared(d_o_source, [batch, query, head, 0], ready, d_o_tiles.index(stage))
        tma.async_copy_global_to_shared(delta_source, [batch, share, row], ready, delta_tiles.index(stage))


@gluon.jit
def pass_rows(barriers, start, stop, STAGES: gl.constexpr):
    """Give tiles of rows back that the other half alone needs."""
    keys_ready, q_ready, q_free, d_o_ready, d_o_free = barriers
    for number in range(start, stop):
        stage = number % STAGES
        phase = number // STAGES & 1
        mbarrier.wait(q_ready.index(stage), phase)
        mbarrier.arrive(q_free.index(stage), count=1)
        mbarrier.wait(d_o_ready.index(stage), phase)
        mbarrier.arrive(d_o_free.index(stage), count=1)


@gluon.jit
def gather_keys(
    d_k, d_k_2, d_v, scores, buffers, barriers, row_origin, key_begin, key_end, base, start, stop, last, score_scale,
    HALF: gl.constexpr, REP: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr,
    GATED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, MASKED: gl.constexpr,
    SCORES: gl.constexpr, OUTPUT_D: gl.constexpr, OUTPUT_D_2: gl.constexpr, OUTPUT_V: gl.constexpr,
):
    """Add what tiles of rows number start to stop of a share, which begins at tile `base`, give to d_k and d_v."""
    q_tiles, k_tiles, v_tiles, d_o_tiles, lse_tiles, delta_tiles, gate_tiles = buffers
    keys_ready, q_ready, q_free, d_o_ready, d_o_free = barriers
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    v_tile = v_tiles.index(HALF).reshape([PART_ROWS, V])
    for number in range(base + start, base + stop):
        stage = number % STAGES
        phase = number // STAGES & 1
        q_tile = q_tiles[0].index(stage).reshape([ROWS, D_1])
        d_o_tile = d_o_tiles.index(stage).reshape([ROWS, V])
        zeros = gl.zeros([PART_ROWS, ROWS], gl.float32, SCORES)
        if not AHEAD:
            mbarrier.wait(q_ready.index(stage), phase)
            scores = multiply(k_tiles, HALF, q_tiles, stage, zeros, PART_ROWS, ROWS, D_1, D_2)
        mbarrier.wait(d_o_ready.index(stage), phase)
        d_p = warpgroup_mma(v_tile, d_o_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        row_lse = lse_tiles.index(stage)._reinterpret(gl.float32, [ROWS], LINE).load(ROW)
        if not AHEAD:
            scores = warpgroup_mma_wait(1, [scores])
        p = gl.exp2(scores * score_scale - row_lse[None, :])
        if GATED:
            p = p * gate_tiles.index(stage)._reinterpret(gl.float32, [ROWS], LINE).load(ROW)[None, :]
        if MASKED:
            row = row_origin + (number - base) * ROWS + gl.arange(0, ROWS, ROW)
            visible = (row[None, :] >= (key_begin * REP)[:, None]) & (row[None, :] < (key_end * REP)[:, None])
            p = gl.where(visible, p, 0.0)
        p_operand = gl.convert_layout(p.to(d_o_tiles.dtype), gl.DotOperandLayout(0, OUTPUT_V, 2))
        d_v = warpgroup_mma(p_operand, d_o_tile, d_v, is_async=True)
        row_delta = delta_tiles.index(stage)._reinterpret(gl.float32, [ROWS], LINE).load(ROW)
        d_p = warpgroup_mma_wait(1, [d_p])
        d_scores = p * (d_p - row_delta[None, :])
        if MASKED:
            d_scores = gl.where(visible, d_scores, 0.0)
        d_scores = d_scores.to(d_o_tiles.dtype)
        d_scores_operand = gl.convert_layout(d_scores, gl.DotOperandLayout(0, OUTPUT_D, 2))
        if AHEAD:
            # After the last tile, its own scores once more: nobody looks at them.
            following = gl.minimum(number + 1, base + last - 1)
            next_stage = following % STAGES
            mbarrier.wait(q_ready.index(next_stage), following // STAGES & 1)
            scores = multiply(k_tiles, HALF, q_tiles, next_stage, zeros, PART_ROWS, ROWS, D_1, D_2)
        d_k = warpgroup_mma(d_scores_operand, q_tile, d_k, is_async=True)
        if D_2 > 0:
            d_scores_operand_2 = gl.convert_layout(d_scores, gl.DotOperandLayout(0, OUTPUT_D_2, 2))
            d_k_2 = warpgroup_mma(
                d_scores_operand_2, q_tiles[1].index(stage).reshape([ROWS, D_2]), d_k_2, is_async=True)
        BEHIND_D_V: gl.constexpr = (1 if D_2 == 0 else 2) * (2 if AHEAD else 1)
        d_v = warpgroup_mma_wait(BEHIND_D_V, [d_v])
        mbarrier.arrive(d_o_free.index(stage), count=1)
        if D_2 > 0 and AHEAD:
            d_k, d_k_2, scores = warpgroup_mma_wait(0, [d_k, d_k_2, scores])
        elif D_2 > 0:
            d_k, d_k_2 = warpgroup_mma_wait(0, [d_k, d_k_2])
        elif AHEAD:
            d_k, scores = warpgroup_mma_wait(0, [d_k, scores])
        else:
            d_k = warpgroup_mma_wait(0, [d_k])
        mbarrier.arrive(q_free.index(stage), count=1)
    return d_k, d_k_2, d_v, scores


@gluon.jit
def store_keys(target, values, left, STRIDE: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Store a gradient of keys, as many as are left."""
    key = gl.arange(0, PART_ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    pointers = target + (key * STRIDE)[:, None] + column[None, :]
    gl.store(pointers, values.to(target.dtype.element_ty), mask=(key < left)[:, None])


@gluon.jit
def sum_keys(
    HALF: gl.constexpr, d_k_target, d_v_target, buffers, barriers, masks, counts, scale, score_scale,
    GROUPS: gl.constexpr, REP: gl.constexpr, COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    PACKED: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, SHARES: gl.constexpr, AHEAD: gl.constexpr,
):
    """d_k and d_v of one half of the program's keys."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OUTPUT_D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_1, 16])
    OUTPUT_D_2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_2 if D_2 > 0 else D_1, 16])
    OUTPUT_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    q_tiles, k_tiles, v_tiles, d_o_tiles, lse_tiles, delta_tiles, gate_tiles = buffers
    keys_ready, q_ready, q_free, d_o_ready, d_o_free = barriers
    query_shift, window_size, query_begin, query_end = masks
    parts, batches, num_queries, num_keys = counts
    first_key, part, batch, group, row_origin, row_limit = place_keys(
        parts, batches, num_queries, num_keys, query_shift, window_size, query_begin, query_end,
        GROUPS, REP, COMPRESSED, BLOCK, STRIDE, PACKED, ROWS, KEYS)
    tiles = gl.cdiv(row_limit - row_origin, ROWS)
    half_key = first_key + HALF * (KEYS // 2)
    key = half_key + gl.arange(0, PART_ROWS, gl.SliceLayout(1, SCORES))
    key_begin, key_end = seeing_queries(
        gl.minimum(key, num_keys - 1), num_queries, query_shift, window_size, query_begin, query_end,
        COMPRESSED, BLOCK, STRIDE, PACKED)
    # Of the program's tiles of rows, this half's keys are seen from `first` to `last`, all of them from
    # `first_full` to `last_full`.
    begin, full_end = seeing_queries(
        gl.minimum(half_key, num_keys - 1), num_queries, query_shift, window_size, query_begin, query_end,
        COMPRESSED, BLOCK, STRIDE, PACKED)
    full_begin, end = seeing_queries(
        gl.minimum(half_key + KEYS // 2, num_keys) - 1, num_queries, query_shift, window_size, query_begin, query_end,
        COMPRESSED, BLOCK, STRIDE, PACKED)
    first = gl.minimum(gl.maximum(begin * REP - row_origin, 0) // ROWS, tiles)
    last = gl.maximum(gl.minimum(gl.cdiv(gl.maximum(end * REP - row_origin, 0), ROWS), tiles), first)
    first_full = gl.minimum(gl.maximum(gl.cdiv(gl.maximum(full_begin * REP - row_origin, 0), ROWS), first), last)
    last_full = gl.maximum(gl.minimum(gl.maximum(full_end * REP - row_origin, 0) // ROWS, last), first_full)
    d_k = gl.zeros([PART_ROWS, D_1], gl.float32, OUTPUT_D)
    d_k_2 = d_k
    if D_2 > 0:
        d_k_2 = gl.zeros([PART_ROWS, D_2], gl.float32, OUTPUT_D_2)
    d_v = gl.zeros([PART_ROWS, V], gl.float32, OUTPUT_V)
    mbarrier.wait(keys_ready, 0)
    scores = gl.zeros([PART_ROWS, ROWS], gl.float32, SCORES)
    for share in range(SHARES):
        base = share * tiles
        pass_rows(barriers, base, base + first, STAGES)
        if AHEAD and first < last:
            stage = (base + first) % STAGES
            mbarrier.wait(q_ready.index(stage), (base + first) // STAGES & 1)
            zeros = gl.zeros([PART_ROWS, ROWS], gl.float32, SCORES)
            scores = multiply(k_tiles, HALF, q_tiles, stage, zeros, PART_ROWS, ROWS, D_1, D_2)
            scores = warpgroup_mma_wait(0, [scores])
        d_k, d_k_2, d_v, scores = gather_keys(
            d_k, d_k_2, d_v, scores, buffers, barriers, row_origin, key_begin, key_end, base, first, first_full, last,
            score_scale,
            HALF, REP, D_1, D_2, V, GATED, ROWS, STAGES, AHEAD, True, SCORES, OUTPUT_D, OUTPUT_D_2, OUTPUT_V)
        d_k, d_k_2, d_v, scores = gather_keys(
            d_k, d_k_2, d_v, scores, buffers, barriers, row_origin, key_begin, key_end, base, first_full, last_full,
            last, score_scale,
            HALF, REP, D_1, D_2, V, GATED, ROWS, STAGES, AHEAD, False, SCORES, OUTPUT_D, OUTPUT_D_2, OUTPUT_V)
        d_k, d_k_2, d_v, scores = gather_keys(
            d_k, d_k_2, d_v, scores, buffers, barriers, row_origin, key_begin, key_end, base, last_full, last, last,
            score_scale,
            HALF, REP, D_1, D_2, V, GATED, ROWS, STAGES, AHEAD, True, SCORES, OUTPUT_D, OUTPUT_D_2, OUTPUT_V)
        pass_rows(barriers, base + last, base + tiles, STAGES)
    first_place = ((part * batches + batch).to(gl.int64) * num_keys + half_key) * GROUPS + group
    left = num_keys - half_key
    D: gl.constexpr = D_1 + D_2
    store_keys(d_k_target + first_place * D, d_k * scale, left, GROUPS * D, D_1, OUTPUT_D)
    if D_2 > 0:
        store_keys(d_k_target + first_place * D + D_1, d_k_2 * scale, left, GROUPS * D, D_2, OUTPUT_D_2)
    store_keys(d_v_target + first_place * V, d_v, left, GROUPS * V, V, OUTPUT_V)


@gluon.jit(do_not_specialize=["num_queries", "num_keys", "query_shift", "window_size", "batches", "parts"])
def hopper_d_k_d_v_kernel(
    q_source, q_source_2, k_source, k_source_2, v_source, d_o_source, lse_source, delta_source, gate_source,
    d_k_target, d_v_target, query_begin, query_end, batches, parts, num_queries, num_keys, query_shift, window_size,
    scale, score_scale,
    GROUPS: gl.constexpr, REP: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr,
    COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr, PACKED: gl.constexpr,
    GATED: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    SHARES: gl.constexpr, AHEAD: gl.constexpr,
):
    """d_k and d_v of one tile of keys, or one part of its rows: into [parts, B, keys, G, D] and [.., V]."""
    k_tiles = allocate_tiles(k_source, k_source_2, 2, D_2)
    v_tiles = gl.allocate_shared_memory(v_source.dtype, [2] + v_source.block_type.shape, v_source.layout)
    q_tiles = allocate_tiles(q_source, q_source_2, STAGES, D_2)
    d_o_tiles = gl.allocate_shared_memory(d_o_source.dtype, [STAGES] + d_o_source.block_type.shape, d_o_source.layout)
    numbers: gl.constexpr = [STAGES] + lse_source.block_type.shape
    lse_tiles = gl.allocate_shared_memory(gl.float32, numbers, lse_source.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, numbers, lse_source.layout)
    gate_tiles = gl.allocate_shared_memory(gl.float32, numbers, lse_source.layout)
    keys_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    d_o_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    d_o_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(stage), count=1)
        mbarrier.init(q_free.index(stage), count=2)
        mbarrier.init(d_o_ready.index(stage), count=1)
        mbarrier.init(d_o_free.index(stage), count=2)
    descriptors = (
        (q_source, q_source_2), (k_source, k_source_2), v_source, d_o_source, lse_source, delta_source, gate_source)
    buffers = (q_tiles, k_tiles, v_tiles, d_o_tiles, lse_tiles, delta_tiles, gate_tiles)
    barriers = (keys_ready, q_ready, q_free, d_o_ready, d_o_free)
    masks = (query_shift, window_size, query_begin, query_end)
    counts = (parts, batches, num_queries, num_keys)
    gl.warp_specialize([
        (sum_keys, (0, d_k_target, d_v_target, buffers, barriers, masks, counts, scale, score_scale,
                    GROUPS, REP, COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, V, GATED, ROWS, KEYS, STAGES,
                    SHARES, AHEAD)),
        (sum_keys, (1, d_k_target, d_v_target, buffers, barriers, masks, counts, scale, score_scale,
                    GROUPS, REP, COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, V, GATED, ROWS, KEYS, STAGES,
                    SHARES, AHEAD)),
        (load_rows_of_keys, (descriptors, buffers, barriers, masks, counts,
                             GROUPS, REP, COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, GATED, ROWS, KEYS, STAGES,
                             SHARES)),
    ], [4, 1], [240, 24])

@gluon.jit
def load_keys_of_rows(
    descriptors, buffers, barriers, masks, counts,
    GROUPS: gl.constexpr, REP: gl.constexpr, COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    PACKED: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, KEYS: gl.constexpr, TAIL: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, SHARE: gl.constexpr,
):
    """The loader of d_q: keys and values of the tail and k of the first tile, q and d_o, then v and k by turns."""
    q_sources, k_sources, v_source, d_o_source, k_tail_sources, v_tail_source = descriptors
    q_tiles, k_tiles, v_tiles, d_o_tiles, k_tail, v_tail = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free, tail_ready, tail_free = barriers
    query_shift, window_size, ids, positions, first_blocks = masks
    slots, row_tiles, batch_groups, num_queries = counts
    QUERIES: gl.constexpr = PART_ROWS // REP
    COLUMN_BYTES: gl.constexpr = (D_1 + D_2) * 2
    count = 0
    visit = 0
    for slot in range(gl.program_id(0), slots, gl.num_programs(0)):
        batch, group, first_query, begin, tiles, first_full, last_full = place_tile(
            slot, row_tiles, batch_groups, num_queries, query_shift, window_size, ids, positions, first_blocks,
            GROUPS, REP, COMPRESSED, BLOCK, STRIDE, PACKED, KEYS, TAIL)
        if TAIL > 0:
            mbarrier.wait(tail_free, (visit & 1) ^ 1)
            mbarrier.expect(tail_ready, TAIL * COLUMN_BYTES + v_tail_source.block_type.nbytes)
            tail_key = begin + tiles * KEYS
            copy_tile(k_tail_sources, batch, tail_key, group // SHARE, tail_ready, k_tail, 0, D_1, D_2)
            tma.async_copy_global_to_shared(v_tail_source, [batch, tail_key, group // SHARE, 0], tail_ready, v_tail)
        for number in range(tiles):
            first_key = first_key_of(number, begin, tiles, first_full, last_full, KEYS)
            stage = count % STAGES
            free = (count // STAGES & 1) ^ 1
            mbarrier.wait(k_free.index(stage), free)
            mbarrier.expect(k_ready.index(stage), KEYS * COLUMN_BYTES)
            copy_tile(k_sources, batch, first_key, group // SHARE, k_ready.index(stage), k_tiles, stage, D_1, D_2)
            if number == 0:
                for part in gl.static_range(2):
                    query = first_query + part * QUERIES
                    place = 2 * (visit % Q_STAGES) + part
                    ready = q_ready.index(place)
                    mbarrier.wait(q_free.index(place), (visit // Q_STAGES & 1) ^ 1)
                    mbarrier.expect(ready, PART_ROWS * COLUMN_BYTES + d_o_source.block_type.nbytes)
                    copy_tile(q_sources, batch, query, group * REP, ready, q_tiles, place, D_1, D_2)
                    tma.async_copy_global_to_shared(
                        d_o_source, [batch, query, group * REP, 0], ready, d_o_tiles.index(place))
            mbarrier.wait(v_free.index(stage), free)
            mbarrier.expect(v_ready.index(stage), v_source.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_source, [batch, first_key, group // SHARE, 0], v_ready.index(stage), v_tiles.index(stage))
            count += 1
        visit += 1


@gluon.jit
def add_keys(
    d_q, d_q_2, d_scores, k_tiles, place, KEYS: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr,
    OUTPUT: gl.constexpr, OUTPUT_2: gl.constexpr,
):
    """Add a tile's d_scores times keys to d_q, and wait for it."""
    operand = gl.convert_layout(d_scores, gl.DotOperandLayout(0, OUTPUT, 2))
    d_q = warpgroup_mma(operand, k_tiles[0].index(place).reshape([KEYS, D_1]), d_q, is_async=True)
    if D_2 > 0:
        operand_2 = gl.convert_layout(d_scores, gl.DotOperandLayout(0, OUTPUT_2, 2))
        d_q_2 = warpgroup_mma(operand_2, k_tiles[1].index(place).reshape([KEYS, D_2]), d_q_2, is_async=True)
        d_q, d_q_2 = warpgroup_mma_wait(0, [d_q, d_q_2])
    else:
        d_q = warpgroup_mma_wait(0, [d_q])
    return d_q, d_q_2


@gluon.jit
def gather_rows(
    d_q, d_q_2, q_tiles, q_place, d_o_tile, row_lse, row_delta, row_gate, k_tiles, v_tiles, k_ready, k_free, v_ready,
    v_free, count, begin, tiles, first_full, last_full, row_begin, row_end, start, stop, score_scale,
    D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr, OUTPUT: gl.constexpr, OUTPUT_2: gl.constexpr,
):
    """Add what key tiles number start to stop give to d_q."""
    for number in range(start, stop):
        stage = count % STAGES
        phase = count // STAGES & 1
        zeros = gl.zeros([PART_ROWS, KEYS], gl.float32, SCORES)
        mbarrier.wait(k_ready.index(stage), phase)
        scores = multiply(q_tiles, q_place, k_tiles, stage, zeros, PART_ROWS, KEYS, D_1, D_2)
        mbarrier.wait(v_ready.index(stage), phase)
        v_tile = v_tiles.index(stage).reshape([KEYS, V])
        d_p = warpgroup_mma(d_o_tile, v_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, [scores])
        p = gl.exp2(scores * score_scale - row_lse[:, None])
        if GATED:
            p = p * row_gate[:, None]
        d_p = warpgroup_mma_wait(0, [d_p])
        mbarrier.arrive(v_free.index(stage), count=1)
        d_scores = p * (d_p - row_delta[:, None])
        if MASKED:
            first_key = first_key_of(number, begin, tiles, first_full, last_full, KEYS)
            key = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
            visible = (key[None, :] >= row_begin[:, None]) & (key[None, :] < row_end[:, None])
            d_scores = gl.where(visible, d_scores, 0.0)
        d_q, d_q_2 = add_keys(d_q, d_q_2, d_scores.to(v_tiles.dtype), k_tiles, stage, KEYS, D_1, D_2, OUTPUT, OUTPUT_2)
        mbarrier.arrive(k_free.index(stage), count=1)
        count += 1
    return d_q, d_q_2, count


@gluon.jit
def sum_rows(
    PART: gl.constexpr, lse, delta, gate, d_q_target, gate_strides, buffers, barriers, masks, counts,
    scale, score_scale,
    GROUPS: gl.constexpr, REP: gl.constexpr, COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    PACKED: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr,
    ADD: gl.constexpr, KEYS: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
):
    """d_q of one half of each tile of rows."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_1, 16])
    OUTPUT_2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_2 if D_2 > 0 else D_1, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    QUERIES: gl.constexpr = PART_ROWS // REP
    q_tiles, k_tiles, v_tiles, d_o_tiles, k_tail, v_tail = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free, tail_ready, tail_free = barriers
    query_shift, window_size, ids, positions, first_blocks = masks
    slots, row_tiles, batch_groups, num_queries = counts
    gate_batch_stride, gate_time_stride, gate_head_stride = gate_strides
    count = 0
    visit = 0
    for slot in range(gl.program_id(0), slots, gl.num_programs(0)):
        batch, group, tile_query, begin, tiles, first_full, last_full = place_tile(
            slot, row_tiles, batch_groups, num_queries, query_shift, window_size, ids, positions, first_blocks,
            GROUPS, REP, COMPRESSED, BLOCK, STRIDE, PACKED, KEYS, TAIL)
        masked = tiles - (last_full - first_full)
        first_query = tile_query + PART * QUERIES
        row = gl.arange(0, PART_ROWS, ROW)
        row_query = gl.minimum(first_query + row // REP, num_queries - 1)
        head = group * REP + row % REP
        row_begin, row_end = visible_keys(
            row_query, query_shift, window_size, ids, positions, first_blocks, COMPRESSED, BLOCK, STRIDE, PACKED)
        place = (batch * num_queries + row_query).to(gl.int64) * (GROUPS * REP) + head
        row_lse = gl.load(lse + place)
        row_lse = gl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E)
        row_delta = gl.load(delta + place)
        row_gate = row_delta
        if GATED:
            gate_place = batch.to(gl.int64) * gate_batch_stride + row_query.to(gl.int64) * gate_time_stride
            row_gate = gl.load(gate + gate_place + head * gate_head_stride).to(gl.float32)
        d_q = gl.zeros([PART_ROWS, D_1], gl.float32, OUTPUT)
        d_q_2 = d_q
        if D_2 > 0:
            d_q_2 = gl.zeros([PART_ROWS, D_2], gl.float32, OUTPUT_2)
        q_place = 2 * (visit % Q_STAGES) + PART
        d_o_tile = d_o_tiles.index(q_place).reshape([PART_ROWS, V])
        mbarrier.wait(q_ready.index(q_place), visit // Q_STAGES & 1)
        if TAIL > 0:
            TAIL_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
            TAIL_ROW: gl.constexpr = gl.SliceLayout(1, TAIL_SCORES)
            mbarrier.wait(tail_ready, visit & 1)
            zeros = gl.zeros([PART_ROWS, TAIL], gl.float32, TAIL_SCORES)
            scores = multiply(q_tiles, q_place, k_tail, 0, zeros, PART_ROWS, TAIL, D_1, D_2)
            d_p = warpgroup_mma(
                d_o_tile, v_tail.reshape([TAIL, V]).permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores, d_p = warpgroup_mma_wait(0, [scores, d_p])
            p = gl.exp2(scores * score_scale - gl.convert_layout(row_lse, TAIL_ROW)[:, None])
            if GATED:
                p = p * gl.convert_layout(row_gate, TAIL_ROW)[:, None]
            d_scores = p * (d_p - gl.convert_layout(row_delta, TAIL_ROW)[:, None])
            key = begin + tiles * KEYS + gl.arange(0, TAIL, gl.SliceLayout(0, TAIL_SCORES))
            visible = (key[None, :] >= gl.convert_layout(row_begin, TAIL_ROW)[:, None]) & (
                key[None, :] < gl.convert_layout(row_end, TAIL_ROW)[:, None])
            d_scores = gl.where(visible, d_scores, 0.0).to(v_tiles.dtype)
            d_q, d_q_2 = add_keys(d_q, d_q_2, d_scores, k_tail, 0, TAIL, D_1, D_2, OUTPUT, OUTPUT_2)
            mbarrier.arrive(tail_free, count=1)
        d_q, d_q_2, count = gather_rows(
            d_q, d_q_2, q_tiles, q_place, d_o_tile, row_lse, row_delta, row_gate, k_tiles, v_tiles, k_ready, k_free,
            v_ready, v_free, count, begin, tiles, first_full, last_full, row_begin, row_end, 0, masked, score_scale,
            D_1, D_2, V, GATED, KEYS, STAGES, True, SCORES, OUTPUT, OUTPUT_2)
        d_q, d_q_2, count = gather_rows(
            d_q, d_q_2, q_tiles, q_place, d_o_tile, row_lse, row_delta, row_gate, k_tiles, v_tiles, k_ready, k_free,
            v_ready, v_free, count, begin, tiles, first_full, last_full, row_begin, row_end, masked, tiles, score_scale,
            D_1, D_2, V, GATED, KEYS, STAGES, False, SCORES, OUTPUT, OUTPUT_2)
        mbarrier.arrive(q_free.index(q_place), count=1)
        D: gl.constexpr = D_1 + D_2
        target = d_q_target + ((batch.to(gl.int64) * num_queries + first_query) * GROUPS + group) * REP * D
        rows_left = (num_queries - first_query) * REP
        store_rows(target, d_q * scale, rows_left, GROUPS, REP, D, D_1, ADD, OUTPUT)
        if D_2 > 0:
            store_rows(target + D_1, d_q_2 * scale, rows_left, GROUPS, REP, D, D_2, ADD, OUTPUT_2)
        visit += 1


@gluon.jit(do_not_specialize=[
    "num_queries", "query_shift", "window_size", "slots", "row_tiles",
    "gate_batch_stride", "gate_time_stride", "gate_head_stride",
])
def hopper_d_q_kernel(
    q_source, q_source_2, k_source, k_source_2, v_source, d_o_source, k_tail_source, k_tail_source_2, v_tail_source,
    lse, delta, gate, d_q_target, ids, positions, first_blocks,
    gate_batch_stride, gate_time_stride, gate_head_stride,
    slots, row_tiles, batch_groups, num_queries, query_shift, window_size, scale, score_scale,
    GROUPS: gl.constexpr, REP: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr,
    COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr, PACKED: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, KEYS: gl.constexpr, TAIL: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, SHARE: gl.constexpr,
):
    """d_q of every tile of rows that falls to this program; with ADD, added to what d_q holds."""
    q_tiles = allocate_tiles(q_source, q_source_2, 2 * Q_STAGES, D_2)
    d_o_tiles = gl.allocate_shared_memory(
        d_o_source.dtype, [2 * Q_STAGES] + d_o_source.block_type.shape, d_o_source.layout)
    k_tiles = allocate_tiles(k_source, k_source_2, STAGES, D_2)
    v_tiles = gl.allocate_shared_memory(v_source.dtype, [STAGES] + v_source.block_type.shape, v_source.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tail_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tail_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_tail = k_tiles
    v_tail = v_tiles
    if TAIL > 0:
        k_tail = allocate_tiles(k_tail_source, k_tail_source_2, 1, D_2)
        v_tail = gl.allocate_shared_memory(v_source.dtype, v_tail_source.block_type.shape, v_source.layout)
    mbarrier.init(tail_ready, count=1)
    mbarrier.init(tail_free, count=2)
    for part in gl.static_range(2 * Q_STAGES):
        mbarrier.init(q_ready.index(part), count=1)
        mbarrier.init(q_free.index(part), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    descriptors = (
        (q_source, q_source_2), (k_source, k_source_2), v_source, d_o_source, (k_tail_source, k_tail_source_2),
        v_tail_source)
    buffers = (q_tiles, k_tiles, v_tiles, d_o_tiles, k_tail, v_tail)
    barriers = (q_ready, q_free, k_ready, k_free, v_ready, v_free, tail_ready, tail_free)
    masks = (query_shift, window_size, ids, positions, first_blocks)
    counts = (slots, row_tiles, batch_groups, num_queries)
    gate_strides = (gate_batch_stride, gate_time_stride, gate_head_stride)
    gl.warp_specialize([
        (sum_rows, (0, lse, delta, gate, d_q_target, gate_strides, buffers, barriers, masks, counts, scale, score_scale,
                    GROUPS, REP, COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, V, GATED, ADD, KEYS, TAIL, STAGES,
                    Q_STAGES)),
        (sum_rows, (1, lse, delta, gate, d_q_target, gate_strides, buffers, barriers, masks, counts, scale, score_scale,
                    GROUPS, REP, COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, V, GATED, ADD, KEYS, TAIL, STAGES,
                    Q_STAGES)),
        (load_keys_of_rows, (descriptors, buffers, barriers, masks, counts,
                             GROUPS, REP, COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, KEYS, TAIL, STAGES, Q_STAGES,
                             SHARE)),
    ], [4, 1], [240, 24])

# fmt: on


def _row_numbers(lse: Tensor, delta: Tensor, gate: Tensor | None, rep: int, tile: int) -> tuple[TensorDescriptor, ...]:
    """Descriptors, in lines of a tile, of base-2 lse, delta and the gate, whose rows lie share by share."""
    batch, num_queries, num_heads = lse.shape
    shares, rows = num_heads // rep, num_queries * rep
    # The copy engine wants multiples of 16 bytes.
    numbers = lse.new_empty(3, batch, shares, triton.cdiv(rows, 4) * 4)
    row_numbers_kernel[triton.cdiv(rows, 1024), batch * shares](
        lse,
        delta,
        gate,
        numbers,
        *((0, 0, 0) if gate is None else gate.stride()),
        rows,
        numbers.shape[3],
        num_queries,
        HEADS=num_heads,
        REP=rep,
        GATED=gate is not None,
        SIZE=1024,
    )
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    shape = [batch, shares, rows]
    return tuple(TensorDescriptor(x, shape, list(x.stride()), [1, 1, tile], layout) for x in numbers)


def launch_hopper_d_k_d_v(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    gate: Tensor | None,
    scale: float,
    branch: Branch,
    parts: int | None = None,
    rows: int | None = None,
    stages: int = 2,
    ahead: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `launch_d_k_d_v`."""
    batch, num_queries, num_heads, _ = q.shape
    width = split_width(q.shape[3])
    num_keys, num_groups = k.shape[1:3]
    value_dim = v.shape[3]
    rep, shares = split_heads(num_heads // num_groups)
    # Wider keys leave registers for fewer rows.
    rows = rows or (32 if width.part_2 else 64)
    queries = rows // rep
    keys = 2 * PART_ROWS.value
    split = branch.window_size == 0
    key_tiles = triton.cdiv(num_keys, keys)
    if parts is None:
        parts = (
            choose_parts(q, key_tiles * batch * num_groups, num_heads // num_groups, Tile(rows, keys, 12, stages))
            if split
            else 1
        )
    shape = (parts, batch, num_keys, num_groups)
    d_k = k.new_empty(*shape, width.size, dtype=torch.float32 if split else k.dtype)
    d_v = v.new_empty(*shape, value_dim, dtype=torch.float32 if split else v.dtype)
    hopper_d_k_d_v_kernel[key_tiles * parts, batch * num_groups](
        *part_descriptors(q, queries, rep, width),
        *part_descriptors(k, keys // 2, 1, width),
        tile_descriptor(v, keys // 2, 1, value_dim),
        tile_descriptor(d_o, queries, rep, value_dim),
        *_row_numbers(lse, delta, gate, rep, rows),
        d_k,
        d_v,
        branch.query_begin,
        branch.query_end,
        batch,
        parts,
        num_queries,
        num_keys,
        branch.query_shift,
        branch.window_size,
        scale,
        scale * LOG2_E.value,
        num_groups,
        rep,
        width.part_1,
        width.part_2,
        value_dim,
        **branch.constants(),
        GATED=gate is not None,
        ROWS=rows,
        KEYS=keys,
        STAGES=stages,
        SHARES=shares,
        AHEAD=ahead,
        num_warps=4,
        maxnreg=168,
    )
    if not split:
        return d_k[0], d_v[0]
    return sum_parts(d_k, k.dtype), sum_parts(d_v, v.dtype)


def launch_hopper_d_q(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    gate: Tensor | None,
    scale: float,
    branch: Branch,
    d_q: Tensor | None = None,
    keys: int = 64,
    stages: int = 2,
    tail: int = 0,
    q_stages: int = 1,
) -> Tensor:
    """As `launch_d_q`."""
    batch, num_queries, num_heads, _ = q.shape
    width = split_width(q.shape[3])
    value_dim = v.shape[3]
    rep, share = split_heads(num_heads // k.shape[2])
    num_groups = k.shape[2] * share
    queries = PART_ROWS.value // rep
    row_tiles = triton.cdiv(num_queries, 2 * queries)
    slots = row_tiles * batch * num_groups
    add = d_q is not None
    if d_q is None:
        d_q = q.new_empty(q.shape)
    hopper_d_q_kernel[(min(slots, multiprocessors(q.device)),)](
        *part_descriptors(q, queries, rep, width),
        *part_descriptors(k, keys, 1, width),
        tile_descriptor(v, keys, 1, value_dim),
        tile_descriptor(d_o, queries, rep, value_dim),
        *part_descriptors(k, tail or keys, 1, width),
        tile_descriptor(v, tail or keys, 1, value_dim),
        lse,
        delta,
        gate,
        d_q,
        branch.ids,
        branch.positions,
        branch.first_blocks,
        *((0, 0, 0) if gate is None else gate.stride()),
        slots,
        row_tiles,
        batch * num_groups,
        num_queries,
        branch.query_shift,
        branch.window_size,
        scale,
        scale * LOG2_E.value,
        num_groups,
        rep,
        width.part_1,
        width.part_2,
        value_dim,
        **branch.constants(),
        GATED=gate is not None,
        ADD=add,
        KEYS=keys,
        TAIL=tail,
        STAGES=stages,
        Q_STAGES=q_stages,
        SHARE=share,
        num_warps=4,
        maxnreg=168,
    )
    return d_q
