"""Selected attention scheduled by hand for Hopper: keys-outside, and d_k, d_v of the masked order.

The same loop orders, work and results as the portable kernels of the same names in `selected.py`,
`selected_backward_gathered.py` and `selected_backward_masked.py`, for 16-bit types, widths of 64 and 128, blocks of 64
tokens and groups of up to 64 heads; everything else takes the portable kernel (`selected_tiles.fits_by_hand`).

What the portable kernel leaves: its compiler asks for the next tile's queries at the end of an iteration and waits for
them at the beginning of the next, so every tile pays the whole latency of memory. Here they are asked for as soon as
the tile before has arrived, a whole iteration ahead, with no more shared memory: three programs still fit on a
multiprocessor, and one's matrix products run under another's softmax. Only tiles that hold queries of the block's own
positions are masked.

Shared memory: k and v of the block, two tiles of queries (and of d_o); d_q of a tile is laid out for wide stores in the
tile of queries that made it. Forward's tile of o needs none where a group is small, see `neighbours`.

How many rows a warp copies at a time was measured: more rows need fewer addresses, fewer rows fill longer lines.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trifocal.ops.triton.choice_index import block_place, find_piece, part_of_block
from trifocal.ops.triton.launch import Kernel

LOWEST = gl.constexpr(-1.0e30)


@gluon.jit
def _exists(row, first, end, REP: gl.constexpr):
    """Whether rows of a tile have a slot: not behind the last, nor behind the last that fits into the tile."""
    STEP: gl.constexpr = 64 // REP
    exists = first + row // REP < end
    if STEP * REP < 64:
        exists = exists & (row < STEP * REP)
    return exists


@gluon.jit
def _load_block(x, shared, in_block, num_rows, row_stride, columns, FOR_NEIGHBOURS: gl.constexpr = False):
    """Copy the rows of a block into shared memory; zero behind the last."""
    pointers = x + in_block[:, None] * row_stride + columns[None, :]
    values = gl.load(pointers, mask=(in_block < num_rows)[:, None], other=0.0)
    shared.store(neighbours(values) if FOR_NEIGHBOURS else values)


@gluon.jit
def neighbours(x):
    """The columns of x in another order, in which a product's accumulator has 8 neighbours of x's in each thread.

    Of the columns of a product a thread holds 8 i + 2 c and 8 i + 2 c + 1 for every i, c being its place in a quad. In
    this order those of four i were columns 32 j + 8 c to 32 j + 8 c + 7 of x. Doing it again undoes it: so the right
    factor's columns are put into this order once a block, and the product leaves for memory 16 bytes at a time, without
    a way through shared memory.
    """
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    quads = x.reshape([rows, columns // 32, 4, 4, 2]).permute([0, 1, 3, 2, 4])
    return quads.reshape([rows, columns])


@gluon.constexpr_function
def neighbours_layout(columns):
    """The layout of `neighbours` of an accumulator [64, columns], by register, lane and warp."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *([0, 2**n] for n in range(5, columns.bit_length() - 1))],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def _ask_for(x, query, head, shared, columns, time_stride, head_stride):
    """Start copying the heads of queries, rows of x, into shared memory."""
    offsets = query.to(gl.int64) * time_stride + head * head_stride
    async_copy.async_copy_global_to_shared(shared, x + offsets[:, None] + columns[None, :])
    async_copy.commit_group()


