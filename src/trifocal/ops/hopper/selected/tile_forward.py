"""Selected attention for Hopper, forward: tiles of 128 rows that walk through their lists of blocks.

A program has three parts that run side by side, as in `hopper.interval.forward`: two of 64 rows each and a loader. It
stays on its multiprocessor and takes one tile after the other, of each group the late ones first; lists differ in
length, so the loader draws the next tile's number when it has asked for all of one. Rows are the heads of neighbouring
queries, `HEADS` rows a query: the heads of a group and, up to a power of two, some that are not stored. A part passes
over a block that none of its own queries chose, and leaves a row that did not choose a block as it is, by one number a
row.
"""

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
from trifocal.ops.hopper.common import PART_ROWS, allocate_barriers, tile_descriptor, tma_store
from trifocal.ops.hopper.interval.common import make_barriers
from trifocal.ops.hopper.selected.common import BLOCK, load_tile
from trifocal.ops.tiles import next_power_of_2
from trifocal.ops.triton.common import LN_2, LOWEST
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.selected.tile_lists import TileLists

# Blocks of keys, and of values, in shared memory.
STAGES = gl.constexpr(4)

# fmt: off

@gluon.jit
def place_tile(slot, row_tiles, GROUPS: gl.constexpr):
    """Batch, group, tile and number of the tile's list of the slot-th tile.

    One group comes after the other, so that its keys stay in the second-level cache.
    """
    batch_group = slot // row_tiles
    tile = row_tiles - 1 - slot % row_tiles
    return batch_group // GROUPS, batch_group % GROUPS, tile, batch_group.to(gl.int64) * row_tiles + tile


@gluon.jit
def load_blocks(
    q_source, k_source, v_source, buffers, barriers, lists, sizes,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, HEADS: gl.constexpr,
):
    """The loader: all that a tile reads; then the number of the next tile, for all parts.

    It has two places for that number: q of a tile is not asked for before both parts have read the number.
    """
    q_ready, q_free, k_ready, k_free, v_ready, v_free, drawn_ready = barriers
    tokens, members, counts, drawn = lists
    slots, row_tiles, width, num_queries, query_shift = sizes
    QUERIES: gl.constexpr = PART_ROWS // HEADS
    count = 0
    visit = 0
    slot = gl.program_id(0)
    while slot < slots:
        batch, group, tile, number = place_tile(slot, row_tiles, GROUPS)
        entries = gl.load(counts + number * 2 + 1)
        count = load_tile(
            count, visit, batch, group, tile, tokens + number * width, entries,
            (q_source, k_source, v_source, q_source), buffers, (q_ready, q_free, k_ready, k_free, v_ready, v_free),
            Q_PER_KV, QUERIES, STAGES, False)
        visit += 1
        slot = gl.num_programs(0) + gl.atomic_add(drawn, 1, sem="relaxed")
        gl.store(drawn + 1 + 2 * gl.program_id(0) + visit % 2, slot)
        mbarrier.arrive(drawn_ready.index(visit % 2), count=1)


