"""Hopper version of `triton.interval.forward`, in Gluon.

A program has three parts that run side by side. Two of four warps have 64 rows each: scores of the next key tile while
the last product with values runs. A loader, one warp, starts the copies of q, k and v (TMA) as soon as a buffer is
free. A program stays on its multiprocessor and takes one tile of 128 rows after the other, those with the longest past
first; of its key tiles those that need a mask come first.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trifocal.ops import devices
from trifocal.ops.hopper.common import (
    PART_ROWS,
    allocate_tiles,
    multiply,
    part_descriptors,
    split_heads,
    tile_descriptor,
    tma_store,
)
from trifocal.ops.hopper.interval.common import STAGES, first_key_of, load_tiles, make_barriers, place_tile, store_rows
from trifocal.ops.tiles import cdiv, split_width
from trifocal.ops.triton.common import LN_2, LOG2_E, LOWEST
from trifocal.ops.triton.interval.common import Branch, visible_keys
from trifocal.ops.triton.launch import Kernel

# fmt: off

@gluon.jit
def hide(scores, first_key, row_begin, row_end, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Put scores of keys that a row does not see to -inf."""
    key = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
    visible = (key[None, :] >= row_begin[:, None]) & (key[None, :] < row_end[:, None])
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def weigh(scores, running_max, running_sum, score_scale):
    """One step of the running softmax: probabilities, maximum, sum, and the factor on everything so far."""
    new_max = gl.maximum(running_max, gl.max(scores, 1) * score_scale)
    p = gl.exp2(scores * score_scale - new_max[:, None])
    decay = gl.exp2(running_max - new_max)
    return p, new_max, running_sum * decay + gl.sum(p, 1), decay


