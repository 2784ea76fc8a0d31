"""Keys-outside selected attention for Hopper with a division of labour: groups of 1, 2 and 4 heads, forward.

As `selected_gathered_hopper`, but a slot has fewer rows than the copy engine can place in a tile that the matrix units
read. Here four warps copy a tile's rows, 16 bytes a thread at a time, and four store the results; two sets of rows
share k and v of the block. Order of tiles and traffic of memory are the same.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from trifocal.ops.triton.selected_gathered_hopper import (
    LINE,
    ROWS,
    attend_slots,
    place_of,
    slot_at,
    span_of,
    work_of,
)

# fmt: off

@gluon.jit
def copy_forward(
    q, q_strides, descriptors, buffers, barriers, work, num_queries,
    REP: gl.constexpr, SLOTS_OF_ROW: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):
    """The loader: k and v of a piece by the copy engine, its tiles of queries by copies of 16 bytes."""
    k_source, v_source = descriptors
    q_tiles, k_tiles, v_tiles, o_tiles, lse_tiles = buffers
    kv_ready, kv_free, q_ready, q_free, o_ready, o_free = barriers
    slots, table, first_piece, end_piece, first_slot = work
    batch_stride, time_stride, head_stride = q_strides
    STEP: gl.constexpr = ROWS // REP
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    columns = gl.arange(0, D, gl.SliceLayout(0, WIDE))
    count = 0
    visit = 0
    for piece in range(first_piece + gl.program_id(0), end_piece, gl.num_programs(0)):
        begin, end, _masked_end = span_of(table, piece)
        batch, group, first_token = place_of(table, piece)
        turn = visit % 2
        ready = kv_ready.index(turn)
        mbarrier.wait(kv_free.index(turn), (visit // 2 & 1) ^ 1)
        mbarrier.expect(ready, k_source.block_type.nbytes + v_source.block_type.nbytes)
        tma.async_copy_global_to_shared(k_source, [batch, first_token, group, 0], ready, k_tiles.index(turn))
        tma.async_copy_global_to_shared(v_source, [batch, first_token, group, 0], ready, v_tiles.index(turn))
        base = q + batch.to(gl.int64) * batch_stride + group * REP * head_stride
        slot = slot_at(slots, gl.minimum(begin + row // REP, end - 1))
        for first in range(begin, end, STEP):
            stage = count % STAGES
            query = slot // SLOTS_OF_ROW - batch * num_queries
            offsets = query.to(gl.int64) * time_stride + row % REP * head_stride
            slot = slot_at(slots, gl.minimum(first + STEP + row // REP, end - 1))
            mbarrier.wait(q_free.index(stage), (count // STAGES & 1) ^ 1)
            async_copy.async_copy_global_to_shared(q_tiles.index(stage), base + offsets[:, None] + columns[None, :])
            async_copy.mbarrier_arrive(q_ready.index(stage), increment_count=False)
            count += 1
        visit += 1
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def copy_results(
    o_slots, lse_slots, buffers, barriers, work, REP: gl.constexpr, V: gl.constexpr, PARTS: gl.constexpr,
):
    """The storer: o and lse of one tile after the other."""
    q_tiles, k_tiles, v_tiles, o_tiles, lse_tiles = buffers
    kv_ready, kv_free, q_ready, q_free, o_ready, o_free = barriers
    slots, table, first_piece, end_piece, first_slot = work
    STEP: gl.constexpr = ROWS // REP
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [4, 1], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    line = gl.arange(0, ROWS, LANES)
    columns = gl.arange(0, V, gl.SliceLayout(0, WIDE))
    count = 0
    for piece in range(first_piece + gl.program_id(0), end_piece, gl.num_programs(0)):
        begin, end, _masked_end = span_of(table, piece)
        for first in range(begin, end, STEP):
            part = count % PARTS
            slot = slot_at(slots, gl.minimum(first + row // REP, end - 1))
            place = (slot - first_slot) * REP + row % REP
            line_slot = slot_at(slots, gl.minimum(first + line // REP, end - 1))
            mbarrier.wait(o_ready.index(part), count // PARTS & 1)
            o = o_tiles.index(part).load(WIDE)
            lse = lse_tiles.index(part).load(LANES)
            mbarrier.arrive(o_free.index(part), count=1)
            gl.store(
                o_slots + place.to(gl.int64)[:, None] * V + columns[None, :], o,
                mask=(first + row // REP < end)[:, None])
            gl.store(lse_slots + (line_slot - first_slot) * REP + line % REP, lse, mask=first + line // REP < end)
            count += 1


@gluon.jit(do_not_specialize=["num_queries", "query_shift", "chunk", "chunk_rows", "keys_per_chunk"])
def gathered_forward_copies_kernel(
    q, k_source, v_source, o_slots, lse_slots, slots, first_pieces, table,
    q_batch_stride, q_time_stride, q_head_stride,
    num_queries, query_shift, chunk, chunk_rows, keys_per_chunk, score_scale,
    REP: gl.constexpr, SLOTS_OF_ROW: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr,
):
    """Partial o and lse (base 2) of the slots of one chunk."""
    TYPE: gl.constexpr = k_source.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_tiles = gl.allocate_shared_memory(TYPE, [STAGES, ROWS, D], TILE)
    k_tiles = gl.allocate_shared_memory(TYPE, [2] + k_source.block_type.shape, k_source.layout)
    v_tiles = gl.allocate_shared_memory(TYPE, [2] + v_source.block_type.shape, v_source.layout)
    o_tiles = gl.allocate_shared_memory(TYPE, [PARTS, ROWS, V], TILE)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [PARTS, ROWS], LINE)
    kv_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    o_ready = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    o_free = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(2):
        mbarrier.init(kv_ready.index(turn), count=1)
        mbarrier.init(kv_free.index(turn), count=PARTS)
    for stage in gl.static_range(STAGES):
        # Each thread of the loader's four warps arrives when its own copies have.
        mbarrier.init(q_ready.index(stage), count=128)
        mbarrier.init(q_free.index(stage), count=1)
    for part in gl.static_range(PARTS):
        mbarrier.init(o_ready.index(part), count=1)
        mbarrier.init(o_free.index(part), count=1)
    buffers = (q_tiles, k_tiles, v_tiles, o_tiles, lse_tiles)
    barriers = (kv_ready, kv_free, q_ready, q_free, o_ready, o_free)
    q_strides = (q_batch_stride, q_time_stride, q_head_stride)
    work = work_of(slots, table, first_pieces, chunk, keys_per_chunk, chunk_rows, SLOTS_OF_ROW)
    gl.warp_specialize([
        (attend_slots, (0, buffers, barriers, work, num_queries, query_shift, score_scale,
                        REP, SLOTS_OF_ROW, D, V, BLOCK, STAGES, PARTS, True)),
        (attend_slots, (1, buffers, barriers, work, num_queries, query_shift, score_scale,
                        REP, SLOTS_OF_ROW, D, V, BLOCK, STAGES, PARTS, True)),
        (copy_forward, (q, q_strides, (k_source, v_source), buffers, barriers, work, num_queries,
                        REP, SLOTS_OF_ROW, D, STAGES)),
        (copy_results, (o_slots, lse_slots, buffers, barriers, work, REP, V, PARTS)),
    ], [4, 4, 4], [160, 96, 96])

# fmt: on
