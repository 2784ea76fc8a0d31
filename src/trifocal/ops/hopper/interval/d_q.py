"""Hopper version of `triton.interval.d_q`, in Gluon; see `forward` for how programs are divided.

Each half of the warps holds 64 rows of q, d_o and d_q, and both loop over the key tiles of their range,
which the loader brings. From memory, per tile of rows: q and d_o once, k and v of the range, d_q out, and in when it
is added to.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from trifocal.ops import devices
from trifocal.ops.hopper.common import (
    PART_ROWS,
    allocate_tiles,
    multiply,
    part_descriptors,
    split_heads,
    tile_descriptor,
)
from trifocal.ops.hopper.interval.common import STAGES, first_key_of, load_tiles, make_barriers, place_tile, store_rows
from trifocal.ops.tiles import cdiv, split_width
from trifocal.ops.triton.common import LOG2_E_KERNEL
from trifocal.ops.triton.interval.common import IntervalProblem, visible_keys
from trifocal.ops.triton.launch import Kernel

# fmt: off

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
    d_q, d_q_2, count, rows, buffers, barriers, key_tiles, start, stop, score_scale,
    PART: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr,
    KEYS: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr, OUTPUT: gl.constexpr, OUTPUT_2: gl.constexpr,
):
    """Add the shares of key tiles number start to stop to d_q."""
    row_begin, row_end, row_lse, row_delta, row_gate = rows
    q_tiles, k_tiles, v_tiles, d_o_tiles = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    d_o_tile = d_o_tiles.index(PART).reshape([PART_ROWS, V])
    for number in range(start, stop):
        stage = count % STAGES
        phase = count // STAGES & 1
        zeros = gl.zeros([PART_ROWS, KEYS], gl.float32, SCORES)
        mbarrier.wait(k_ready.index(stage), phase)
        scores = multiply(q_tiles, PART, k_tiles, stage, zeros, PART_ROWS, KEYS, D_1, D_2)
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
            key = first_key_of(number, key_tiles, KEYS) + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
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
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    PACKED: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr,
    ADD: gl.constexpr, KEYS: gl.constexpr,
):
    """d_q of one half of each tile of rows."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_1, 16])
    OUTPUT_2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_2 if D_2 > 0 else D_1, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    QUERIES: gl.constexpr = PART_ROWS // Q_PER_KV
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    slots, row_tiles, batch_groups, num_queries = counts
    gate_batch_stride, gate_time_stride, gate_head_stride = gate_strides
    count = 0
    visit = 0
    for slot in range(gl.program_id(0), slots, gl.num_programs(0)):
        batch, group, tile_query, key_tiles = place_tile(
            slot, masks, counts, GROUPS, Q_PER_KV, COMPRESSED, BLOCK, STRIDE, PACKED, KEYS)
        begin, tiles, first_full, last_full = key_tiles
        masked = tiles - (last_full - first_full)
        first_query = tile_query + PART * QUERIES
        row = gl.arange(0, PART_ROWS, ROW)
        row_query = gl.minimum(first_query + row // Q_PER_KV, num_queries - 1)
        head = group * Q_PER_KV + row % Q_PER_KV
        row_begin, row_end = visible_keys(row_query, masks, COMPRESSED, BLOCK, STRIDE, PACKED)
        place = (batch * num_queries + row_query).to(gl.int64) * (GROUPS * Q_PER_KV) + head
        row_lse = gl.load(lse + place)
        row_lse = gl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E_KERNEL)
        row_delta = gl.load(delta + place)
        row_gate = row_delta
        if GATED:
            gate_place = batch.to(gl.int64) * gate_batch_stride + row_query.to(gl.int64) * gate_time_stride
            row_gate = gl.load(gate + gate_place + head * gate_head_stride).to(gl.float32)
        d_q = gl.zeros([PART_ROWS, D_1], gl.float32, OUTPUT)
        d_q_2 = d_q
        if D_2 > 0:
            d_q_2 = gl.zeros([PART_ROWS, D_2], gl.float32, OUTPUT_2)
        rows = (row_begin, row_end, row_lse, row_delta, row_gate)
        mbarrier.wait(q_ready.index(PART), visit & 1)
        bounds = (0, masked, tiles)
        for run in gl.static_range(2):
            d_q, d_q_2, count = gather_rows(
                d_q, d_q_2, count, rows, buffers, barriers, key_tiles, bounds[run], bounds[run + 1], score_scale,
                PART, D_1, D_2, V, GATED, KEYS, run == 0, SCORES, OUTPUT, OUTPUT_2)
        mbarrier.arrive(q_free.index(PART), count=1)
        D: gl.constexpr = D_1 + D_2
        target = d_q_target + ((batch.to(gl.int64) * num_queries + first_query) * GROUPS + group) * Q_PER_KV * D
        rows_left = (num_queries - first_query) * Q_PER_KV
        store_rows(target, d_q * scale, rows_left, GROUPS, Q_PER_KV, D, D_1, ADD, OUTPUT)
        if D_2 > 0:
            store_rows(target + D_1, d_q_2 * scale, rows_left, GROUPS, Q_PER_KV, D, D_2, ADD, OUTPUT_2)
        visit += 1


