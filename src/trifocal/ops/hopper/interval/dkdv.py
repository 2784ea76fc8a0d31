"""Hopper version of `triton.interval.dkdv`, in Gluon; see `forward` for how programs are divided.

A program holds a tile of 128 keys and values in shared memory, each half of its warps d_k and d_v of 64 of them in
registers, and loops over tiles of 64 rows of q and d_o (32 where keys are wider than 128), share after share of the
group's heads. With keys as the rows of the scores, probabilities and d_scores stay in registers: they are left factors
of the products that make d_v and d_k. A half passes over tiles that none of its keys are seen by. A small kernel lays
out lse, delta and gates of the rows for the copy engine.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from trifocal.ops.hopper.common import (
    PART_ROWS,
    allocate_barriers,
    allocate_tiles,
    copy_tile,
    multiply,
    part_descriptors,
    reinterpret,
    split_heads,
    tile_descriptor,
    tma_load,
)
from trifocal.ops.tiles import cdiv, split_width
from trifocal.ops.triton.common import LOG2_E_KERNEL
from trifocal.ops.triton.interval.common import IntervalProblem, seeing_queries
from trifocal.ops.triton.interval.dkdv import add_parts, empty_parts
from trifocal.ops.triton.launch import Descriptor, Kernel, describe_tiles

# Keys of a program.
KEYS = gl.constexpr(2 * PART_ROWS.value)
LINE = tl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
LINE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)

# fmt: off

@Kernel
@triton.jit(do_not_specialize=[
    "rows", "row_stride", "num_queries", "gate_batch_stride", "gate_time_stride", "gate_head_stride",
])
def row_numbers_kernel(
    lse, delta, gate, numbers, gate_batch_stride, gate_time_stride, gate_head_stride,
    rows, row_stride, num_queries,
    HEADS: tl.constexpr, Q_PER_KV: tl.constexpr, GATED: tl.constexpr, SIZE: tl.constexpr,
):
    """Row numbers for the copy engine, [3, B, shares, rows]: lse in base 2, +inf where nothing is seen; delta; gate.

    A row is a query and a head of one share, so that the rows of a tile lie side by side.
    """
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    keep = row < rows
    query = row // Q_PER_KV
    batch = tl.program_id(1) // (HEADS // Q_PER_KV)
    head = (tl.program_id(1) % (HEADS // Q_PER_KV)) * Q_PER_KV + row % Q_PER_KV
    source = (batch.to(tl.int64) * num_queries + query) * HEADS + head
    target = numbers + tl.program_id(1).to(tl.int64) * row_stride + row
    plane = tl.num_programs(1).to(tl.int64) * row_stride
    value = tl.load(lse + source, mask=keep, other=0.0)
    tl.store(target, tl.where(value == float("-inf"), float("inf"), value * LOG2_E_KERNEL), mask=keep)
    tl.store(target + plane, tl.load(delta + source, mask=keep, other=0.0), mask=keep)
    if GATED:
        place = batch.to(tl.int64) * gate_batch_stride + query.to(tl.int64) * gate_time_stride + head * gate_head_stride
        tl.store(target + 2 * plane, tl.load(gate + place, mask=keep, other=0.0).to(tl.float32), mask=keep)


@gluon.jit
def place_keys(
    masks, counts,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    PACKED: gl.constexpr, ROWS: gl.constexpr,
):
    """This program's keys, and its part of the rows that see any of them."""
    parts, batches, num_queries, num_keys = counts
    first_key = (gl.program_id(0) // parts) * KEYS
    part = gl.program_id(0) % parts
    batch = gl.program_id(1) // GROUPS
    group = gl.program_id(1) % GROUPS
    last_key = gl.minimum(first_key + KEYS, num_keys) - 1
    begin, first_end = seeing_queries(first_key, num_queries, masks, COMPRESSED, BLOCK, STRIDE, PACKED)
    last_begin, end = seeing_queries(last_key, num_queries, masks, COMPRESSED, BLOCK, STRIDE, PACKED)
    # Lines of row numbers begin at multiples of 16 bytes.
    first_row = begin * Q_PER_KV // 4 * 4
    part_rows = gl.cdiv(gl.cdiv(end * Q_PER_KV - first_row, parts), ROWS) * ROWS
    row_origin = first_row + part * part_rows
    row_limit = gl.maximum(gl.minimum(row_origin + part_rows, end * Q_PER_KV), row_origin)
    return first_key, part, batch, group, row_origin, row_limit


@gluon.jit
def load_rows_of_keys(
    descriptors, buffers, barriers, masks, counts,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    PACKED: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, SHARES: gl.constexpr,
):
    """The loader of d_k, d_v: keys and values once, then tiles of rows."""
    q_sources, k_sources, v_source, d_o_source, lse_source, delta_source, gate_source = descriptors
    q_tiles, k_tiles, v_tiles, d_o_tiles, lse_tiles, delta_tiles, gate_tiles = buffers
    keys_ready, q_ready, q_free, d_o_ready, d_o_free = barriers
    ROW_BYTES: gl.constexpr = ROWS * 4
    COLUMN_BYTES: gl.constexpr = (D_1 + D_2) * 2
    first_key, part, batch, group, row_origin, row_limit = place_keys(
        masks, counts, GROUPS, Q_PER_KV, COMPRESSED, BLOCK, STRIDE, PACKED, ROWS)
    mbarrier.expect(keys_ready, KEYS * COLUMN_BYTES + 2 * v_source.block_type.nbytes)
    for half in gl.static_range(2):
        key = first_key + half * PART_ROWS
        copy_tile(k_sources, batch, key, group, keys_ready, k_tiles, half, D_1, D_2)
        tma_load(v_source, [batch, key, group, 0], keys_ready, v_tiles.index(half))
    tiles = gl.cdiv(row_limit - row_origin, ROWS)
    for number in range(tiles * SHARES):
        share = group * SHARES + number // tiles
        head = share * Q_PER_KV
        row = row_origin + number % tiles * ROWS
        query = row // Q_PER_KV
        stage = number % STAGES
        free = (number // STAGES & 1) ^ 1
        ready = q_ready.index(stage)
        mbarrier.wait(q_free.index(stage), free)
        mbarrier.expect(ready, ROWS * COLUMN_BYTES + (2 if GATED else 1) * ROW_BYTES)
        copy_tile(q_sources, batch, query, head, ready, q_tiles, stage, D_1, D_2)
        tma_load(lse_source, [batch, share, row], ready, lse_tiles.index(stage))
        if GATED:
            tma_load(gate_source, [batch, share, row], ready, gate_tiles.index(stage))
        ready = d_o_ready.index(stage)
        mbarrier.wait(d_o_free.index(stage), free)
        mbarrier.expect(ready, d_o_source.block_type.nbytes + ROW_BYTES)
        tma_load(d_o_source, [batch, query, head, 0], ready, d_o_tiles.index(stage))
        tma_load(delta_source, [batch, share, row], ready, delta_tiles.index(stage))


@gluon.jit
def pass_rows(barriers, start, stop, STAGES: gl.constexpr):
    """Give tiles of rows back that only the other half needs."""
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
    d_k, d_k_2, d_v, scores, buffers, barriers, row_origin, key_begin, key_end, base, start, stop, last,
    score_scale,
    HALF: gl.constexpr, Q_PER_KV: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr,
    GATED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    MASKED: gl.constexpr, SCORES: gl.constexpr, OUTPUT_D: gl.constexpr, OUTPUT_D_2: gl.constexpr,
    OUTPUT_V: gl.constexpr,
):
    """Add to d_k and d_v from tiles of rows, number start to stop of a share of heads that begins at `base`."""
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
        row_lse = reinterpret(lse_tiles.index(stage), gl.float32, [ROWS], LINE).load(ROW)
        if not AHEAD:
            scores = warpgroup_mma_wait(1, [scores])
        p = gl.exp2(scores * score_scale - row_lse[None, :])
        if GATED:
            p = p * reinterpret(gate_tiles.index(stage), gl.float32, [ROWS], LINE).load(ROW)[None, :]
        if MASKED:
            row = row_origin + (number - base) * ROWS + gl.arange(0, ROWS, ROW)
            visible = (row[None, :] >= (key_begin * Q_PER_KV)[:, None]) & (row[None, :] < (key_end * Q_PER_KV)[:, None])
            p = gl.where(visible, p, 0.0)
        p_operand = gl.convert_layout(p.to(d_o_tiles.dtype), gl.DotOperandLayout(0, OUTPUT_V, 2))
        d_v = warpgroup_mma(p_operand, d_o_tile, d_v, is_async=True)
        row_delta = reinterpret(delta_tiles.index(stage), gl.float32, [ROWS], LINE).load(ROW)
        d_p = warpgroup_mma_wait(1, [d_p])
        d_scores = p * (d_p - row_delta[None, :])
        if MASKED:
            d_scores = gl.where(visible, d_scores, 0.0)
        d_scores = d_scores.to(d_o_tiles.dtype)
        d_scores_operand = gl.convert_layout(d_scores, gl.DotOperandLayout(0, OUTPUT_D, 2))
        if AHEAD:
            # After the last tile, its own scores again: they are not used.
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
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    PACKED: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, SHARES: gl.constexpr, AHEAD: gl.constexpr,
):
    """d_k and d_v of one half of the program's keys."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OUTPUT_D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_1, 16])
    OUTPUT_D_2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_2 if D_2 > 0 else D_1, 16])
    OUTPUT_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    q_tiles, k_tiles, v_tiles, d_o_tiles, lse_tiles, delta_tiles, gate_tiles = buffers
    keys_ready, q_ready, q_free, d_o_ready, d_o_free = barriers
    parts, batches, num_queries, num_keys = counts
    first_key, part, batch, group, row_origin, row_limit = place_keys(
        masks, counts, GROUPS, Q_PER_KV, COMPRESSED, BLOCK, STRIDE, PACKED, ROWS)
    tiles = gl.cdiv(row_limit - row_origin, ROWS)
    half_key = first_key + HALF * PART_ROWS
    key = half_key + gl.arange(0, PART_ROWS, gl.SliceLayout(1, SCORES))
    key_begin, key_end = seeing_queries(
        gl.minimum(key, num_keys - 1), num_queries, masks, COMPRESSED, BLOCK, STRIDE, PACKED)
    # The program's tiles of rows see this half's keys from `first` to `last`, all of them from
    # `first_full` to `last_full`.
    begin, full_end = seeing_queries(
        gl.minimum(half_key, num_keys - 1), num_queries, masks, COMPRESSED, BLOCK, STRIDE, PACKED)
    full_begin, end = seeing_queries(
        gl.minimum(half_key + PART_ROWS, num_keys) - 1, num_queries, masks, COMPRESSED, BLOCK, STRIDE, PACKED)
    first = gl.minimum(gl.maximum(begin * Q_PER_KV - row_origin, 0) // ROWS, tiles)
    last = gl.maximum(gl.minimum(gl.cdiv(gl.maximum(end * Q_PER_KV - row_origin, 0), ROWS), tiles), first)
    first_full = gl.minimum(gl.maximum(gl.cdiv(gl.maximum(full_begin * Q_PER_KV - row_origin, 0), ROWS), first), last)
    last_full = gl.maximum(gl.minimum(gl.maximum(full_end * Q_PER_KV - row_origin, 0) // ROWS, last), first_full)
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
        bounds = (first, first_full, last_full, last)
        for run in gl.static_range(3):
            d_k, d_k_2, d_v, scores = gather_keys(
                d_k, d_k_2, d_v, scores, buffers, barriers, row_origin, key_begin, key_end, base,
                bounds[run], bounds[run + 1], last, score_scale,
                HALF, Q_PER_KV, D_1, D_2, V, GATED, ROWS, STAGES, AHEAD, run != 1,
                SCORES, OUTPUT_D, OUTPUT_D_2, OUTPUT_V)
        pass_rows(barriers, base + last, base + tiles, STAGES)
    first_place = ((part * batches + batch).to(gl.int64) * num_keys + half_key) * GROUPS + group
    left = num_keys - half_key
    D: gl.constexpr = D_1 + D_2
    store_keys(d_k_target + first_place * D, d_k * scale, left, GROUPS * D, D_1, OUTPUT_D)
    if D_2 > 0:
        store_keys(d_k_target + first_place * D + D_1, d_k_2 * scale, left, GROUPS * D, D_2, OUTPUT_D_2)
    store_keys(d_v_target + first_place * V, d_v, left, GROUPS * V, V, OUTPUT_V)


@Kernel
@gluon.jit(do_not_specialize=["num_queries", "num_keys", "query_shift", "window_size", "batches", "parts"])
def interval_dkdv_hopper_kernel(
    q_source, q_source_2, k_source, k_source_2, v_source, d_o_source, lse_source, delta_source, gate_source,
    d_k_target, d_v_target, query_begin, query_end, batches, parts, num_queries, num_keys, query_shift, window_size,
    scale, score_scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr,
    COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr, PACKED: gl.constexpr,
    GATED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, SHARES: gl.constexpr, AHEAD: gl.constexpr,
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
    keys_ready = allocate_barriers(1, (1,))[0].index(0)
    q_ready, q_free, d_o_ready, d_o_free = allocate_barriers(STAGES, (1, 2, 1, 2))
    descriptors = (
        (q_source, q_source_2), (k_source, k_source_2), v_source, d_o_source, lse_source, delta_source, gate_source)
    buffers = (q_tiles, k_tiles, v_tiles, d_o_tiles, lse_tiles, delta_tiles, gate_tiles)
    barriers = (keys_ready, q_ready, q_free, d_o_ready, d_o_free)
    masks = (query_shift, window_size, query_begin, query_end)
    counts = (parts, batches, num_queries, num_keys)
    gl.warp_specialize([
        (sum_keys, (0, d_k_target, d_v_target, buffers, barriers, masks, counts, scale, score_scale, GROUPS, Q_PER_KV,
                    COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, V, GATED, ROWS, STAGES, SHARES, AHEAD)),
        (sum_keys, (1, d_k_target, d_v_target, buffers, barriers, masks, counts, scale, score_scale, GROUPS, Q_PER_KV,
                    COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, V, GATED, ROWS, STAGES, SHARES, AHEAD)),
        (load_rows_of_keys, (descriptors, buffers, barriers, masks, counts, GROUPS, Q_PER_KV,
                             COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, GATED, ROWS, STAGES, SHARES)),
    ], [4, 1], [240, 24])

# fmt: on


def _row_numbers(problem: IntervalProblem, q_per_kv: int, tile: int) -> tuple[Descriptor, ...]:
    """Descriptors, in lines of a tile, of base-2 lse, delta and the gate; their rows lie share by share."""
    batch, num_queries, num_heads = problem.lse.shape
    shares, rows = num_heads // q_per_kv, num_queries * q_per_kv
    # The copy engine wants multiples of 16 bytes.
    numbers = problem.lse.new_empty(3, batch, shares, cdiv(rows, 4) * 4)
    row_numbers_kernel[cdiv(rows, 1024), batch * shares](
        problem.lse, problem.delta, problem.gate, numbers, *problem.gate_strides, rows, numbers.shape[3], num_queries,
        HEADS=num_heads, Q_PER_KV=q_per_kv, GATED=problem.gate is not None, SIZE=1024,
    )  # fmt: skip
    return tuple(describe_tiles(x, (batch, shares, rows), x.stride(), (1, 1, tile), LINE_LAYOUT) for x in numbers)


def launch_dkdv(problem: IntervalProblem, rows: int, stages: int, ahead: bool = False) -> tuple[Tensor, Tensor]:
    """Hopper version of `triton.interval.dkdv.launch_dkdv`."""
    d_o, q, k, v, _, _, _, scale, branch = problem
    batch, num_queries = q.shape[:2]
    num_keys, num_groups = k.shape[1:3]
    width, value_dim = split_width(q.shape[3]), v.shape[3]
    q_per_kv, shares = split_heads(problem.q_per_kv)
    queries = rows // q_per_kv
    key_tiles = cdiv(num_keys, KEYS.value)
    d_k, d_v, parts = empty_parts(problem, key_tiles, rows)
    interval_dkdv_hopper_kernel[key_tiles * parts, batch * num_groups](
        *part_descriptors(q, queries, q_per_kv, width), *part_descriptors(k, PART_ROWS.value, 1, width),
        tile_descriptor(v, PART_ROWS.value, 1, value_dim), tile_descriptor(d_o, queries, q_per_kv, value_dim),
        *_row_numbers(problem, q_per_kv, rows), d_k, d_v, branch.query_begin, branch.query_end, batch, parts,
        num_queries, num_keys, branch.query_shift, branch.window_size, scale, problem.score_scale, num_groups, q_per_kv,
        width.part_1, width.part_2, value_dim, **problem.constants(), ROWS=rows, STAGES=stages,
        SHARES=shares, AHEAD=ahead, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return add_parts(problem, d_k, d_v)
