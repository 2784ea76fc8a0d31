"""Selected attention on Hopper, d_k and d_v of the masked order; see `forward` for the idea."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trifocal.ops.hopper.selected.common import ask_for, load_block, row_numbers
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.selected.block_csr import block_of_program


@Kernel
@gluon.jit(do_not_specialize=["num_queries", "query_shift", "num_keys", "num_words", "num_blocks", "part_queries"])
def masked_dkdv_hopper_kernel(
    q, k, v, d_o, lse, delta, gate, d_k, d_v, bits, block_documents, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    d_batch_stride, d_time_stride, d_head_stride,
    num_queries, query_shift, num_keys, num_words, num_blocks, part_queries, score_scale, scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
    BLOCK: gl.constexpr, PACKED: gl.constexpr, GATED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """d_k and d_v of one block, over the rows of all queries behind it; the blocks with most queries start first.

    With SPLIT over only those of one part: into [parts, B, S, G, D] and [.., V], nothing where a part has no rows.
    """
    ROWS: gl.constexpr = 64
    TYPE: gl.constexpr = q.dtype.element_ty
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_d: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    of_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    wide_d: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    wide_v: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    d_rows: gl.constexpr = gl.SliceLayout(1, wide_d)
    v_rows: gl.constexpr = gl.SliceLayout(1, wide_v)
    score_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    shared_d: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], TYPE)
    shared_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, V], TYPE)
    shared_p: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK], TYPE)

    block, first_token, document_end, part, begin_query, end_query = block_of_program(
        num_blocks, part_queries, num_keys, query_shift, block_documents, cu_seqlens, BLOCK, PACKED, SPLIT
    )
    batch = (gl.program_id(0) // GROUPS).to(gl.int64)
    group = gl.program_id(0) % GROUPS
    if (first_token < document_end) & ((begin_query < end_query) | (not SPLIT)):
        q += batch * q_batch_stride + group * Q_PER_KV * q_head_stride
        d_o += batch * d_batch_stride + group * Q_PER_KV * d_head_stride
        k += batch * k_batch_stride + first_token.to(gl.int64) * k_time_stride + group * k_head_stride
        v += batch * v_batch_stride + first_token.to(gl.int64) * v_time_stride + group * v_head_stride
        row_d = gl.arange(0, ROWS, d_rows)
        row_v = gl.arange(0, ROWS, v_rows)
        row_s = gl.arange(0, ROWS, score_rows)
        columns_d = gl.arange(0, D, gl.SliceLayout(0, wide_d))
        columns_v = gl.arange(0, V, gl.SliceLayout(0, wide_v))
        end_row = end_query * Q_PER_KV
        # Rows behind the last take its queries again, and add nothing; a block that no query is behind takes the first.
        last = gl.maximum(end_row - 1, 0)
        tiles_q = gl.allocate_shared_memory(TYPE, [2, ROWS, D], shared_d)
        tiles_d_o = gl.allocate_shared_memory(TYPE, [2, ROWS, V], shared_v)
        ask_d = gl.minimum(begin_query * Q_PER_KV + row_d, last)
        ask_v = gl.minimum(begin_query * Q_PER_KV + row_v, last)
        ask_for(q, ask_d // Q_PER_KV, ask_d % Q_PER_KV, tiles_q.index(0), columns_d, q_time_stride, q_head_stride)
        ask_for(d_o, ask_v // Q_PER_KV, ask_v % Q_PER_KV, tiles_d_o.index(0), columns_v, d_time_stride, d_head_stride)

        shared_k = gl.allocate_shared_memory(TYPE, [BLOCK, D], shared_d)
        shared_values = gl.allocate_shared_memory(TYPE, [BLOCK, V], shared_v)
        shared_p_tile = gl.allocate_shared_memory(TYPE, [ROWS, BLOCK], shared_p)
        shared_d_scores = gl.allocate_shared_memory(TYPE, [ROWS, BLOCK], shared_p)
        load_block(k, shared_k, gl.arange(0, BLOCK, d_rows), document_end - first_token, k_time_stride, columns_d)
        load_block(v, shared_values, gl.arange(0, BLOCK, v_rows), document_end - first_token, v_time_stride, columns_v)
        fence_async_shared()

        total_k = gl.zeros([BLOCK, D], gl.float32, of_d)
        total_v = gl.zeros([BLOCK, V], gl.float32, of_v)
        key_token = first_token + gl.arange(0, BLOCK, gl.SliceLayout(0, of_scores))
        word_of_block = gl.minimum(block // 32, num_words - 1)
        words = bits + (gl.program_id(0).to(gl.int64) * num_words + word_of_block) * num_queries
        first_place = batch * num_queries * (GROUPS * Q_PER_KV) + group * Q_PER_KV
        row = gl.minimum(begin_query * Q_PER_KV + row_s, last)
        word = gl.load(words + row // Q_PER_KV)
        place = first_place + row // Q_PER_KV * (GROUPS * Q_PER_KV) + row % Q_PER_KV
        exists = (((word >> (block & 31)) & 1) != 0) & (begin_query * Q_PER_KV + row_s < end_row)
        lse_2, delta_row, gate_row = row_numbers(lse, delta, gate, place, exists, GATED)
        turn = 0
        for first in range(begin_query * Q_PER_KV, end_row, ROWS):
            async_copy.wait_group(0)
            queries = tiles_q.index(turn)
            d_o_tile = tiles_d_o.index(turn)
            zeros = gl.zeros([ROWS, BLOCK], gl.float32, of_scores)
            scores = warpgroup_mma(queries, shared_k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            d_p = warpgroup_mma(d_o_tile, shared_values.permute((1, 0)), zeros, use_acc=False, is_async=True)
            ask_d = gl.minimum(first + ROWS + row_d, last)
            ask_v = gl.minimum(first + ROWS + row_v, last)
            next_q, next_d_o = tiles_q.index(turn ^ 1), tiles_d_o.index(turn ^ 1)
            ask_for(q, ask_d // Q_PER_KV, ask_d % Q_PER_KV, next_q, columns_d, q_time_stride, q_head_stride)
            ask_for(d_o, ask_v // Q_PER_KV, ask_v % Q_PER_KV, next_d_o, columns_v, d_time_stride, d_head_stride)
            scores = warpgroup_mma_wait(1, [scores, queries, shared_k])[0]
            if first // Q_PER_KV + query_shift < first_token + (BLOCK - 1):
                # A query of the block's own document sits as far behind the key as its token does.
                token = (first + row_s) // Q_PER_KV + query_shift
                scores = gl.where(key_token[None, :] <= token[:, None], scores, float("-inf"))
            p = gl.exp2(scores * score_scale - lse_2[:, None])
            if GATED:
                p = p * gate_row[:, None]
            d_p = warpgroup_mma_wait(0, [d_p, d_o_tile, shared_values])[0]
            d_scores = (p * (d_p - delta_row[:, None])).to(TYPE)
            shared_p_tile.store(p.to(TYPE))
            shared_d_scores.store(d_scores)
            fence_async_shared()
            total_v = warpgroup_mma(shared_p_tile.permute((1, 0)), d_o_tile, total_v, is_async=True)
            total_k = warpgroup_mma(shared_d_scores.permute((1, 0)), queries, total_k, is_async=True)
            row = gl.minimum(first + ROWS + row_s, last)
            word = gl.load(words + row // Q_PER_KV)
            place = first_place + row // Q_PER_KV * (GROUPS * Q_PER_KV) + row % Q_PER_KV
            exists = (((word >> (block & 31)) & 1) != 0) & (first + ROWS + row_s < end_row)
            lse_2, delta_row, gate_row = row_numbers(lse, delta, gate, place, exists, GATED)
            total_k, total_v = warpgroup_mma_wait(
                0, [total_k, total_v, queries, d_o_tile, shared_p_tile, shared_d_scores]
            )[:2]
            turn = turn ^ 1
        async_copy.wait_group(0)
        # d_k and d_v are contiguous, [B, S, G, *] or, split, [parts, B, S, G, *].
        if SPLIT:
            batch += part.to(gl.int64) * (gl.num_programs(0) // GROUPS)
        key_k = gl.arange(0, BLOCK, gl.SliceLayout(1, of_d))
        key_v = gl.arange(0, BLOCK, gl.SliceLayout(1, of_v))
        first_key = batch * num_keys + first_token
        out_k = ((first_key + key_k) * GROUPS + group)[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, of_d))[None, :]
        out_v = ((first_key + key_v) * GROUPS + group)[:, None] * V + gl.arange(0, V, gl.SliceLayout(0, of_v))[None, :]
        gl.store(
            d_k + out_k, (total_k * scale).to(d_k.dtype.element_ty), mask=(first_token + key_k < document_end)[:, None]
        )
        gl.store(d_v + out_v, total_v.to(d_v.dtype.element_ty), mask=(first_token + key_v < document_end)[:, None])