@Kernel
@gluon.jit(do_not_specialize=[
    "num_queries", "query_shift", "window_size", "slots", "row_tiles",
    "gate_batch_stride", "gate_time_stride", "gate_head_stride",
])
def interval_d_q_hopper_kernel(
    q_source, q_source_2, k_source, k_source_2, v_source, d_o_source,
    lse, delta, gate, d_q_target, ids, positions, first_blocks, gate_batch_stride, gate_time_stride, gate_head_stride,
    slots, row_tiles, batch_groups, num_queries, query_shift, window_size, scale, score_scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr,
    COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr, PACKED: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, KEYS: gl.constexpr, SHARE: gl.constexpr,
):
    """d_q of every tile of rows that falls to this program; with ADD, added to the old values of d_q."""
    q_tiles = allocate_tiles(q_source, q_source_2, 2, D_2)
    d_o_tiles = gl.allocate_shared_memory(
        d_o_source.dtype, [2] + d_o_source.block_type.shape, d_o_source.layout)
    k_tiles = allocate_tiles(k_source, k_source_2, STAGES, D_2)
    v_tiles = gl.allocate_shared_memory(v_source.dtype, [STAGES] + v_source.block_type.shape, v_source.layout)
    descriptors = ((q_source, q_source_2), (k_source, k_source_2), v_source, d_o_source)
    buffers = (q_tiles, k_tiles, v_tiles, d_o_tiles)
    barriers = make_barriers(STAGES)
    masks = (query_shift, window_size, ids, positions, first_blocks)
    counts = (slots, row_tiles, batch_groups, num_queries)
    gate_strides = (gate_batch_stride, gate_time_stride, gate_head_stride)
    gl.warp_specialize([
        (sum_rows, (0, lse, delta, gate, d_q_target, gate_strides, buffers, barriers, masks, counts,
                    scale, score_scale,
                    GROUPS, Q_PER_KV, COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, V, GATED, ADD, KEYS)),
        (sum_rows, (1, lse, delta, gate, d_q_target, gate_strides, buffers, barriers, masks, counts,
                    scale, score_scale,
                    GROUPS, Q_PER_KV, COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, V, GATED, ADD, KEYS)),
        (load_tiles, (descriptors, buffers, barriers, masks, counts,
                      GROUPS, Q_PER_KV, COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, KEYS, SHARE, True)),
    ], [4, 1], [240, 24])

# fmt: on


def launch_d_q(problem: IntervalProblem, d_q: Tensor | None, keys: int) -> Tensor:
    """Hopper version of `triton.interval.d_q.launch_d_q`."""
    d_o, q, k, v, lse, delta, gate, scale, branch = problem
    batch, num_queries = q.shape[:2]
    width, value_dim = split_width(q.shape[3]), v.shape[3]
    q_per_kv, share = split_heads(problem.q_per_kv)
    num_groups = k.shape[2] * share
    queries = PART_ROWS.value // q_per_kv
    row_tiles = cdiv(num_queries, 2 * queries)
    slots = row_tiles * batch * num_groups
    add = d_q is not None
    if d_q is None:
        d_q = q.new_empty(q.shape)
    interval_d_q_hopper_kernel[(min(slots, devices.multiprocessors(q.device)),)](
        *part_descriptors(q, queries, q_per_kv, width), *part_descriptors(k, keys, 1, width),
        tile_descriptor(v, keys, 1, value_dim), tile_descriptor(d_o, queries, q_per_kv, value_dim), lse, delta, gate,
        d_q, branch.ids, branch.positions, branch.first_blocks, *problem.gate_strides, slots, row_tiles,
        batch * num_groups, num_queries, branch.query_shift, branch.window_size, scale, problem.score_scale, num_groups,
        q_per_kv, width.part_1, width.part_2, value_dim, **problem.constants(), ADD=add, KEYS=keys,
        SHARE=share, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return d_q
