"""Block-major selected attention of small groups for Hopper, in Gluon: loop order and results of the portable kernel.

That loads the next tile's queries at the end of an iteration and waits for them at once. Here, and in
`backward_block_major` and `backward_masked`, they are asked for as soon as the tile before has arrived, a whole
iteration ahead, with no more shared memory: three programs still fit on a multiprocessor. Only tiles that hold queries
of the block's own positions are masked. How many rows a warp copies at a time was measured.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trifocal.ops.hopper.selected.common import ask_for, exists_in, load_block
from trifocal.ops.triton.common import LOWEST
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.selected.block_csr import block_place, find_piece


@Kernel
@gluon.jit(
    do_not_specialize=[
        "num_queries", "query_shift", "num_keys", "chunk", "num_chunks", "chunk_rows", "num_blocks", "keys_per_chunk"
    ]
)  # fmt: skip
def block_major_forward_hopper_kernel(
    q, k, v, o_slots, lse_slots, slots, starts, first_pieces, piece_keys, ids, positions, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    num_queries, query_shift, num_keys, chunk, num_chunks, chunk_rows, num_blocks, keys_per_chunk, score_scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, NUM_SELECTED: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
    BLOCK: gl.constexpr, PIECE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Partial o and lse (base 2) of the slots of one piece, 64 rows (slot, head of the group) at a time."""
    ROWS: gl.constexpr = 64
    SLOTS_OF_ROW: gl.constexpr = GROUPS * NUM_SELECTED
    STEP: gl.constexpr = ROWS // Q_PER_KV
    TYPE: gl.constexpr = q.dtype.element_ty
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_o, 2)
    wide_d: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    wide_v: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [4, 1], [1, 0])
    d_rows: gl.constexpr = gl.SliceLayout(1, wide_d)
    v_rows: gl.constexpr = gl.SliceLayout(1, wide_v)
    score_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    shared_d: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], TYPE)
    shared_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, V], TYPE)

    begin, end, batch, group, block = find_piece(
        gl.program_id(0), chunk, num_chunks, starts, first_pieces, piece_keys, keys_per_chunk, num_blocks, GROUPS, PIECE
    )
    if begin < end:
        first_token, first_position = block_place(
            block, slots, begin, num_queries, query_shift, ids, cu_seqlens, SLOTS_OF_ROW, BLOCK, PACKED
        )
        first_slot_of_chunk = chunk * chunk_rows * SLOTS_OF_ROW
        first_row = batch * num_queries
        q += batch.to(gl.int64) * q_batch_stride + group * Q_PER_KV * q_head_stride
        k += batch.to(gl.int64) * k_batch_stride + first_token.to(gl.int64) * k_time_stride + group * k_head_stride
        v += batch.to(gl.int64) * v_batch_stride + first_token.to(gl.int64) * v_time_stride + group * v_head_stride

        row_d = gl.arange(0, ROWS, d_rows)
        columns_d = gl.arange(0, D, gl.SliceLayout(0, wide_d))
        columns_v = gl.arange(0, V, gl.SliceLayout(0, wide_v))
        row_s = gl.arange(0, ROWS, score_rows)
        row_o = gl.arange(0, ROWS, v_rows)
        last = end - 1

        # Rows behind the last slot take its queries again, and are not stored.
        tiles = gl.allocate_shared_memory(TYPE, [2, ROWS, D], shared_d)
        slot_d = gl.load(slots + gl.minimum(begin + row_d // Q_PER_KV, last)).to(gl.int32)
        query = slot_d // SLOTS_OF_ROW - first_row
        ask_for(q, query, row_d % Q_PER_KV, tiles.index(0), columns_d, q_time_stride, q_head_stride)
        slot_d = gl.load(slots + gl.minimum(begin + STEP + row_d // Q_PER_KV, last)).to(gl.int32)

        shared_k = gl.allocate_shared_memory(TYPE, [BLOCK, D], shared_d)
        shared_values = gl.allocate_shared_memory(TYPE, [BLOCK, V], shared_v)
        key_d = gl.arange(0, BLOCK, d_rows)
        key_v = gl.arange(0, BLOCK, v_rows)
        load_block(k, shared_k, key_d, num_keys - first_token, k_time_stride, columns_d)
        load_block(v, shared_values, key_v, num_keys - first_token, v_time_stride, columns_v)
        fence_async_shared()

        key_position = first_position + gl.arange(0, BLOCK, gl.SliceLayout(0, of_scores))
        first_query_slot = gl.load(slots + begin).to(gl.int32)
        turn = 0
        for first in range(begin, end, STEP):
            async_copy.wait_group(0)
            slot_s = gl.load(slots + gl.minimum(first + row_s // Q_PER_KV, last)).to(gl.int32)
            slot_o = gl.load(slots + gl.minimum(first + row_o // Q_PER_KV, last)).to(gl.int32)
            queries = tiles.index(turn)
            no_scores = gl.zeros([ROWS, BLOCK], gl.float32, of_scores)
            scores = warpgroup_mma(queries, shared_k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            query = slot_d // SLOTS_OF_ROW - first_row
            ask_for(q, query, row_d % Q_PER_KV, tiles.index(turn ^ 1), columns_d, q_time_stride, q_head_stride)
            slot_d = gl.load(slots + gl.minimum(first + 2 * STEP + row_d // Q_PER_KV, last)).to(gl.int32)
            position = first_query_slot // SLOTS_OF_ROW - first_row + query_shift
            if PACKED:
                position = gl.load(positions + position)
            first_query_slot = gl.load(slots + gl.minimum(first + STEP, last)).to(gl.int32)
            scores = warpgroup_mma_wait(0, [scores, queries, shared_k])[0]
            # Slots come in the order of their queries: behind the block's own queries all keys are in the past.
            if position < first_position + (BLOCK - 1):
                position_s = slot_s // SLOTS_OF_ROW - first_row + query_shift
                if PACKED:
                    position_s = gl.load(positions + position_s)
                visible = key_position[None, :] <= position_s[:, None]
                scores = gl.where(visible, scores, float("-inf"))
            top = gl.maximum(gl.max(scores, 1) * score_scale, LOWEST)
            p = gl.exp2(scores * score_scale - top[:, None])
            total = gl.sum(p, 1)
            no_o = gl.zeros([ROWS, V], gl.float32, of_o)
            o = warpgroup_mma(
                gl.convert_layout(p.to(TYPE), of_p), shared_values, no_o, use_acc=False, is_async=True
            )  # fmt: skip
            place_s = (slot_s - first_slot_of_chunk) * Q_PER_KV + row_s % Q_PER_KV
            exists_s = exists_in(row_s, first, end, Q_PER_KV)
            gl.store(lse_slots + place_s, top + gl.log2(total), mask=exists_s)
            inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, of_o))
            place_o = (slot_o - first_slot_of_chunk) * Q_PER_KV + row_o % Q_PER_KV
            exists_o = exists_in(row_o, first, end, Q_PER_KV)
            o = warpgroup_mma_wait(0, [o, shared_values])[0]
            o = (o * inverse[:, None]).to(TYPE)
            o = gl.convert_layout(o, wide_v)
            # The sum of slots reads them much later: they need not push the queries out of the cache.
            places = o_slots + place_o[:, None] * V + columns_v[None, :]
            gl.store(places, o, mask=exists_o[:, None], cache_modifier=".cs")
            turn = turn ^ 1
        async_copy.wait_group(0)