@gluon.jit
def attend_blocks(
    o, running_max, running_sum, count, q, bit, last_key, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free,
    of_tokens, of_members, start, stop, entries, score_scale,
    PART: gl.constexpr, QUERIES: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
    MASKED: gl.constexpr, SCORES: gl.constexpr, OUTPUT: gl.constexpr,
):
    """Take the blocks of the entries from start to stop into the running softmax."""
    following = gl.load(of_members + gl.minimum(start, entries - 1))
    for entry in range(start, stop):
        members = following
        if MASKED:
            token = gl.load(of_tokens + entry)
        following = gl.load(of_members + gl.minimum(entry + 1, entries - 1))
        stage = count % STAGES
        phase = count // STAGES & 1
        mbarrier.wait(k_ready.index(stage), phase)
        if ((members >> (PART * QUERIES)) & ((1 << QUERIES) - 1)) == 0:
            mbarrier.wait(v_ready.index(stage), phase)
            mbarrier.arrive(k_free.index(stage), count=1)
            mbarrier.arrive(v_free.index(stage), count=1)
        else:
            zeros = gl.zeros([PART_ROWS, BLOCK], gl.float32, SCORES)
            k = k_tiles.index(stage).reshape([BLOCK, D])
            scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(k_free.index(stage), count=1)
            if MASKED:
                key = token + gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
                scores = gl.where(key[None, :] <= last_key[:, None], scores, float("-inf"))
            chosen = ((members >> bit) & 1) != 0
            new_max = gl.where(chosen, gl.maximum(running_max, gl.max(scores, 1) * score_scale), running_max)
            # Rows that did not choose the block subtract infinity, and so add nothing.
            p = gl.exp2(scores * score_scale - gl.where(chosen, new_max, float("inf"))[:, None])
            decay = gl.exp2(running_max - new_max)
            running_sum = running_sum * decay + gl.sum(p, 1)
            running_max = new_max
            o = o * gl.convert_layout(decay, gl.SliceLayout(1, OUTPUT))[:, None]
            p_operand = gl.convert_layout(p.to(v_tiles.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
            mbarrier.wait(v_ready.index(stage), phase)
            o = warpgroup_mma(p_operand, v_tiles.index(stage).reshape([BLOCK, V]), o, is_async=True)
            o = warpgroup_mma_wait(0, [o])
            mbarrier.arrive(v_free.index(stage), count=1)
        count += 1
    return o, running_max, running_sum, count


@gluon.jit
def attend_rows(
    PART: gl.constexpr, o_target, o_pointer, lse, buffers, barriers, lists, sizes, score_scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
):
    """o and lse of one half of each tile of rows."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    QUERIES: gl.constexpr = PART_ROWS // HEADS
    q_tiles, k_tiles, v_tiles, o_tiles = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free, drawn_ready = barriers
    tokens, members, counts, drawn = lists
    slots, row_tiles, width, num_queries, query_shift = sizes
    row = gl.arange(0, PART_ROWS, ROW)
    bit = PART * QUERIES + row // HEADS
    count = 0
    visit = 0
    slot = gl.program_id(0)
    while slot < slots:
        batch, group, tile, number = place_tile(slot, row_tiles, GROUPS)
        masked = gl.load(counts + number * 2)
        entries = gl.load(counts + number * 2 + 1)
        of_tokens = tokens + number * width
        of_members = members + number * width
        first_query = (2 * tile + PART) * QUERIES
        last_key = first_query + row // HEADS + query_shift

        o = gl.zeros([PART_ROWS, V], gl.float32, OUTPUT)
        running_max = gl.full([PART_ROWS], LOWEST, gl.float32, ROW)
        running_sum = gl.zeros([PART_ROWS], gl.float32, ROW)
        mbarrier.wait(q_ready.index(PART), visit & 1)
        q = q_tiles.index(PART).reshape([PART_ROWS, D])
        bounds = (0, masked, entries)
        for run in gl.static_range(2):
            o, running_max, running_sum, count = attend_blocks(
                o, running_max, running_sum, count, q, bit, last_key, k_tiles, v_tiles, k_ready, k_free, v_ready,
                v_free, of_tokens, of_members, bounds[run], bounds[run + 1], entries, score_scale,
                PART, QUERIES, D, V, run == 0, SCORES, OUTPUT)
        mbarrier.arrive(q_free.index(PART), count=1)
        visit += 1
        mbarrier.wait(drawn_ready.index(visit % 2), (visit - 1) // 2 & 1)
        slot = gl.load(drawn + 1 + 2 * gl.program_id(0) + visit % 2, volatile=True)
        sees = running_sum > 0
        inverse = gl.where(sees, 1.0 / gl.where(sees, running_sum, 1.0), 0.0)
        natural = gl.where(sees, (running_max + gl.log2(gl.where(sees, running_sum, 1.0))) * LN_2, float("-inf"))
        place = ((batch.to(gl.int64) * num_queries + first_query) * GROUPS + group) * Q_PER_KV
        keep = (row // HEADS < num_queries - first_query) & (row % HEADS < Q_PER_KV)
        gl.store(lse + place + (row // HEADS * (GROUPS * Q_PER_KV) + row % HEADS), natural, mask=keep)
        column_inverse = gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT))[:, None]
        # A row that sees nothing may have met any values of blocks that others chose.
        o = gl.where(column_inverse > 0, o * column_inverse, 0.0)
        if HEADS == Q_PER_KV:
            tma.store_wait(0)
            o_tile = o_tiles.index(PART)
            o_tile.reshape([PART_ROWS, V]).store(o.to(o_tiles.dtype))
            fence_async_shared()
            tma_store(o_target, [batch, first_query, group * Q_PER_KV, 0], o_tile)
        else:
            o_row = gl.arange(0, PART_ROWS, gl.SliceLayout(1, OUTPUT))
            o_keep = (o_row // HEADS < num_queries - first_query) & (o_row % HEADS < Q_PER_KV)
            o_place = (o_row // HEADS * (GROUPS * Q_PER_KV) + o_row % HEADS) * V
            pointers = o_pointer + place * V + o_place[:, None] + gl.arange(0, V, gl.SliceLayout(0, OUTPUT))[None, :]
            gl.store(pointers, o.to(o_tiles.dtype), mask=o_keep[:, None])
    tma.store_wait(0)


@Kernel
@gluon.jit(do_not_specialize=["slots", "row_tiles", "width", "num_queries", "query_shift"])
def tile_forward_hopper_kernel(
    q_source, k_source, v_source, o_target, o_pointer, lse, tokens, members, counts, drawn,
    slots, row_tiles, width, num_queries, query_shift, score_scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
):
    """o and lse of every tile of rows that falls to this program."""
    q_tiles = gl.allocate_shared_memory(q_source.dtype, [2] + q_source.block_type.shape, q_source.layout)
    k_tiles = gl.allocate_shared_memory(k_source.dtype, [STAGES] + k_source.block_type.shape, k_source.layout)
    v_tiles = gl.allocate_shared_memory(v_source.dtype, [STAGES] + v_source.block_type.shape, v_source.layout)
    o_tiles = gl.allocate_shared_memory(o_target.dtype, [2] + o_target.block_type.shape, o_target.layout)
    buffers = (q_tiles, k_tiles, v_tiles, o_tiles)
    drawn_ready = allocate_barriers(2, (1,))
    barriers = make_barriers(STAGES) + drawn_ready
    lists = (tokens, members, counts, drawn)
    sizes = (slots, row_tiles, width, num_queries, query_shift)
    gl.warp_specialize([
        (attend_rows, (0, o_target, o_pointer, lse, buffers, barriers, lists, sizes, score_scale,
                       GROUPS, Q_PER_KV, HEADS, D, V)),
        (attend_rows, (1, o_target, o_pointer, lse, buffers, barriers, lists, sizes, score_scale,
                       GROUPS, Q_PER_KV, HEADS, D, V)),
        (load_blocks, (q_source, k_source, v_source, buffers, barriers, lists, sizes,
                       GROUPS, Q_PER_KV, HEADS)),
    ], [4, 1], [240, 24])

# fmt: on


def launch_tile_forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, lists: TileLists, score_scale: float
) -> None:
    """Fill o [B, T, H, V] and lse [B, T, H]; a tile of the lists has 128 rows, heads padded to a power of two."""
    batch, num_queries, num_heads, dim = q.shape
    num_keys, groups, value_dim = v.shape[1:]
    q_per_kv = num_heads // groups
    heads = next_power_of_2(q_per_kv)
    queries = PART_ROWS.value // heads
    row_tiles, width = lists.tokens.shape[2:]
    slots = row_tiles * batch * groups
    programs = min(slots, devices.multiprocessors(q.device))
    # How many tiles were drawn, and two numbers of each program's tiles.
    drawn = lists.counts.new_zeros(1 + 2 * programs)
    tile_forward_hopper_kernel[(programs,)](
        tile_descriptor(q, queries, heads, dim), tile_descriptor(k, BLOCK.value, 1, dim),
        tile_descriptor(v, BLOCK.value, 1, value_dim),
        tile_descriptor(o, queries, heads, value_dim), o, lse, lists.tokens, lists.members, lists.counts,
        drawn, slots, row_tiles, width, num_queries, num_keys - num_queries, score_scale,
        GROUPS=groups, Q_PER_KV=q_per_kv, HEADS=heads, D=dim, V=value_dim, num_warps=4, maxnreg=168,
    )  # fmt: skip