@gluon.jit
def settle(x):
    """Return x, and let no later statement of the program start before x is computed.

    The assembler moves a wait for products in front of arithmetic that should run beside them. It moves nothing
    across a fence. This fence is never executed, since x is not negative.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p membar.cta; mov.b32 $0, $1; }",
        "=f,f", [x], gl.float32, False, 1)


@gluon.jit
def attend_tiles(
    softmax, count, buffers, barriers, key_tiles, row_begin, row_end, start, stop, score_scale,
    PART: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr, KEYS: gl.constexpr,
    MASKED: gl.constexpr, SCORES: gl.constexpr, OUTPUT: gl.constexpr,
):
    """Key tiles number start to stop: each one's scores together with the tile before's product with values."""
    o, p, running_max, running_sum = softmax
    q_tiles, k_tiles, v_tiles, o_tiles = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    for number in range(start, stop):
        stage = count % STAGES
        before = (count - 1) % STAGES
        mbarrier.wait(k_ready.index(stage), count // STAGES & 1)
        zeros = gl.zeros([PART_ROWS, KEYS], gl.float32, SCORES)
        scores = multiply(q_tiles, PART, k_tiles, stage, zeros, PART_ROWS, KEYS, D_1, D_2)
        mbarrier.wait(v_ready.index(before), (count - 1) // STAGES & 1)
        p_operand = gl.convert_layout(p.to(v_tiles.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
        o = warpgroup_mma(p_operand, v_tiles.index(before).reshape([KEYS, V]), o, is_async=True)
        scores = warpgroup_mma_wait(1, [scores])
        mbarrier.arrive(k_free.index(stage), count=1)
        if MASKED:
            scores = hide(scores, first_key_of(number, key_tiles, KEYS), row_begin, row_end, KEYS, SCORES)
        p, running_max, running_sum, decay = weigh(scores, running_max, running_sum, score_scale)
        running_sum = settle(running_sum)
        o, p = warpgroup_mma_wait(0, [o, p])
        mbarrier.arrive(v_free.index(before), count=1)
        o = o * gl.convert_layout(decay, gl.SliceLayout(1, OUTPUT))[:, None]
        count += 1
    return (o, p, running_max, running_sum), count


@gluon.jit
def attend_rows(
    PART: gl.constexpr, o_target, o_pointer, lse, buffers, barriers, masks, counts, score_scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    PACKED: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr, KEYS: gl.constexpr,
):
    """o and lse of one half of each tile of rows."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    QUERIES: gl.constexpr = PART_ROWS // Q_PER_KV
    q_tiles, k_tiles, v_tiles, o_tiles = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    slots, row_tiles, batch_groups, num_queries = counts
    count = 0
    visit = 0
    for slot in range(gl.program_id(0), slots, gl.num_programs(0)):
        batch, group, tile_query, key_tiles = place_tile(
            slot, masks, counts, GROUPS, Q_PER_KV, COMPRESSED, BLOCK, STRIDE, PACKED, KEYS)
        begin, tiles, first_full, last_full = key_tiles
        masked = tiles - (last_full - first_full)
        first_query = tile_query + PART * QUERIES
        row = gl.arange(0, PART_ROWS, ROW)
        row_query = first_query + row // Q_PER_KV
        row_begin, row_end = visible_keys(
            gl.minimum(row_query, num_queries - 1), masks, COMPRESSED, BLOCK, STRIDE, PACKED)

        o = gl.zeros([PART_ROWS, V], gl.float32, OUTPUT)
        running_max = gl.full([PART_ROWS], LOWEST, gl.float32, ROW)
        running_sum = gl.zeros([PART_ROWS], gl.float32, ROW)
        mbarrier.wait(q_ready.index(PART), visit & 1)
        stage = count % STAGES
        mbarrier.wait(k_ready.index(stage), count // STAGES & 1)
        zeros = gl.zeros([PART_ROWS, KEYS], gl.float32, SCORES)
        scores = multiply(q_tiles, PART, k_tiles, stage, zeros, PART_ROWS, KEYS, D_1, D_2)
        scores = warpgroup_mma_wait(0, [scores])
        mbarrier.arrive(k_free.index(stage), count=1)
        scores = hide(scores, first_key_of(0, key_tiles, KEYS), row_begin, row_end, KEYS, SCORES)
        p, running_max, running_sum, decay = weigh(scores, running_max, running_sum, score_scale)
        softmax = (o, p, running_max, running_sum)
        count += 1
        softmax, count = attend_tiles(
            softmax, count, buffers, barriers, key_tiles, row_begin, row_end, 1, masked, score_scale,
            PART, D_1, D_2, V, KEYS, True, SCORES, OUTPUT)
        softmax, count = attend_tiles(
            softmax, count, buffers, barriers, key_tiles, row_begin, row_end, gl.maximum(masked, 1), tiles, score_scale,
            PART, D_1, D_2, V, KEYS, False, SCORES, OUTPUT)
        o, p, running_max, running_sum = softmax
        mbarrier.arrive(q_free.index(PART), count=1)
        before = (count - 1) % STAGES
        mbarrier.wait(v_ready.index(before), (count - 1) // STAGES & 1)
        p_operand = gl.convert_layout(p.to(v_tiles.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
        o = warpgroup_mma(p_operand, v_tiles.index(before).reshape([KEYS, V]), o, is_async=True)
        sees = running_sum > 0
        inverse = gl.where(sees, 1.0 / gl.where(sees, running_sum, 1.0), 0.0)
        natural = gl.where(sees, (running_max + gl.log2(gl.where(sees, running_sum, 1.0))) * LN_2, float("-inf"))
        place = ((batch.to(gl.int64) * num_queries + first_query) * GROUPS + group) * Q_PER_KV
        gl.store(lse + place + ((row // Q_PER_KV) * (GROUPS * Q_PER_KV) + row % Q_PER_KV), natural,
            mask=row_query < num_queries)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive(v_free.index(before), count=1)
        column_inverse = gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT))[:, None]
        o = gl.where(column_inverse > 0, o * column_inverse, 0.0)
        if D_2 > 0:
            # Wide tiles leave no room for o in shared memory.
            rows_left = (num_queries - first_query) * Q_PER_KV
            store_rows(o_pointer + place * V, o, rows_left, GROUPS, Q_PER_KV, V, V, False, OUTPUT)
        else:
            tma.store_wait(0)
            o_tile = o_tiles.index(PART)
            o_tile.reshape([PART_ROWS, V]).store(o.to(o_tiles.dtype))
            fence_async_shared()
            tma_store(o_target, [batch, first_query, group * Q_PER_KV, 0], o_tile)
        visit += 1
    tma.store_wait(0)


@Kernel
@gluon.jit(do_not_specialize=["num_queries", "query_shift", "window_size", "slots", "row_tiles"])
def interval_forward_hopper_kernel(
    q_source, q_source_2, k_source, k_source_2, v_source, o_target,
    o_pointer, lse, ids, positions, first_blocks,
    slots, row_tiles, batch_groups, num_queries, query_shift, window_size, score_scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, V: gl.constexpr,
    COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr, PACKED: gl.constexpr,
    KEYS: gl.constexpr, SHARE: gl.constexpr,
):
    """o and lse of every tile of rows that falls to this program."""
    q_tiles = allocate_tiles(q_source, q_source_2, 2, D_2)
    k_tiles = allocate_tiles(k_source, k_source_2, STAGES, D_2)
    v_tiles = gl.allocate_shared_memory(v_source.dtype, [STAGES] + v_source.block_type.shape, v_source.layout)
    o_tiles = v_tiles
    if D_2 == 0:
        o_tiles = gl.allocate_shared_memory(o_target.dtype, [2] + o_target.block_type.shape, o_target.layout)
    descriptors = ((q_source, q_source_2), (k_source, k_source_2), v_source)
    buffers = (q_tiles, k_tiles, v_tiles, o_tiles)
    barriers = make_barriers(STAGES)
    masks = (query_shift, window_size, ids, positions, first_blocks)
    counts = (slots, row_tiles, batch_groups, num_queries)
    gl.warp_specialize([
        (attend_rows, (0, o_target, o_pointer, lse, buffers, barriers, masks, counts, score_scale,
                       GROUPS, Q_PER_KV, COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, V, KEYS)),
        (attend_rows, (1, o_target, o_pointer, lse, buffers, barriers, masks, counts, score_scale,
                       GROUPS, Q_PER_KV, COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, V, KEYS)),
        (load_tiles, (descriptors, buffers, barriers, masks, counts,
                      GROUPS, Q_PER_KV, COMPRESSED, BLOCK, STRIDE, PACKED, D_1, D_2, KEYS, SHARE, False)),
    ], [4, 1], [240, 24])

# fmt: on


def launch_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, branch: Branch, keys: int) -> tuple[Tensor, Tensor]:
    """Hopper version of `triton.interval.forward.launch_forward`."""
    batch, num_queries, num_heads, _ = q.shape
    value_dim = v.shape[3]
    width = split_width(q.shape[3])
    q_per_kv, share = split_heads(num_heads // k.shape[2])
    num_groups = k.shape[2] * share
    o = q.new_empty(batch, num_queries, num_heads, value_dim)
    lse = q.new_empty(batch, num_queries, num_heads, dtype=torch.float32)
    queries = PART_ROWS.value // q_per_kv
    row_tiles = cdiv(num_queries, 2 * queries)
    slots = row_tiles * batch * num_groups
    interval_forward_hopper_kernel[(min(slots, devices.multiprocessors(q.device)),)](
        *part_descriptors(q, queries, q_per_kv, width), *part_descriptors(k, keys, 1, width),
        tile_descriptor(v, keys, 1, value_dim), tile_descriptor(o, queries, q_per_kv, value_dim), o, lse, branch.ids,
        branch.positions, branch.first_blocks, slots, row_tiles, batch * num_groups, num_queries, branch.query_shift,
        branch.window_size, scale * LOG2_E, num_groups, q_per_kv, width.part_1, width.part_2, value_dim,
        **branch.constants(), KEYS=keys, SHARE=share, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return o, lse