@Kernel
@gluon.jit(
    do_not_specialize=[
        "num_queries", "query_shift", "num_keys", "chunk", "chunk_rows", "num_blocks", "keys_per_chunk"
    ]
)  # fmt: skip
def gathered_forward_hopper_kernel(
    q, k, v, o_slots, lse_slots, slots, starts, first_pieces, piece_keys, ids, positions, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    num_queries, query_shift, num_keys, chunk, chunk_rows, num_blocks, keys_per_chunk, score_scale,
    GROUPS: gl.constexpr, REP: gl.constexpr, PLACES: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
    BLOCK: gl.constexpr, PIECE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Partial o and lse (base 2) of the slots of one piece, 64 rows (slot, head of the group) at a time."""
    ROWS: gl.constexpr = 64
    SLOTS_OF_ROW: gl.constexpr = GROUPS * PLACES
    STEP: gl.constexpr = ROWS // REP
    # With many slots in a tile their addresses are what costs; with few, lines of memory that are not written at once.
    DIRECT: gl.constexpr = REP < 8
    TYPE: gl.constexpr = q.dtype.element_ty
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_o, 2)
    rows_d: gl.constexpr = 512 // D if DIRECT else 256 // D
    wide_d: gl.constexpr = gl.BlockedLayout([1, 8], [rows_d, 32 // rows_d], [4, 1], [1, 0])
    wide_v: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [4, 1], [1, 0])
    d_rows: gl.constexpr = gl.SliceLayout(1, wide_d)
    v_rows: gl.constexpr = gl.SliceLayout(1, wide_v)
    of_store: gl.constexpr = neighbours_layout(V) if DIRECT else wide_v
    store_rows: gl.constexpr = gl.SliceLayout(1, of_store)
    score_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    shared_d: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], TYPE)
    shared_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, V], TYPE)

    begin, end, batch, group, block = find_piece(
        gl.program_id(0), chunk, starts, first_pieces, piece_keys, keys_per_chunk, num_blocks, GROUPS, PIECE
    )
    if begin < end:
        first_token, first_position = block_place(
            block, slots, begin, num_queries, query_shift, ids, cu_seqlens, SLOTS_OF_ROW, BLOCK, PACKED
        )
        first_slot_of_chunk = chunk * chunk_rows * SLOTS_OF_ROW
        first_row = batch * num_queries
        q += batch.to(gl.int64) * q_batch_stride + group * REP * q_head_stride
        k += batch.to(gl.int64) * k_batch_stride + first_token.to(gl.int64) * k_time_stride + group * k_head_stride
        v += batch.to(gl.int64) * v_batch_stride + first_token.to(gl.int64) * v_time_stride + group * v_head_stride

        row_d = gl.arange(0, ROWS, d_rows)
        columns_d = gl.arange(0, D, gl.SliceLayout(0, wide_d))
        columns_v = gl.arange(0, V, gl.SliceLayout(0, wide_v))
        row_s = gl.arange(0, ROWS, score_rows)
        row_o = gl.arange(0, ROWS, store_rows)
        columns_o = gl.arange(0, V, gl.SliceLayout(0, of_store))
        last = end - 1

        # Rows behind the last slot take its queries again, and are not stored.
        tiles = gl.allocate_shared_memory(TYPE, [2, ROWS, D], shared_d)
        slot_d = gl.load(slots + gl.minimum(begin + row_d // REP, last)).to(gl.int32)
        query = slot_d // SLOTS_OF_ROW - first_row
        _ask_for(q, query, row_d % REP, tiles.index(0), columns_d, q_time_stride, q_head_stride)
        slot_d = gl.load(slots + gl.minimum(begin + STEP + row_d // REP, last)).to(gl.int32)

        shared_k = gl.allocate_shared_memory(TYPE, [BLOCK, D], shared_d)
        shared_values = gl.allocate_shared_memory(TYPE, [BLOCK, V], shared_v)
        key_d = gl.arange(0, BLOCK, d_rows)
        key_v = gl.arange(0, BLOCK, v_rows)
        _load_block(k, shared_k, key_d, num_keys - first_token, k_time_stride, columns_d)
        _load_block(v, shared_values, key_v, num_keys - first_token, v_time_stride, columns_v, DIRECT)
        fence_async_shared()

        key_position = first_position + gl.arange(0, BLOCK, gl.SliceLayout(0, of_scores))
        first_query_slot = gl.load(slots + begin).to(gl.int32)
        turn = 0
        for first in range(begin, end, STEP):
            async_copy.wait_group(0)
            slot_s = gl.load(slots + gl.minimum(first + row_s // REP, last)).to(gl.int32)
            if not DIRECT:
                slot_o = gl.load(slots + gl.minimum(first + row_o // REP, last)).to(gl.int32)
            queries = tiles.index(turn)
            no_scores = gl.zeros([ROWS, BLOCK], gl.float32, of_scores)
            scores = warpgroup_mma(queries, shared_k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            query = slot_d // SLOTS_OF_ROW - first_row
            _ask_for(q, query, row_d % REP, tiles.index(turn ^ 1), columns_d, q_time_stride, q_head_stride)
            slot_d = gl.load(slots + gl.minimum(first + 2 * STEP + row_d // REP, last)).to(gl.int32)
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
            place_s = (slot_s - first_slot_of_chunk) * REP + row_s % REP
            exists_s = _exists(row_s, first, end, REP)
            gl.store(lse_slots + place_s, top + gl.log2(total), mask=exists_s)
            inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, of_o))
            if DIRECT:
                place_o = gl.convert_layout(place_s, store_rows, assert_trivial=True)
                exists_o = gl.convert_layout(exists_s, store_rows, assert_trivial=True)
            else:
                place_o = (slot_o - first_slot_of_chunk) * REP + row_o % REP
                exists_o = _exists(row_o, first, end, REP)
            o = warpgroup_mma_wait(0, [o, shared_values])[0]
            o = (o * inverse[:, None]).to(TYPE)
            o = gl.convert_layout(neighbours(o) if DIRECT else o, of_store, assert_trivial=DIRECT)
            gl.store(o_slots + place_o[:, None] * V + columns_o[None, :], o, mask=exists_o[:, None])
            turn = turn ^ 1
        async_copy.wait_group(0)


@gluon.jit
def _row_numbers(lse, delta, gate, place, exists, GATED: gl.constexpr):
    """lse in base 2 (infinite where the row adds nothing), delta and gate of rows."""
    lse_2 = gl.load(lse + place) * 1.4426950408889634
    lse_2 = gl.where((lse_2 == float("-inf")) | (exists == 0), float("inf"), lse_2)
    delta_row = gl.load(delta + place)
    gate_row = delta_row
    if GATED:
        gate_row = gl.load(gate + place).to(gl.float32)
    return lse_2, delta_row, gate_row


@Kernel
@gluon.jit(
    do_not_specialize=[
        "num_queries", "query_shift", "num_keys", "chunk", "chunk_rows", "num_blocks", "keys_per_chunk"
    ]
)  # fmt: skip
def gathered_backward_hopper_kernel(
    q, k, v, d_o, lse, delta, gate, d_q_slots, d_k_parts, d_v_parts,
    slots, starts, first_pieces, piece_keys, ids, positions, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    d_batch_stride, d_time_stride, d_head_stride,
    num_queries, query_shift, num_keys, chunk, chunk_rows, num_blocks, keys_per_chunk, score_scale,
    GROUPS: gl.constexpr, REP: gl.constexpr, PLACES: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
    BLOCK: gl.constexpr, PIECE: gl.constexpr, PACKED: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """One piece: d_q of its slots and its part of d_k and d_v, all but for the factor `scale`."""
    ROWS: gl.constexpr = 64
    SLOTS_OF_ROW: gl.constexpr = GROUPS * PLACES
    STEP: gl.constexpr = ROWS // REP
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
        gl.program_id(0), chunk, starts, first_pieces, piece_keys, keys_per_chunk, num_blocks, GROUPS, PIECE
    )
    if begin < end:
        first_token, first_position = block_place(
            block, slots, begin, num_queries, query_shift, ids, cu_seqlens, SLOTS_OF_ROW, BLOCK, PACKED
        )
        first_slot_of_chunk = chunk * chunk_rows * SLOTS_OF_ROW
        first_row = batch * num_queries
        q += batch.to(gl.int64) * q_batch_stride + group * REP * q_head_stride
        d_o += batch.to(gl.int64) * d_batch_stride + group * REP * d_head_stride
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
        slot_d = gl.load(slots + gl.minimum(begin + row_d // REP, last)).to(gl.int32)
        slot_v = gl.load(slots + gl.minimum(begin + row_v // REP, last)).to(gl.int32)
        query_d, query_v = slot_d // SLOTS_OF_ROW - first_row, slot_v // SLOTS_OF_ROW - first_row
        _ask_for(q, query_d, row_d % REP, tiles_q.index(0), columns_d, q_time_stride, q_head_stride)
        _ask_for(d_o, query_v, row_v % REP, tiles_d_o.index(0), columns_v, d_time_stride, d_head_stride)

        shared_k = gl.allocate_shared_memory(TYPE, [BLOCK, D], shared_d)
        shared_values = gl.allocate_shared_memory(TYPE, [BLOCK, V], shared_v)
        shared_p_tile = gl.allocate_shared_memory(TYPE, [ROWS, BLOCK], shared_p)
        shared_d_scores = gl.allocate_shared_memory(TYPE, [ROWS, BLOCK], shared_p)
        key_d = gl.arange(0, BLOCK, d_rows)
        key_v = gl.arange(0, BLOCK, v_rows)
        _load_block(k, shared_k, key_d, num_keys - first_token, k_time_stride, columns_d)
        _load_block(v, shared_values, key_v, num_keys - first_token, v_time_stride, columns_v)
        fence_async_shared()

        d_k = gl.zeros([BLOCK, D], gl.float32, of_d)
        d_v = gl.zeros([BLOCK, V], gl.float32, of_v)
        key_position = first_position + gl.arange(0, BLOCK, gl.SliceLayout(0, of_scores))
        slot_s = gl.load(slots + gl.minimum(begin + row_s // REP, last)).to(gl.int32)
        first_query_slot = gl.load(slots + begin).to(gl.int32)
        place_s = ((slot_s // SLOTS_OF_ROW).to(gl.int64) * GROUPS + group) * REP + row_s % REP
        lse_2, delta_row, gate_row = _row_numbers(lse, delta, gate, place_s, _exists(row_s, begin, end, REP), GATED)
        turn = 0
        for first in range(begin, end, STEP):
            slot_next_d = gl.load(slots + gl.minimum(first + STEP + row_d // REP, last)).to(gl.int32)
            slot_next_v = slot_next_d
            if D != V:
                slot_next_v = gl.load(slots + gl.minimum(first + STEP + row_v // REP, last)).to(gl.int32)
            slot_next_s = gl.load(slots + gl.minimum(first + STEP + row_s // REP, last)).to(gl.int32)
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
            _ask_for(q, query_d, row_d % REP, tiles_q.index(turn ^ 1), columns_d, q_time_stride, q_head_stride)
            _ask_for(d_o, query_v, row_v % REP, tiles_d_o.index(turn ^ 1), columns_v, d_time_stride, d_head_stride)
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
            no_d_q = gl.zeros([ROWS, D], gl.float32, of_d)
            d_q = warpgroup_mma(
                gl.convert_layout(d_scores, of_d_scores), shared_k, no_d_q, use_acc=False, is_async=True
            )
            d_v = warpgroup_mma(shared_p_tile.permute((1, 0)), d_o_tile, d_v, is_async=True)
            d_k = warpgroup_mma(shared_d_scores.permute((1, 0)), queries, d_k, is_async=True)
            place_s = ((slot_next_s // SLOTS_OF_ROW).to(gl.int64) * GROUPS + group) * REP + row_s % REP
            next_exists = _exists(row_s, first + STEP, end, REP)
            lse_2, delta_row, gate_row = _row_numbers(lse, delta, gate, place_s, next_exists, GATED)
            d_q, d_k, d_v = warpgroup_mma_wait(
                0, [d_q, d_k, d_v, queries, d_o_tile, shared_k, shared_p_tile, shared_d_scores]
            )[:3]
            # The queries' own tile serves to lay d_q out for wide stores.
            queries.store(d_q.to(TYPE))
            place = (slot_d - first_slot_of_chunk) * REP + row_d % REP
            exists_d = _exists(row_d, first, end, REP)
            gl.store(d_q_slots + place[:, None] * D + columns_d[None, :], queries.load(wide_d), mask=exists_d[:, None])
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


@Kernel
@gluon.jit(do_not_specialize=["num_queries", "query_shift", "num_keys", "num_words", "num_blocks", "part_queries"])
def masked_d_kv_hopper_kernel(
    q, k, v, d_o, lse, delta, gate, d_k, d_v, bits, block_documents, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    d_batch_stride, d_time_stride, d_head_stride,
    num_queries, query_shift, num_keys, num_words, num_blocks, part_queries, score_scale, scale,
    GROUPS: gl.constexpr, REP: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
    BLOCK: gl.constexpr, PACKED: gl.constexpr, GATED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """d_k and d_v of one block, over the rows of all queries behind it; the blocks with most queries start first.

    With SPLIT over those of one part alone: into [parts, B, S, G, D] and [.., V], nothing where a part has no rows.
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

    block, begin_query, end_query = part_of_block(num_blocks, part_queries, SPLIT)
    batch = (gl.program_id(0) // GROUPS).to(gl.int64)
    group = gl.program_id(0) % GROUPS
    document_start = 0 * block
    document_end = document_start + num_keys
    if PACKED:
        # Blocks count through the pack; a document's numbers may leave one out before the next document's.
        document = gl.load(block_documents + block)
        document_start = gl.load(cu_seqlens + document)
        document_end = gl.load(cu_seqlens + document + 1)
        block = block - document_start // BLOCK - document
    first_token = document_start + block * BLOCK
    begin_query = gl.maximum(gl.maximum(first_token - query_shift, 0), begin_query)
    end_query = gl.minimum(document_end - query_shift, end_query)
    if (first_token < document_end) & ((begin_query < end_query) | (not SPLIT)):
        q += batch * q_batch_stride + group * REP * q_head_stride
        d_o += batch * d_batch_stride + group * REP * d_head_stride
        k += batch * k_batch_stride + first_token.to(gl.int64) * k_time_stride + group * k_head_stride
        v += batch * v_batch_stride + first_token.to(gl.int64) * v_time_stride + group * v_head_stride
        row_d = gl.arange(0, ROWS, d_rows)
        row_v = gl.arange(0, ROWS, v_rows)
        row_s = gl.arange(0, ROWS, score_rows)
        columns_d = gl.arange(0, D, gl.SliceLayout(0, wide_d))
        columns_v = gl.arange(0, V, gl.SliceLayout(0, wide_v))
        end_row = end_query * REP
        # Rows behind the last take its queries again, and add nothing.
        last = end_row - 1
        tiles_q = gl.allocate_shared_memory(TYPE, [2, ROWS, D], shared_d)
        tiles_d_o = gl.allocate_shared_memory(TYPE, [2, ROWS, V], shared_v)
        ask_d = gl.minimum(begin_query * REP + row_d, last)
        ask_v = gl.minimum(begin_query * REP + row_v, last)
        _ask_for(q, ask_d // REP, ask_d % REP, tiles_q.index(0), columns_d, q_time_stride, q_head_stride)
        _ask_for(d_o, ask_v // REP, ask_v % REP, tiles_d_o.index(0), columns_v, d_time_stride, d_head_stride)

        shared_k = gl.allocate_shared_memory(TYPE, [BLOCK, D], shared_d)
        shared_values = gl.allocate_shared_memory(TYPE, [BLOCK, V], shared_v)
        shared_p_tile = gl.allocate_shared_memory(TYPE, [ROWS, BLOCK], shared_p)
        shared_d_scores = gl.allocate_shared_memory(TYPE, [ROWS, BLOCK], shared_p)
        _load_block(k, shared_k, gl.arange(0, BLOCK, d_rows), document_end - first_token, k_time_stride, columns_d)
        _load_block(v, shared_values, gl.arange(0, BLOCK, v_rows), document_end - first_token, v_time_stride, columns_v)
        fence_async_shared()

        total_k = gl.zeros([BLOCK, D], gl.float32, of_d)
        total_v = gl.zeros([BLOCK, V], gl.float32, of_v)
        key_token = first_token + gl.arange(0, BLOCK, gl.SliceLayout(0, of_scores))
        words = bits + (gl.program_id(0).to(gl.int64) * num_words + block // 32) * num_queries
        first_place = batch * num_queries * (GROUPS * REP) + group * REP
        row = gl.minimum(begin_query * REP + row_s, last)
        word = gl.load(words + row // REP)
        place = first_place + row // REP * (GROUPS * REP) + row % REP
        exists = (((word >> (block & 31)) & 1) != 0) & (begin_query * REP + row_s < end_row)
        lse_2, delta_row, gate_row = _row_numbers(lse, delta, gate, place, exists, GATED)
        turn = 0
        for first in range(begin_query * REP, end_row, ROWS):
            async_copy.wait_group(0)
            queries = tiles_q.index(turn)
            d_o_tile = tiles_d_o.index(turn)
            zeros = gl.zeros([ROWS, BLOCK], gl.float32, of_scores)
            scores = warpgroup_mma(queries, shared_k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            d_p = warpgroup_mma(d_o_tile, shared_values.permute((1, 0)), zeros, use_acc=False, is_async=True)
            ask_d = gl.minimum(first + ROWS + row_d, last)
            ask_v = gl.minimum(first + ROWS + row_v, last)
            _ask_for(q, ask_d // REP, ask_d % REP, tiles_q.index(turn ^ 1), columns_d, q_time_stride, q_head_stride)
            _ask_for(d_o, ask_v // REP, ask_v % REP, tiles_d_o.index(turn ^ 1), columns_v, d_time_stride, d_head_stride)
            scores = warpgroup_mma_wait(1, [scores, queries, shared_k])[0]
            if first // REP + query_shift < first_token + (BLOCK - 1):
                # A query of the block's own document sits as far behind the key as its token does.
                token = (first + row_s) // REP + query_shift
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
            word = gl.load(words + row // REP)
            place = first_place + row // REP * (GROUPS * REP) + row % REP
            exists = (((word >> (block & 31)) & 1) != 0) & (first + ROWS + row_s < end_row)
            lse_2, delta_row, gate_row = _row_numbers(lse, delta, gate, place, exists, GATED)
            total_k, total_v = warpgroup_mma_wait(
                0, [total_k, total_v, queries, d_o_tile, shared_p_tile, shared_d_scores]
            )[:2]
            turn = turn ^ 1
        async_copy.wait_group(0)
        # d_k and d_v are contiguous, [B, S, G, *] or, split, [parts, B, S, G, *].
        if SPLIT:
            batch += (begin_query // part_queries).to(gl.int64) * (gl.num_programs(0) // GROUPS)
        key_k = gl.arange(0, BLOCK, gl.SliceLayout(1, of_d))
        key_v = gl.arange(0, BLOCK, gl.SliceLayout(1, of_v))
        first_key = batch * num_keys + first_token
        out_k = ((first_key + key_k) * GROUPS + group)[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, of_d))[None, :]
        out_v = ((first_key + key_v) * GROUPS + group)[:, None] * V + gl.arange(0, V, gl.SliceLayout(0, of_v))[None, :]
        gl.store(
            d_k + out_k, (total_k * scale).to(d_k.dtype.element_ty), mask=(first_token + key_k < document_end)[:, None]
        )
        gl.store(d_v + out_v, total_v.to(d_v.dtype.element_ty), mask=(first_token + key_v < document_end)[:, None])
