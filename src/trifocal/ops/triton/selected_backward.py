"""Selected attention, backward: the two loop orders of the forward that training takes.

| order | kernel | a program holds | it loops over | out |
|---|---|---|---|---|
| keys outside | gathered | a block's k, v, d_k, d_v | the slots of a piece | d_k, d_v of the piece; d_q of each slot |
| | reduction | a row's d_q | its slots, in order | d_q |
| | reduction | a block's d_k, d_v | its pieces, in order | d_k, d_v |
| masked tiles | d_q | a tile of queries, q, d_o, d_q | blocks | d_q |
| | d_k, d_v | a block's k, v, d_k, d_v | all later queries, all heads of the group | d_k, d_v |
| | or, of few programs | the same | those of one part of the queries | d_k, d_v of the part |
| | addition | some keys' d_k or d_v | their parts, in order | d_k, d_v |

No atomics, every sum has one order. A piece is bounded, so the first block, which everyone chose, is many programs'
work; its pieces meet in the reduction.

`gate` is what multiplies o in the mixed output: backward takes the gradient of the mixture and the gate instead
of their product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents
from trifocal.ops.triton.choice_index import (
    block_place,
    build_choice_index,
    choice_bits,
    documents_or,
    find_piece,
    part_of_block,
    split_blocks,
)
from trifocal.ops.triton.combine import row_sums
from trifocal.ops.triton.common import (
    Tile,
    add_product,
    architecture,
    load_tile,
    multiprocessors,
    nothing_lost,
    split_width,
    store_tile,
    strides,
    tma_fits,
    unit_stride,
)
from trifocal.ops.triton.launch import Kernel, cdiv, next_power_of_2
from trifocal.ops.triton.selected import (
    BUFFER_BYTES,
    LARGEST_BLOCK,
    choose_order,
    either,
    heavy_first,
    load_slots,
    reduce_slots,
    rows_of_chunk,
)
from trifocal.ops.triton.selected_tiles import (
    FEWEST_HEADS_BY_ROLES,
    fits_by_hand,
    gathered_tile,
    masked_d_q_tile,
    masked_tile,
    part_of_queries,
    partial_d_q_type,
    sizes_by_hand,
)

LOG2_E = 1.4426950408889634
LOG2_E_KERNEL = tl.constexpr(LOG2_E)


@triton.jit
def _row_numbers(lse, delta, gate, place, exists, GATED: tl.constexpr):
    """lse in base 2 (infinite where the row adds nothing), delta and gate of rows."""
    lse_2 = tl.load(lse + place, mask=exists, other=float("-inf")) * LOG2_E_KERNEL
    lse_2 = tl.where(lse_2 == float("-inf"), float("inf"), lse_2)
    delta_row = tl.load(delta + place, mask=exists, other=0.0)
    gate_row = delta_row
    if GATED:
        gate_row = tl.load(gate + place, mask=exists, other=0.0).to(tl.float32)
    return lse_2, delta_row, gate_row


@Kernel
@triton.jit(
    do_not_specialize=[
        "num_queries", "query_shift", "num_keys", "chunk", "chunk_rows", "num_blocks", "keys_per_chunk"
    ]
)  # fmt: skip
def gathered_backward_kernel(
    q, k, v, d_o, lse, delta, gate, d_q_slots, d_k_parts, d_v_parts,
    slots, starts, first_pieces, piece_keys, ids, positions, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    d_batch_stride, d_time_stride, d_head_stride,
    num_queries, query_shift, num_keys, chunk, chunk_rows, num_blocks, keys_per_chunk, score_scale,
    GROUPS: tl.constexpr, REP: tl.constexpr, PLACES: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, PIECE: tl.constexpr, PACKED: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One piece: d_q of its slots and its part of d_k and d_v, all but for the factor `scale`."""
    begin, end, batch, group, block = find_piece(
        tl.program_id(0), chunk, starts, first_pieces, piece_keys, keys_per_chunk, num_blocks, GROUPS, PIECE
    )
    if begin < end:
        first_slot_of_chunk = chunk * chunk_rows * (GROUPS * PLACES)
        any_slot = begin
        if PACKED:
            any_slot = tl.load(slots + begin).to(tl.int32)
        first_token, first_position = block_place(
            block, any_slot, num_queries, query_shift, ids, cu_seqlens, GROUPS * PLACES, BLOCK, PACKED
        )
        in_block = tl.arange(0, KEYS)
        key_exists = (in_block < BLOCK) & (first_token + in_block < num_keys)
        q += batch.to(tl.int64) * q_batch_stride + group * REP * q_head_stride
        d_o += batch.to(tl.int64) * d_batch_stride + group * REP * d_head_stride
        k += batch.to(tl.int64) * k_batch_stride + first_token.to(tl.int64) * k_time_stride + group * k_head_stride
        v += batch.to(tl.int64) * v_batch_stride + first_token.to(tl.int64) * v_time_stride + group * v_head_stride
        k_1 = load_tile(k, in_block * k_time_stride, key_exists, 0, D_1, D, True)
        v_1 = load_tile(v, in_block * v_time_stride, key_exists, 0, V_1, V, True)
        k_2 = k_1
        v_2 = v_1
        d_k_1 = tl.zeros([KEYS, D_1], tl.float32)
        d_v_1 = tl.zeros([KEYS, V_1], tl.float32)
        d_k_2 = d_k_1
        d_v_2 = d_v_1
        if D_2 > 0:
            k_2 = load_tile(k, in_block * k_time_stride, key_exists, D_1, D_2, D, True)
            d_k_2 = tl.zeros([KEYS, D_2], tl.float32)
        if V_2 > 0:
            v_2 = load_tile(v, in_block * v_time_stride, key_exists, V_1, V_2, V, True)
            d_v_2 = tl.zeros([KEYS, V_2], tl.float32)
        lost_k_1, lost_k_2 = nothing_lost(d_k_1, k_1), nothing_lost(d_k_2, k_1)
        lost_v_1, lost_v_2 = nothing_lost(d_v_1, v_1), nothing_lost(d_v_2, v_1)

        head = tl.arange(0, ROWS) % REP
        for first in tl.range(begin, end, ROWS // REP):
            exists, slot = load_slots(slots, first, end, REP, ROWS)
            row = slot // (GROUPS * PLACES)
            query = row - batch * num_queries
            position = query + query_shift
            if PACKED:
                position = tl.load(positions + position, mask=exists, other=0)
            lse_2, delta_row, gate_row = _row_numbers(
                lse, delta, gate, (row.to(tl.int64) * GROUPS + group) * REP + head, exists, GATED
            )
            q_offsets = query.to(tl.int64) * q_time_stride + head * q_head_stride
            d_offsets = query.to(tl.int64) * d_time_stride + head * d_head_stride
            q_1 = load_tile(q, q_offsets, exists, 0, D_1, D, True)
            scores = tl.dot(q_1, tl.trans(k_1), input_precision="ieee")
            if D_2 > 0:
                q_2 = load_tile(q, q_offsets, exists, D_1, D_2, D, True)
                scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision="ieee")
            visible = key_exists[None, :] & (first_position + in_block[None, :] <= position[:, None])
            p = tl.where(visible, tl.exp2(scores * score_scale - lse_2[:, None]), 0.0)
            if GATED:
                p = p * gate_row[:, None]
            d_o_1 = load_tile(d_o, d_offsets, exists, 0, V_1, V, True)
            d_p = tl.dot(d_o_1, tl.trans(v_1), input_precision="ieee")
            if V_2 > 0:
                d_o_2 = load_tile(d_o, d_offsets, exists, V_1, V_2, V, True)
                d_p = tl.dot(d_o_2, tl.trans(v_2), d_p, input_precision="ieee")
            d_scores = (p * (d_p - delta_row[:, None])).to(q_1.dtype)
            place = ((slot - first_slot_of_chunk).to(tl.int64) * REP + head) * D
            store_tile(d_q_slots, place, exists, tl.dot(d_scores, k_1, input_precision="ieee"), 0, D_1, D)
            if D_2 > 0:
                d_q_2 = tl.dot(d_scores, k_2, input_precision="ieee")
                store_tile(d_q_slots, place, exists, d_q_2, D_1, D_2, D)
            p = p.to(d_o_1.dtype)
            d_v_1, lost_v_1 = add_product(d_v_1, lost_v_1, tl.trans(p), d_o_1)
            if V_2 > 0:
                d_v_2, lost_v_2 = add_product(d_v_2, lost_v_2, tl.trans(p), d_o_2)
            d_k_1, lost_k_1 = add_product(d_k_1, lost_k_1, tl.trans(d_scores), q_1)
            if D_2 > 0:
                d_k_2, lost_k_2 = add_product(d_k_2, lost_k_2, tl.trans(d_scores), q_2)

        part = tl.program_id(0).to(tl.int64) * BLOCK + in_block
        in_part = in_block < BLOCK
        store_tile(d_k_parts, part * D, in_part, d_k_1, 0, D_1, D)
        store_tile(d_v_parts, part * V, in_part, d_v_1, 0, V_1, V)
        if D_2 > 0:
            store_tile(d_k_parts, part * D, in_part, d_k_2, D_1, D_2, D)
        if V_2 > 0:
            store_tile(d_v_parts, part * V, in_part, d_v_2, V_1, V_2, V)


