"""Selected attention on Hopper, backward by blocks, with d_q only for small groups; see `forward` for the idea."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trifocal.ops.hopper.selected.common import ask_for, exists_in, load_block, row_numbers
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.selected.block_csr import block_place, find_piece


@Kernel
@gluon.jit(
    do_not_specialize=[
        "num_queries", "query_shift", "num_keys", "chunk", "chunk_rows", "num_blocks", "keys_per_chunk"
    ]
)  # fmt: skip
def block_major_backward_hopper_kernel(
    q, k, v, d_o, lse, delta, gate, d_q_slots, d_k_parts, d_v_parts,
    slots, starts, first_pieces, piece_keys, ids, positions, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    d_batch_stride, d_time_stride, d_head_stride,
    num_queries, query_shift, num_keys, chunk, chunk_rows, num_blocks, keys_per_chunk, score_scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, NUM_SELECTED: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
    BLOCK: gl.constexpr, PIECE: gl.constexpr, PACKED: gl.constexpr, GATED: gl.constexpr, WITH_D_Q: gl.constexpr,
):  # fmt: skip
    """One piece's part of d_k and d_v and, if asked for, d_q of its slots, all but for the factor `scale`."""
    ROWS: gl.constexpr = 64
    SLOTS_OF_ROW: gl.constexpr = GROUPS * NUM_SELECTED
    STEP: gl.constexpr = ROWS // Q_PER_KV
    TYPE: gl.constexpr = q.dtype.element_ty
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_d: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    of_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    of_d_scores: gl.constexpr = gl.DotOperandLayout(0, of_d, 2)
    wide_d: gl.constexpr = gl.BlockedLayout([1, 8], [D // 16, 512 // D], [4, 1], [1, 0])
    wide_v: gl.constexpr = gl.BlockedLayout([1, 8], [V // 16, 512 // V], [4, 1], [1, 0])
    d_rows: gl.constexpr = gl.SliceLayout(1, wide_d)
    v_rows: gl.constexpr = gl.SliceLayout(1, wide_v)
    score_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    shared_d: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], TYPE)
    shared_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, V], TYPE)
    shared_p: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK], TYPE)

    begin, end, batch, group, block = find_piece(
        gl.program_id(0), chunk, 1, starts, first_pieces, piece_keys, keys_per_chunk, num_blocks, GROUPS, PIECE
    )
    if begin < end:
        first_token, first_position = block_place(
            block, slots, begin, num_queries, query_shift, ids, cu_seqlens, SLOTS_OF_ROW, BLOCK, PACKED
        )
        first_slot_of_chunk = chunk * chunk_rows * SLOTS_OF_ROW
        first_row = batch * num_queries
        q += batch.to(gl.int64) * q_batch_stride + group * Q_PER_KV * q_head_stride
        d_o += batch.to(gl.int64) * d_batch_stride + group * Q_PER_KV * d_head_stride
        k += batch.to(gl.int64) * k_batch_stride + first_token.to(gl.int64) * k_time_stride + group * k_head_stride
        v += batch.to(gl.int64) * v_batch_stride + first_token.to(gl.int64) * v_time_stride + group * v_head_stride

        row_d = gl.arange(0, ROWS, d_rows)
        row_v = gl.arange(0, ROWS, v_rows)
        row_s = gl.arange(0, ROWS, score_rows)
        columns_d = gl.arange(0, D, gl.SliceLayout(0, wide_d))
        columns_v = gl.arange(0, V, gl.SliceLayout(0, wide_v))
        last = end - 1

        # Rows behind the last slot take its queries again, and add nothing.
        tiles_q = gl.allocate_shared_memory(TYPE, [2, ROWS, D], shared_d)
        tiles_d_o = gl.allocate_shared_memory(TYPE, [2, ROWS, V], shared_v)
        slot_d = gl.load(slots + gl.minimum(begin + row_d // Q_PER_KV, last)).to(gl.int32)
        slot_v = gl.load(slots + gl.minimum(begin + row_v // Q_PER_KV, last)).to(gl.int32)
        query_d, query_v = slot_d // SLOTS_OF_ROW - first_row, slot_v // SLOTS_OF_ROW - first_row
        ask_for(q, query_d, row_d % Q_PER_KV, tiles_q.index(0), columns_d, q_time_stride, q_head_stride)
        ask_for(d_o, query_v, row_v % Q_PER_KV, tiles_d_o.index(0), columns_v, d_time_stride, d_head_stride)

        shared_k = gl.allocate_shared_memory(TYPE, [BLOCK, D], shared_d)
        shared_values = gl.allocate_shared_memory(TYPE, [BLOCK, V], shared_v)
        shared_p_tile = gl.allocate_shared_memory(TYPE, [ROWS, BLOCK], shared_p)
        shared_d_scores = gl.allocate_shared_memory(TYPE, [ROWS, BLOCK], shared_p)
        key_d = gl.arange(0, BLOCK, d_rows)
        key_v = gl.arange(0, BLOCK, v_rows)
        load_block(k, shared_k, key_d, num_keys - first_token, k_time_stride, columns_d)
        load_block(v, shared_values, key_v, num_keys - first_token, v_time_stride, columns_v)
        fence_async_shared()

        d_k = gl.zeros([BLOCK, D], gl.float32, of_d)
        d_v = gl.zeros([BLOCK, V], gl.float32, of_v)
        key_position = first_position + gl.arange(0, BLOCK, gl.SliceLayout(0, of_scores))
        slot_s = gl.load(slots + gl.minimum(begin + row_s // Q_PER_KV, last)).to(gl.int32)
        first_query_slot = gl.load(slots + begin).to(gl.int32)
        place_s = ((slot_s // SLOTS_OF_ROW).to(gl.int64) * GROUPS + group) * Q_PER_KV + row_s % Q_PER_KV
        lse_2, delta_row, gate_row = row_numbers(
            lse, delta, gate, place_s, exists_in(row_s, begin, end, Q_PER_KV), GATED
        )
        turn = 0
        for first in range(begin, end, STEP):
            slot_next_d = gl.load(slots + gl.minimum(first + STEP + row_d // Q_PER_KV, last)).to(gl.int32)
            slot_next_v = slot_next_d
            if D != V:
                slot_next_v = gl.load(slots + gl.minimum(first + STEP + row_v // Q_PER_KV, last)).to(gl.int32)
            slot_next_s = gl.load(slots + gl.minimum(first + STEP + row_s // Q_PER_KV, last)).to(gl.int32)
            position = first_query_slot // SLOTS_OF_ROW - first_row + query_shift
            if PACKED:
                position = gl.load(positions + position)
            first_query_slot = gl.load(slots + gl.minimum(first + STEP, last)).to(gl.int32)
            async_copy.wait_group(0)
            queries = tiles_q.index(turn)
            d_o_tile = tiles_d_o.index(turn)
            zeros = gl.zeros([ROWS, BLOCK], gl.float32, of_scores)
            scores = warpgroup_mma(queries, shared_k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            d_p = warpgroup_mma(d_o_tile, shared_values.permute((1, 0)), zeros, use_acc=False, is_async=True)
            query_d, query_v = slot_next_d // SLOTS_OF_ROW - first_row, slot_next_v // SLOTS_OF_ROW - first_row
            ask_for(q, query_d, row_d % Q_PER_KV, tiles_q.index(turn ^ 1), columns_d, q_time_stride, q_head_stride)
            ask_for(d_o, query_v, row_v % Q_PER_KV, tiles_d_o.index(turn ^ 1), columns_v, d_time_stride, d_head_stride)
            scores = warpgroup_mma_wait(1, [scores, queries, shared_k])[0]
            # Slots come in the order of their queries: behind the block's own queries all keys are in the past.
            if position < first_position + (BLOCK - 1):
                position_s = slot_s // SLOTS_OF_ROW - first_row + query_shift
                if PACKED:
                    position_s = gl.load(positions + position_s)
                visible = key_position[None, :] <= position_s[:, None]
                scores = gl.where(visible, scores, float("-inf"))
            p = gl.exp2(scores * score_scale - lse_2[:, None])
            if GATED:
                p = p * gate_row[:, None]
            d_p = warpgroup_mma_wait(0, [d_p, d_o_tile, shared_values])[0]
            d_scores = (p * (d_p - delta_row[:, None])).to(TYPE)
            shared_p_tile.store(p.to(TYPE))
            shared_d_scores.store(d_scores)
            fence_async_shared()
            d_q = gl.zeros([ROWS, D], gl.float32, of_d)
            if WITH_D_Q:
                d_q = warpgroup_mma(
                    gl.convert_layout(d_scores, of_d_scores), shared_k, d_q, use_acc=False, is_async=True
                )
            d_v = warpgroup_mma(shared_p_tile.permute((1, 0)), d_o_tile, d_v, is_async=True)
            d_k = warpgroup_mma(shared_d_scores.permute((1, 0)), queries, d_k, is_async=True)
            place_s = ((slot_next_s // SLOTS_OF_ROW).to(gl.int64) * GROUPS + group) * Q_PER_KV + row_s % Q_PER_KV
            next_exists = exists_in(row_s, first + STEP, end, Q_PER_KV)
            lse_2, delta_row, gate_row = row_numbers(lse, delta, gate, place_s, next_exists, GATED)
            d_q, d_k, d_v = warpgroup_mma_wait(
                0, [d_q, d_k, d_v, queries, d_o_tile, shared_k, shared_p_tile, shared_d_scores]
            )[:3]
            if WITH_D_Q:
                # The queries' own tile serves to lay d_q out for wide stores.
                queries.store(d_q.to(TYPE))
                place = (slot_d - first_slot_of_chunk) * Q_PER_KV + row_d % Q_PER_KV
                exists_d = exists_in(row_d, first, end, Q_PER_KV)
                targets = d_q_slots + place[:, None] * D + columns_d[None, :]
                gl.store(targets, queries.load(wide_d), mask=exists_d[:, None])
            slot_d = slot_next_d
            slot_s = slot_next_s
            turn = turn ^ 1
        async_copy.wait_group(0)
        key_k = gl.program_id(0).to(gl.int64) * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, of_d))
        key_v_out = gl.program_id(0).to(gl.int64) * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, of_v))
        out_d = gl.arange(0, D, gl.SliceLayout(0, of_d))
        out_v = gl.arange(0, V, gl.SliceLayout(0, of_v))
        gl.store(d_k_parts + key_k[:, None] * D + out_d[None, :], d_k)
        gl.store(d_v_parts + key_v_out[:, None] * V + out_v[None, :], d_v)