@Kernel
@triton.jit(do_not_specialize=["num_queries", "query_shift", "num_keys", "chunk", "num_blocks", "keys_per_chunk"])
def reduce_pieces_kernel(
    parts, d_x, slots, starts, first_pieces, ids, cu_seqlens,
    x_batch_stride, x_time_stride, x_head_stride,
    num_queries, query_shift, num_keys, chunk, num_blocks, keys_per_chunk, factor,
    GROUPS: tl.constexpr, SLOTS_OF_ROW: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, ADD: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Some keys of one block: the sum of its pieces' parts in one chunk, added to what the chunks before gave."""
    number = tl.program_id(0)
    first_key = chunk * keys_per_chunk
    first_piece = tl.load(first_pieces + first_key + number)
    end_piece = tl.load(first_pieces + first_key + number + 1)
    if first_piece < end_piece:
        batch_group = number // num_blocks
        any_slot = tl.load(slots + tl.load(starts + first_key + number)).to(tl.int32)
        first_token, _ = block_place(
            number % num_blocks, any_slot, num_queries, query_shift, ids, cu_seqlens, SLOTS_OF_ROW, BLOCK, PACKED
        )
        in_block = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
        token = first_token + in_block
        # Keys behind the document's end belong to the next document's first block.
        end_token = num_keys
        if PACKED:
            document = tl.load(ids + first_token)
            end_token = tl.load(cu_seqlens + document + 1)
        columns = tl.arange(0, WIDTH_PAD)
        inside = (in_block < BLOCK)[:, None] & (columns < WIDTH)[None, :]
        exists = inside & (token < end_token)[:, None]
        d_x += (batch_group // GROUPS).to(tl.int64) * x_batch_stride + (batch_group % GROUPS) * x_head_stride
        target = d_x + token.to(tl.int64)[:, None] * x_time_stride + columns[None, :]
        total = tl.zeros([KEYS, WIDTH_PAD], tl.float32)
        if ADD:
            total = tl.load(target, mask=exists, other=0.0)
        chunk_piece = tl.load(first_pieces + first_key)
        for piece in range(first_piece - chunk_piece, end_piece - chunk_piece):
            source = (piece * BLOCK + in_block).to(tl.int64) * WIDTH
            total += tl.load(parts + source[:, None] + columns[None, :], mask=inside, other=0.0)
        tl.store(target, (total * factor).to(d_x.dtype.element_ty), mask=exists)


@triton.jit
def _d_q_of_blocks(
    d_q_1, d_q_2, q_1, q_2, d_o_1, d_o_2, k, v, k_time_stride, v_time_stride, lse_2, delta_row, gate_row,
    bits, tile_bits, position, document_start, document_end, first_block, end_block, score_scale,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Add what a run of blocks, all in the word `bits`, gives to d_q of the rows that chose them."""
    in_block = tl.arange(0, KEYS)
    for block in tl.range(first_block, end_block):
        first_position = block * BLOCK
        first_token = document_start + first_position
        keep = (in_block >= 0) & (((tile_bits >> (block & 31)) & 1) != 0)
        if MASKED:
            keep = keep & (in_block < BLOCK) & (first_token + in_block < document_end)
        k_base = k + first_token.to(tl.int64) * k_time_stride
        v_base = v + first_token.to(tl.int64) * v_time_stride
        k_1 = load_tile(k_base, in_block * k_time_stride, keep, 0, D_1, D, True)
        scores = tl.dot(q_1, tl.trans(k_1), input_precision="ieee")
        if D_2 > 0:
            k_2 = load_tile(k_base, in_block * k_time_stride, keep, D_1, D_2, D, True)
            scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision="ieee")
        v_1 = load_tile(v_base, in_block * v_time_stride, keep, 0, V_1, V, True)
        d_p = tl.dot(d_o_1, tl.trans(v_1), input_precision="ieee")
        if V_2 > 0:
            v_2 = load_tile(v_base, in_block * v_time_stride, keep, V_1, V_2, V, True)
            d_p = tl.dot(d_o_2, tl.trans(v_2), d_p, input_precision="ieee")
        chosen = ((bits >> (block & 31)) & 1) != 0
        p = tl.exp2(scores * score_scale - tl.where(chosen, lse_2, float("inf"))[:, None])
        if MASKED:
            p = tl.where(keep[None, :] & (first_position + in_block[None, :] <= position[:, None]), p, 0.0)
        if GATED:
            p = p * gate_row[:, None]
        d_scores = (p * (d_p - delta_row[:, None])).to(k_1.dtype)
        d_q_1 = tl.dot(d_scores, k_1, d_q_1, input_precision="ieee")
        if D_2 > 0:
            d_q_2 = tl.dot(d_scores, k_2, d_q_2, input_precision="ieee")
    return d_q_1, d_q_2


@Kernel
@triton.jit(do_not_specialize=["num_queries", "query_shift", "num_keys", "num_words"])
def masked_d_q_kernel(
    q, k, v, d_o, lse, delta, gate, d_q, bits, ids, positions, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    d_batch_stride, d_time_stride, d_head_stride,
    num_queries, query_shift, num_keys, num_words, score_scale, scale,
    GROUPS: tl.constexpr, REP: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """d_q of one tile of rows, in the order of the forward kernel."""
    first_row, batch_group = heavy_first(ROWS)
    batch = (batch_group // GROUPS).to(tl.int64)
    group = batch_group % GROUPS
    row = first_row + tl.arange(0, ROWS)
    exists = row < num_queries * REP
    row = tl.where(exists, row, 0)
    query = row // REP
    head = row % REP
    last_query = tl.minimum((first_row + ROWS - 1) // REP, num_queries - 1)
    first_document = 0
    last_document = 0
    if PACKED:
        position = tl.load(positions + query + query_shift)
        document_of_row = tl.load(ids + query + query_shift)
        first_document = tl.load(ids + first_row // REP + query_shift)
        last_document = tl.load(ids + last_query + query_shift)
    else:
        position = query + query_shift
    place = (batch * num_queries + query) * (GROUPS * REP) + group * REP + head
    lse_2, delta_row, gate_row = _row_numbers(lse, delta, gate, place, exists, GATED)
    q += batch * q_batch_stride + group * REP * q_head_stride
    d_o += batch * d_batch_stride + group * REP * d_head_stride
    k += batch * k_batch_stride + group * k_head_stride
    v += batch * v_batch_stride + group * v_head_stride
    q_offsets = query.to(tl.int64) * q_time_stride + head * q_head_stride
    d_offsets = query.to(tl.int64) * d_time_stride + head * d_head_stride
    q_1 = load_tile(q, q_offsets, exists, 0, D_1, D, True)
    d_o_1 = load_tile(d_o, d_offsets, exists, 0, V_1, V, True)
    q_2 = q_1
    d_o_2 = d_o_1
    d_q_1 = tl.zeros([ROWS, D_1], tl.float32)
    d_q_2 = lse_2
    if D_2 > 0:
        q_2 = load_tile(q, q_offsets, exists, D_1, D_2, D, True)
        d_q_2 = tl.zeros([ROWS, D_2], tl.float32)
    if V_2 > 0:
        d_o_2 = load_tile(d_o, d_offsets, exists, V_1, V_2, V, True)
    for document in range(first_document, last_document + 1):
        in_document = exists
        document_start = 0 * document
        document_end = document_start + num_keys
        if PACKED:
            in_document = exists & (document_of_row == document)
            document_start = tl.load(cu_seqlens + document)
            document_end = tl.load(cu_seqlens + document + 1)
        last_position = tl.max(tl.where(in_document, position, 0))
        lowest_position = tl.min(tl.where(in_document, position, last_position))
        end_block = last_position // BLOCK + 1
        first_masked = (lowest_position + 1) // BLOCK
        if BLOCK < KEYS:
            first_masked = 0 * end_block
        for word in range((end_block + 31) // 32):
            word_place = (batch_group.to(tl.int64) * num_words + word) * num_queries
            chosen_bits = tl.load(bits + word_place + query, mask=in_document, other=0)
            tile_bits = tl.reduce(chosen_bits, 0, either)
            first = word * 32
            middle = tl.minimum(tl.maximum(first_masked, first), first + 32)
            end = tl.minimum(end_block, first + 32)
            d_q_1, d_q_2 = _d_q_of_blocks(
                d_q_1, d_q_2, q_1, q_2, d_o_1, d_o_2, k, v, k_time_stride, v_time_stride,
                lse_2, delta_row, gate_row, chosen_bits, tile_bits, position,
                document_start, document_end, first, middle, score_scale,
                D, D_1, D_2, V, V_1, V_2, BLOCK, KEYS, False, GATED,
            )  # fmt: skip
            d_q_1, d_q_2 = _d_q_of_blocks(
                d_q_1, d_q_2, q_1, q_2, d_o_1, d_o_2, k, v, k_time_stride, v_time_stride,
                lse_2, delta_row, gate_row, chosen_bits, tile_bits, position,
                document_start, document_end, middle, end, score_scale,
                D, D_1, D_2, V, V_1, V_2, BLOCK, KEYS, True, GATED,
            )  # fmt: skip
    place = place.to(tl.int64) * D
    store_tile(d_q, place, exists, d_q_1 * scale, 0, D_1, D)
    if D_2 > 0:
        store_tile(d_q, place, exists, d_q_2 * scale, D_1, D_2, D)


@Kernel
@triton.jit(do_not_specialize=["num_queries", "query_shift", "num_keys", "num_words", "num_blocks", "part_queries"])
def masked_d_kv_kernel(
    q, k, v, d_o, lse, delta, gate, d_k, d_v, bits, block_documents, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    d_batch_stride, d_time_stride, d_head_stride,
    num_queries, query_shift, num_keys, num_words, num_blocks, part_queries, score_scale, scale,
    GROUPS: tl.constexpr, REP: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """d_k and d_v of one block, over the rows of all queries behind it; the blocks with most queries start first.

    With SPLIT over those of one part alone: into [parts, B, S, G, D] and [.., V], nothing where a part has no rows.
    """
    block, begin_query, end_query = part_of_block(num_blocks, part_queries, SPLIT)
    batch = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    document_start = 0 * block
    document_end = document_start + num_keys
    if PACKED:
        # Blocks count through the pack; a document's numbers may leave one out before the next document's.
        document = tl.load(block_documents + block)
        document_start = tl.load(cu_seqlens + document)
        document_end = tl.load(cu_seqlens + document + 1)
        block = block - document_start // BLOCK - document
    first_position = block * BLOCK
    first_token = document_start + first_position
    begin_query = tl.maximum(tl.maximum(first_token - query_shift, 0), begin_query)
    end_query = tl.minimum(document_end - query_shift, end_query)
    if (first_token < document_end) & ((begin_query < end_query) | (not SPLIT)):
        in_block = tl.arange(0, KEYS)
        key_exists = (in_block < BLOCK) & (first_token + in_block < document_end)
        q += batch * q_batch_stride + group * REP * q_head_stride
        d_o += batch * d_batch_stride + group * REP * d_head_stride
        k += batch * k_batch_stride + first_token.to(tl.int64) * k_time_stride + group * k_head_stride
        v += batch * v_batch_stride + first_token.to(tl.int64) * v_time_stride + group * v_head_stride
        k_1 = load_tile(k, in_block * k_time_stride, key_exists, 0, D_1, D, True)
        v_1 = load_tile(v, in_block * v_time_stride, key_exists, 0, V_1, V, True)
        k_2 = k_1
        v_2 = v_1
        d_k_1 = tl.zeros([KEYS, D_1], tl.float32)
        d_v_1 = tl.zeros([KEYS, V_1], tl.float32)
        d_k_2 = d_k_1
        d_v_2 = d_v_1
        if D_2 > 0:
            k_2 = load_tile(k, in_block * k_time_stride, key_exists, D_1, D_2, D, True)
            d_k_2 = tl.zeros([KEYS, D_2], tl.float32)
        if V_2 > 0:
            v_2 = load_tile(v, in_block * v_time_stride, key_exists, V_1, V_2, V, True)
            d_v_2 = tl.zeros([KEYS, V_2], tl.float32)
        lost_k_1, lost_k_2 = nothing_lost(d_k_1, k_1), nothing_lost(d_k_2, k_1)
        lost_v_1, lost_v_2 = nothing_lost(d_v_1, v_1), nothing_lost(d_v_2, v_1)
        word_place = (tl.program_id(0).to(tl.int64) * num_words + block // 32) * num_queries
        end_row = end_query * REP
        for first_row in tl.range(begin_query * REP, end_row, ROWS):
            row = first_row + tl.arange(0, ROWS)
            query = row // REP
            head = row % REP
            in_tile = row < end_row
            query = tl.where(in_tile, query, begin_query)
            word = tl.load(bits + word_place + query, mask=in_tile, other=0)
            exists = ((word >> (block & 31)) & 1) != 0
            place = (batch * num_queries + query) * (GROUPS * REP) + group * REP + head
            lse_2, delta_row, gate_row = _row_numbers(lse, delta, gate, place, exists, GATED)
            q_offsets = query.to(tl.int64) * q_time_stride + head * q_head_stride
            d_offsets = query.to(tl.int64) * d_time_stride + head * d_head_stride
            # Keys are rows here, so that p and d_scores go from registers into the products for d_v and d_k.
            q_1 = load_tile(q, q_offsets, in_tile, 0, D_1, D, True)
            scores = tl.dot(k_1, tl.trans(q_1), input_precision="ieee")
            if D_2 > 0:
                q_2 = load_tile(q, q_offsets, in_tile, D_1, D_2, D, True)
                scores = tl.dot(k_2, tl.trans(q_2), scores, input_precision="ieee")
            # A query of the block's own document sits as far behind the key as its token does.
            visible = key_exists[:, None] & (first_token + in_block[:, None] <= (query + query_shift)[None, :])
            p = tl.where(visible, tl.exp2(scores * score_scale - lse_2[None, :]), 0.0)
            if GATED:
                p = p * gate_row[None, :]
            d_o_1 = load_tile(d_o, d_offsets, in_tile, 0, V_1, V, True)
            d_v_1, lost_v_1 = add_product(d_v_1, lost_v_1, p.to(d_o_1.dtype), d_o_1)
            d_p = tl.dot(v_1, tl.trans(d_o_1), input_precision="ieee")
            if V_2 > 0:
                d_o_2 = load_tile(d_o, d_offsets, in_tile, V_1, V_2, V, True)
                d_v_2, lost_v_2 = add_product(d_v_2, lost_v_2, p.to(d_o_1.dtype), d_o_2)
                d_p = tl.dot(v_2, tl.trans(d_o_2), d_p, input_precision="ieee")
            d_scores = (p * (d_p - delta_row[None, :])).to(q_1.dtype)
            d_k_1, lost_k_1 = add_product(d_k_1, lost_k_1, d_scores, q_1)
            if D_2 > 0:
                d_k_2, lost_k_2 = add_product(d_k_2, lost_k_2, d_scores, q_2)
        # d_k and d_v are contiguous, [B, S, G, *] or, split, [parts, B, S, G, *].
        if SPLIT:
            batch += (begin_query // part_queries).to(tl.int64) * (tl.num_programs(0) // GROUPS)
        key_place = (batch * num_keys + first_token + in_block) * GROUPS + group
        store_tile(d_k, key_place * D, key_exists, d_k_1 * scale, 0, D_1, D)
        store_tile(d_v, key_place * V, key_exists, d_v_1, 0, V_1, V)
        if D_2 > 0:
            store_tile(d_k, key_place * D, key_exists, d_k_2 * scale, D_1, D_2, D)
        if V_2 > 0:
            store_tile(d_v, key_place * V, key_exists, d_v_2, V_1, V_2, V)


@triton.jit
def _sum_parts_of_rows(
    parts, total, row, exists, begin, end, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr
):
    """Add rows of parts [parts, count, WIDTH] in order, each from its first part to its last."""
    columns = tl.arange(0, WIDTH_PAD)
    inside = exists[:, None] & (columns < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    value = tl.zeros([ROWS, WIDTH_PAD], tl.float32)
    first_part = tl.min(tl.where(exists, begin, 2**30))
    for part in tl.range(first_part, tl.max(tl.where(exists, end, 0)), loop_unroll_factor=4):
        keep = inside & ((begin <= part) & (part < end))[:, None]
        value += tl.load(parts + part * count.to(tl.int64) * WIDTH + place, mask=keep, other=0.0)
    tl.store(total + place, value.to(total.dtype.element_ty), mask=inside)


@Kernel
@triton.jit(do_not_specialize=["num_queries", "query_shift", "num_keys", "part_queries", "count"])
def sum_parts_of_blocks_kernel(
    d_k_parts, d_v_parts, d_k, d_v, ids, cu_seqlens, num_queries, query_shift, num_keys, part_queries, count,
    GROUPS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """d_k, or d_v, of some keys from the parts whose queries lie behind the key's block, in order."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < count
    token = tl.where(exists, row, 0) // GROUPS % num_keys
    document_start = token * 0
    document_end = document_start + num_keys
    if PACKED:
        document = tl.load(ids + token)
        document_start = tl.load(cu_seqlens + document)
        document_end = tl.load(cu_seqlens + document + 1)
    block_start = token - (token - document_start) % BLOCK
    begin = tl.maximum(block_start - query_shift, 0) // part_queries
    end = tl.cdiv(tl.maximum(document_end - query_shift, 0), part_queries)
    if tl.program_id(1) == 0:
        _sum_parts_of_rows(d_k_parts, d_k, row, exists, begin, end, count, ROWS, D, D_PAD)
    else:
        _sum_parts_of_rows(d_v_parts, d_v, row, exists, begin, end, count, ROWS, V, V_PAD)


def selected_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    selected_blocks: Tensor,
    geometry: Geometry,
    scale: float,
    documents: Documents | None,
    *,
    gate: Tensor | None = None,
    delta: Tensor | None = None,
    order: str | None = None,
    tile: Tile | None = None,
    tile_d_q: Tile | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    by_hand: bool | None = None,
    part_queries: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `selected_forward`.

    Args:
        d_o: Gradient of o or, with a gate, of the mixture that takes `gate * o`; [B, T, H, V].
        q, k, v: Inputs of the forward.
        o, lse: Its results.
        selected_blocks: The choice, [B, T, G, N].
        geometry: Block sizes, in tokens.
        scale: Factor on the scores.
        documents: Packed documents; None for one sequence a batch entry.
        gate: [B, T, H]; None for ones.
        delta: The sum of `o * d_o` over the value dim, [B, T, H], fp32; computed here when not given.
        order: `"gathered"` or `"masked"` instead of what the shape asks for.
        tile: A configuration of the d_k, d_v kernel; `keys` is how many slots a piece has.
        tile_d_q: A configuration of the masked order's d_q kernel.
        buffer_bytes: Partial d_q that may be held at a time.
        by_hand: Whether the kernels scheduled by hand for Hopper run; None: where they can.
        part_queries: Of how many queries one program of the masked order's d_k, d_v takes the rows.

    Returns:
        d_q, d_k, d_v in the types of q, k, v, contiguous.
    """
    q, k, v, d_o, o = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(d_o), unit_stride(o)
    batch, num_queries, num_heads, dim = q.shape
    num_keys, groups, value_dim = v.shape[1:]
    selected_blocks, block_size = split_blocks(selected_blocks, geometry.selection_block_size, LARGEST_BLOCK)
    places = selected_blocks.shape[-1]
    order = order or choose_order(
        num_queries, num_keys, places, block_size, backward=True, packed=documents is not None
    )
    rep = num_heads // groups
    widths, value_widths = split_width(dim), split_width(value_dim)
    delta = row_sums(d_o, o.contiguous()) if delta is None else delta.contiguous()
    gates = delta if gate is None else gate.contiguous()
    lse = lse.contiguous()
    d_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shape = {
        "GROUPS": groups, "REP": rep, "D": widths.size, "D_1": widths.part_1, "D_2": widths.part_2,
        "V": value_widths.size, "V_1": value_widths.part_1, "V_2": value_widths.part_2,
        "BLOCK": block_size, "KEYS": max(16, next_power_of_2(block_size)),
        "PACKED": documents is not None, "GATED": gate is not None,
    }  # fmt: skip
    all_strides = (*strides(q), *strides(k), *strides(v), *strides(d_o))
    shift = num_queries, num_keys - num_queries, num_keys
    score_scale = scale * LOG2_E
    ids, positions, cu_seqlens = documents_or(documents, lse)
    by_hand = by_hand is not False and fits_by_hand(order, q, k, v, d_o, rep=rep, block_size=block_size)
    if order == "masked":
        tile = tile or masked_tile(q.dtype, rep, widths.padded, value_widths.padded, by_hand)
        tile_d_q = tile_d_q or masked_d_q_tile(q.dtype, widths.padded, value_widths.padded)
        d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        bits = choice_bits(selected_blocks, block_size, num_keys, documents)
        masked_d_q_kernel[(batch * groups, cdiv(num_queries * rep, tile_d_q.rows))](
            q, k, v, d_o, lse, delta, gates, d_q, bits, ids, positions, cu_seqlens, *all_strides, *shift,
            bits.shape[2], score_scale, scale,
            **shape, ROWS=tile_d_q.rows, num_warps=tile_d_q.warps, num_stages=tile_d_q.stages,
            maxnreg=tile_d_q.registers,
        )  # fmt: skip
        num_blocks, block_documents = -(-num_keys // block_size), lse
        if documents is not None:
            num_documents = cu_seqlens.shape[0] - 1
            num_blocks = num_keys // block_size + num_documents
            every_document = torch.arange(num_documents, dtype=torch.int32, device=q.device)
            first_blocks = cu_seqlens[:-1] // block_size + every_document
            every_block = torch.arange(num_blocks, dtype=torch.int32, device=q.device)
            block_documents = torch.searchsorted(first_blocks, every_block, right=True, out_int32=True) - 1
        part_queries = part_queries or part_of_queries(
            num_queries, rep, batch * groups * num_blocks, multiprocessors(q.device)
        )
        parts = cdiv(num_queries, part_queries)
        sums = d_k, d_v
        if parts > 1:
            sums = tuple(torch.empty(parts, *x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
        masked, configuration = masked_d_kv_kernel, {**shape, "ROWS": tile.rows}
        if by_hand:
            from trifocal.ops.triton.selected_hopper import masked_d_kv_hopper_kernel

            masked, configuration = masked_d_kv_hopper_kernel, sizes_by_hand(shape)
        masked[(batch * groups, num_blocks * parts)](
            q, k, v, d_o, lse, delta, gates, *sums, bits, block_documents, cu_seqlens, *all_strides, *shift,
            bits.shape[2], num_blocks, part_queries, score_scale, scale,
            **configuration, SPLIT=parts > 1, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        )  # fmt: skip
        if parts > 1:
            count = batch * num_keys * groups
            columns = [next_power_of_2(width) for width in (dim, value_dim)]
            rows = max(1, 1024 // max(columns))
            sum_parts_of_blocks_kernel[(cdiv(count, rows), 2)](
                *sums, d_k, d_v, ids, cu_seqlens, *shift, part_queries, count,
                GROUPS=groups, D=dim, D_PAD=columns[0], V=value_dim, V_PAD=columns[1],
                BLOCK=block_size, PACKED=documents is not None, ROWS=rows,
            )  # fmt: skip
        return d_q, d_k, d_v

    hopper = architecture(q.device) == "hopper"
    tile = tile or gathered_tile(q.dtype, rep, widths.padded, value_widths.padded, by_hand, hopper)
    row_slots = groups * places
    rows = batch * num_queries
    d_q_type = partial_d_q_type(q.dtype, places, bool(by_hand))
    chunk_rows = rows_of_chunk(row_slots * rep * dim * d_q_type.itemsize, rows, buffer_bytes)
    index = build_choice_index(
        selected_blocks, block_size, num_keys, documents, chunk_rows=chunk_rows, piece_slots=tile.keys
    )
    d_q_slots = torch.empty(index.chunk_rows * row_slots * rep, dim, dtype=d_q_type, device=q.device)
    parts_of_keys = index.pieces_per_chunk * block_size
    d_k_parts = torch.empty(parts_of_keys, dim, dtype=torch.float32, device=q.device)
    d_v_parts = torch.empty(parts_of_keys, value_dim, dtype=torch.float32, device=q.device)
    # Blocks that nobody chose have no piece. Sums of several chunks stay exact as they come.
    several = index.num_chunks > 1
    d_k, d_v = (torch.zeros(x.shape, dtype=torch.float32 if several else x.dtype, device=x.device) for x in (k, v))
    gathered, configuration = gathered_backward_kernel, {**shape, "ROWS": tile.rows, "maxnreg": tile.registers}
    if by_hand:
        from trifocal.ops.triton.selected_hopper import gathered_backward_hopper_kernel

        gathered, configuration = gathered_backward_hopper_kernel, sizes_by_hand(shape)
    compute = None
    if by_hand and rep >= FEWEST_HEADS_BY_ROLES and 64 % rep == 0 and tma_fits(q, k, v, d_o):
        from trifocal.ops.triton.selected_gathered_hopper import backward_by_roles

        compute = backward_by_roles(
            d_o, q, k, v, lse, delta, gate if gate is None else gates, d_q_slots, d_k_parts, d_v_parts, index,
            (ids, positions, cu_seqlens), score_scale,
            places=places, block_size=block_size, packed=documents is not None,
        )  # fmt: skip
    for chunk in range(index.num_chunks):
        if compute is not None:
            compute(chunk)
        else:
            gathered[(index.pieces_per_chunk,)](
                q, k, v, d_o, lse, delta, gates, d_q_slots, d_k_parts, d_v_parts,
                index.slots, index.starts, index.first_pieces, index.piece_keys, ids, positions, cu_seqlens,
                *all_strides, *shift, chunk, index.chunk_rows, index.num_blocks, index.keys_per_chunk, score_scale,
                **configuration, PLACES=places, PIECE=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        first_row = chunk * index.chunk_rows
        end_row = min(first_row + index.chunk_rows, rows)
        reduce_slots(d_q_slots, None, index.keys, d_q, None, first_row, end_row, index.unused, scale, rep, places)
        for parts, d_x, factor in ((d_k_parts, d_k, scale), (d_v_parts, d_v, 1.0)):
            width = d_x.shape[-1]
            keys_of_program = min(16, next_power_of_2(block_size))
            reduce_pieces_kernel[(index.keys_per_chunk, cdiv(block_size, keys_of_program))](
                parts, d_x, index.slots, index.starts, index.first_pieces, ids, cu_seqlens, *strides(d_x), *shift,
                chunk, index.num_blocks, index.keys_per_chunk, 1.0 if several else factor,
                GROUPS=groups, SLOTS_OF_ROW=row_slots, BLOCK=block_size, PACKED=documents is not None, ADD=several,
                WIDTH=width, WIDTH_PAD=next_power_of_2(width), KEYS=keys_of_program, num_warps=4,
            )  # fmt: skip
    if several:
        d_k, d_v = d_k.mul_(scale).to(k.dtype), d_v.to(v.dtype)
    return d_q, d_k, d_v
