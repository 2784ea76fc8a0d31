"""Selected attention, forward: the masked and the block-major order, and which of the three orders runs.

Block-major, for small groups in long rows: a block's slots (see `block_csr`) come in pieces; the tile's rows are the
heads of the group of consecutive slots, so a tile is full at any group size. Each slot gets a partial o, normalised, in
the inputs' type, and its log-sum-exp; a second kernel adds a query's slots in order. The partials of all rows would be
N times as large as o, so rows go in chunks. Masked: FlashAttention over the whole past; a block that a row did not
choose leaves the row as it is, by one number a row. Sums have one order in each: two runs give equal bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import dispatch, tiles
from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents, longest_document
from trifocal.ops.tiles import cdiv, next_power_of_2
from trifocal.ops.triton.common import (
    LN_2,
    LOG2_E,
    LOWEST,
    load_and_multiply,
    load_and_multiply_left,
    load_parts,
    store_parts,
    store_tile,
    unit_stride,
    zeros_in_parts,
)
from trifocal.ops.triton.documents import default_documents
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.selected.block_csr import block_place, build_block_csr, choice_bits, find_piece, split_blocks
from trifocal.ops.triton.selected.common import attend_block, kernel_constants, kernel_sizes, load_block
from trifocal.ops.triton.selected.tile_forward import tile_forward
from trifocal.ops.triton.selected.tile_lists import bitwise_or


@triton.jit
def load_slots(slots, first, end, Q_PER_KV: tl.constexpr, ROWS: tl.constexpr):
    """A tile's rows, the heads of consecutive slots: which exist, and their slots."""
    row = tl.arange(0, ROWS)
    exists = (row < (ROWS // Q_PER_KV) * Q_PER_KV) & (first + row // Q_PER_KV < end)
    return exists, tl.load(slots + first + row // Q_PER_KV, mask=exists, other=0).to(tl.int32)


@Kernel
@triton.jit(
    do_not_specialize=[
        "num_queries", "query_shift", "num_keys", "chunk", "num_chunks", "chunk_rows", "num_blocks", "keys_per_chunk"
    ]
)  # fmt: skip
def block_major_forward_kernel(
    q, k, v, o_slots, lse_slots, slots, starts, first_pieces, piece_keys, ids, positions, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    num_queries, query_shift, num_keys, chunk, num_chunks, chunk_rows, num_blocks, keys_per_chunk, score_scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, NUM_SELECTED: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, PIECE: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Partial o and lse (base 2) of the slots of one piece.

    The numbers of the slots three tiles ahead are on their way while a tile is worked on: the pipeline fetches queries
    two tiles ahead and must not wait for their numbers.
    """
    begin, end, batch, group, block = find_piece(
        tl.program_id(0), chunk, num_chunks, starts, first_pieces, piece_keys, keys_per_chunk, num_blocks, GROUPS, PIECE
    )
    if begin < end:
        first_slot_of_chunk = chunk * chunk_rows * (GROUPS * NUM_SELECTED)
        first_token, first_position = block_place(
            block, slots, begin, num_queries, query_shift, ids, cu_seqlens, GROUPS * NUM_SELECTED, BLOCK, PACKED
        )
        in_block = tl.arange(0, KEYS)
        key_exists = (in_block < BLOCK) & (first_token + in_block < num_keys)
        q += batch.to(tl.int64) * q_batch_stride + group * Q_PER_KV * q_head_stride
        k += batch.to(tl.int64) * k_batch_stride + first_token.to(tl.int64) * k_time_stride + group * k_head_stride
        v += batch.to(tl.int64) * v_batch_stride + first_token.to(tl.int64) * v_time_stride + group * v_head_stride
        keys, values = load_block(k, v, k_time_stride, v_time_stride, in_block, key_exists, D, D_1, D_2, V, V_1, V_2)

        head = tl.arange(0, ROWS) % Q_PER_KV
        first_row = batch * num_queries
        STEP: tl.constexpr = ROWS // Q_PER_KV
        # The compiler pipelines no loop that hands values on unchanged; it cannot know that this is zero.
        zero = begin >> 31
        exists, slot_0 = load_slots(slots, begin, end, Q_PER_KV, ROWS)
        exists, slot_1 = load_slots(slots, begin + STEP, end, Q_PER_KV, ROWS)
        exists, slot_2 = load_slots(slots, begin + 2 * STEP, end, Q_PER_KV, ROWS)
        for first in tl.range(begin, end, STEP):
            exists, slot = load_slots(slots, first, end, Q_PER_KV, ROWS)
            query = slot_0 // (GROUPS * NUM_SELECTED) - first_row
            q_offsets = query.to(tl.int64) * q_time_stride + head * q_head_stride
            scores, _queries = load_and_multiply_left(keys, q, q_offsets, exists, D, D_1, D_2)
            slot_0 = slot_1 + zero
            slot_1 = slot_2 + zero
            _later, slot_2 = load_slots(slots, first + 3 * STEP, end, Q_PER_KV, ROWS)
            position = slot // (GROUPS * NUM_SELECTED) - first_row + query_shift
            if PACKED:
                position = tl.load(positions + position, mask=exists, other=0)
            visible = key_exists[None, :] & (first_position + in_block[None, :] <= position[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            # Every slot sees its block's first key; rows without a slot may not see any.
            top = tl.maximum(tl.max(scores, 1) * score_scale, LOWEST)
            p = tl.exp2(scores * score_scale - top[:, None])
            total = tl.maximum(tl.sum(p, 1), 1.0e-30)
            inverse = 1.0 / total
            p = p.to(values[0].dtype)
            place = (slot - first_slot_of_chunk).to(tl.int64) * Q_PER_KV + head
            o_1 = tl.dot(p, values[0], input_precision="ieee")
            store_tile(o_slots, place * V, exists, o_1 * inverse[:, None], 0, V_1, V)
            if V_2 > 0:
                o_2 = tl.dot(p, values[1], input_precision="ieee")
                store_tile(o_slots, place * V, exists, o_2 * inverse[:, None], V_1, V_2, V)
            tl.store(lse_slots + place, top + tl.log2(total), mask=exists)


@Kernel
@triton.jit(do_not_specialize=["first_row", "end_row", "unused"])
def reduce_slots_kernel(
    parts, lse_slots, keys, out, lse, first_row, end_row, unused, factor,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, NUM_SELECTED: tl.constexpr,
    V: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Add the slots of rows in order: weighted by their share of the softmax, or as they are, times `factor`."""
    first_head = first_row.to(tl.int64) * (GROUPS * Q_PER_KV)
    local = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    number = first_head + local
    exists = number < end_row.to(tl.int64) * (GROUPS * Q_PER_KV)
    row_group = tl.where(exists, number // Q_PER_KV, 0)
    head = local % Q_PER_KV
    # Partials are stored from the chunk's first row on.
    first_slot = tl.where(exists, local // Q_PER_KV, 0) * NUM_SELECTED
    columns = tl.arange(0, V_PAD)
    inside = (columns < V)[None, :]
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    inverse = total
    if WEIGHTED:
        for place in tl.range(0, NUM_SELECTED, loop_unroll_factor=4):
            used = exists & (tl.load(keys + row_group * NUM_SELECTED + place) != unused)
            part_lse = tl.load(lse_slots + (first_slot + place) * Q_PER_KV + head, mask=used, other=float("-inf"))
            new_top = tl.maximum(top, part_lse)
            total = total * tl.exp2(top - new_top) + tl.exp2(part_lse - new_top)
            top = new_top
        inverse = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    result = tl.zeros([ROWS, V_PAD], tl.float32)
    for place in tl.range(0, NUM_SELECTED, loop_unroll_factor=4):
        used = exists & (tl.load(keys + row_group * NUM_SELECTED + place) != unused)
        source = (first_slot + place) * Q_PER_KV + head
        part = tl.load(parts + source[:, None] * V + columns[None, :], mask=used[:, None] & inside, other=0.0)
        if WEIGHTED:
            part_lse = tl.load(lse_slots + source, mask=used, other=float("-inf"))
            result += part.to(tl.float32) * (tl.exp2(part_lse - top) * inverse)[:, None]
        else:
            result += part.to(tl.float32)
    result = result * factor
    tl.store(
        out + number[:, None] * V + columns[None, :], result.to(out.dtype.element_ty), mask=exists[:, None] & inside
    )
    if WEIGHTED:
        natural = tl.where(total > 0, (top + tl.log2(tl.where(total > 0, total, 1.0))) * LN_2, float("-inf"))
        tl.store(lse + number, natural, mask=exists)


@triton.jit
def _attend_blocks(
    softmax, queries, k, v, k_time_stride, v_time_stride,
    bits, tile_bits, position, document_start, document_end, first_block, end_block, score_scale,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take a run of blocks, all in the word `bits`, into the running softmax of the rows that chose them.

    A block that no row of the tile chose (`tile_bits`) is not read: keys that no query sees must not reach a product.
    """
    in_block = tl.arange(0, KEYS)
    for block in tl.range(first_block, end_block):
        first_position = block * BLOCK
        first_token = document_start + first_position
        keep = (in_block >= 0) & (((tile_bits >> (block & 31)) & 1) != 0)
        if MASKED:
            keep = keep & (in_block < BLOCK) & (first_token + in_block < document_end)
        k_base = k + first_token.to(tl.int64) * k_time_stride
        v_base = v + first_token.to(tl.int64) * v_time_stride
        scores, _keys = load_and_multiply(queries, k_base, in_block * k_time_stride, keep, D, D_1, D_2, True)
        if MASKED:
            visible = keep[None, :] & (first_position + in_block[None, :] <= position[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        chosen = ((bits >> (block & 31)) & 1) != 0
        softmax = attend_block(
            softmax, scores, chosen, v_base, in_block * v_time_stride, keep, score_scale, V, V_1, V_2, True
        )
    return softmax


@triton.jit
def place_tile(
    num_queries, query_shift, ids, positions, Q_PER_KV: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr
):
    """This program's batch entry and group in one number; its rows' queries, heads, whether they exist, positions and
    documents; the first and the last document.

    Tiles with the longest past start first, those of all batch entries and groups before the next shorter ones of any.
    """
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    batch_group = tl.program_id(0)
    row = first_row + tl.arange(0, ROWS)
    exists = row < num_queries * Q_PER_KV
    row = tl.where(exists, row, 0)
    query = row // Q_PER_KV
    head = row % Q_PER_KV
    position = query + query_shift
    document_of_row = position
    first_document = 0
    last_document = 0
    if PACKED:
        document_of_row = tl.load(ids + position)
        position = tl.load(positions + position)
        last_query = tl.minimum((first_row + ROWS - 1) // Q_PER_KV, num_queries - 1)
        first_document = tl.load(ids + first_row // Q_PER_KV + query_shift)
        last_document = tl.load(ids + last_query + query_shift)
    return batch_group, query, head, exists, position, document_of_row, first_document, last_document


@triton.jit
def blocks_of_document(
    document, exists, document_of_row, position, num_keys, cu_seqlens,
    PACKED: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A document's rows, its first token and end, the first block that needs a mask by key, the end of its blocks."""
    in_document = exists
    document_start = 0 * document
    document_end = document_start + num_keys
    if PACKED:
        in_document = exists & (document_of_row == document)
        document_start = tl.load(cu_seqlens + document)
        document_end = tl.load(cu_seqlens + document + 1)
    last_position = tl.max(tl.where(in_document, position, 0))
    # Blocks that end at or before the first row's position need no mask by key.
    lowest_position = tl.min(tl.where(in_document, position, last_position))
    end_block = last_position // BLOCK + 1
    first_masked = (lowest_position + 1) // BLOCK
    if BLOCK < KEYS:
        first_masked = 0 * end_block
    return in_document, document_start, document_end, first_masked, end_block


@triton.jit
def blocks_of_word(bits, batch_group, word, num_words, num_queries, query, in_document, first_masked, end_block):
    """Which of a word's blocks each row chose, and any row of the tile; the first block, the first with a mask by key,
    and the end."""
    word_place = (batch_group.to(tl.int64) * num_words + word) * num_queries
    chosen_bits = tl.load(bits + word_place + query, mask=in_document, other=0)
    tile_bits = tl.reduce(chosen_bits, 0, bitwise_or)
    first = word * 32
    middle = tl.minimum(tl.maximum(first_masked, first), first + 32)
    return chosen_bits, tile_bits, (first, middle, tl.minimum(end_block, first + 32))


@Kernel
@triton.jit(do_not_specialize=["num_queries", "query_shift", "num_keys", "num_words"])
def masked_forward_kernel(
    q, k, v, o, lse, bits, ids, positions, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    num_queries, query_shift, num_keys, num_words, score_scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """o and lse of one tile of rows."""
    batch_group, query, head, exists, position, document_of_row, first_document, last_document = place_tile(
        num_queries, query_shift, ids, positions, Q_PER_KV, PACKED, ROWS
    )
    batch = (batch_group // GROUPS).to(tl.int64)
    group = batch_group % GROUPS
    q += batch * q_batch_stride + group * Q_PER_KV * q_head_stride
    k += batch * k_batch_stride + group * k_head_stride
    v += batch * v_batch_stride + group * v_head_stride
    q_offsets = query.to(tl.int64) * q_time_stride + head * q_head_stride
    queries = load_parts(q, q_offsets, exists, D, D_1, D_2, True)
    running_max = tl.full([ROWS], LOWEST, tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    o_1, o_2 = zeros_in_parts(ROWS, V_1, V_2)
    for document in range(first_document, last_document + 1):
        in_document, document_start, document_end, first_masked, end_block = blocks_of_document(
            document, exists, document_of_row, position, num_keys, cu_seqlens, PACKED, BLOCK, KEYS
        )
        for word in range(tl.minimum((end_block + 31) // 32, num_words)):
            chosen_bits, tile_bits, bounds = blocks_of_word(
                bits, batch_group, word, num_words, num_queries, query, in_document, first_masked, end_block
            )
            for MASKED in tl.static_range(2):
                o_1, o_2, running_max, running_sum = _attend_blocks(
                    (o_1, o_2, running_max, running_sum), queries, k, v, k_time_stride, v_time_stride,
                    chosen_bits, tile_bits, position,
                    document_start, document_end, bounds[MASKED], bounds[MASKED + 1], score_scale,
                    D, D_1, D_2, V, V_1, V_2, BLOCK, KEYS, MASKED,
                )  # fmt: skip
    place = (batch * num_queries + query) * (GROUPS * Q_PER_KV) + group * Q_PER_KV + head
    # Rows that saw nothing get zeros and -inf. o and lse are contiguous.
    sees = running_sum > 0
    safe_sum = tl.where(sees, running_sum, 1.0)
    inverse = tl.where(sees, 1.0 / safe_sum, 0.0)
    store_parts(o, place * V, exists, inverse[:, None], (o_1, o_2), V, V_1, V_2)
    natural = tl.where(sees, (running_max + tl.log2(safe_sum)) * LN_2, float("-inf"))
    tl.store(lse + place, natural, mask=exists)


def selected_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected_blocks: Tensor,
    geometry: Geometry,
    scale: float,
    documents: Documents | None,
) -> tuple[Tensor, Tensor]:
    """Attention over the tokens of the chosen blocks: q [B, T, H, D], k [B, S, G, D], v [B, S, G, V] -> o [B, T, H, V],
    in the type of q, and lse [B, T, H], natural log, fp32; zeros and -inf where a query sees nothing.

    selected_blocks are [B, T, G, N]: negative ones are pads, any order, repetitions count once.
    """
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    batch, num_queries, num_heads, _ = q.shape
    num_keys, groups, value_dim = v.shape[1:]
    selected_blocks, block_size = split_blocks(selected_blocks, geometry.selection_block_size, tiles.LARGEST_BLOCK)
    num_selected = selected_blocks.shape[-1]
    if num_selected == 0:
        o = q.new_zeros(batch, num_queries, num_heads, value_dim)
        return o, q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    q_per_kv = num_heads // groups
    longest = longest_document(num_keys, documents)
    order = dispatch.selected_order(num_queries, longest, num_selected, block_size, q_per_kv)
    if order == "tiles":
        return tile_forward(q, k, v, selected_blocks, block_size, max(scale * LOG2_E, 1e-30), documents)
    o = torch.empty(batch, num_queries, num_heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_queries, num_heads, dtype=torch.float32, device=q.device)
    shape = {**kernel_constants(q, k, v, block_size), "PACKED": documents is not None}
    sizes = kernel_sizes(q, k, v)
    # Zero would turn masked scores into NaN; this is as good, since exp2(1e-30 x) is 1.
    score_scale = max(scale * LOG2_E, 1e-30)
    kernel = f"{order} forward"
    on_hopper = order == "block_major" and dispatch.selected_on_hopper(q, k, v, block_size=block_size)
    tile = tiles.selected_tile(kernel, q, v, q_per_kv, on_hopper=on_hopper)
    ids, positions, cu_seqlens = default_documents(documents, lse)
    if order == "masked":
        bits = choice_bits(selected_blocks, block_size, num_keys, documents)
        masked_forward_kernel[(batch * groups, cdiv(num_queries * q_per_kv, tile.BLOCK_M))](
            q, k, v, o, lse, bits, ids, positions, cu_seqlens, *sizes, bits.shape[2], score_scale,
            **shape, ROWS=tile.BLOCK_M, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        )  # fmt: skip
        return o, lse

    row_slots = groups * num_selected
    rows = batch * num_queries
    kept_rows = rows_of_chunk(row_slots * q_per_kv * value_dim * q.element_size(), rows)
    together = chunks_in_cache(
        kept_rows, q_per_kv * q.shape[-1] * q.element_size(), cdiv(num_keys, block_size), num_selected
    )
    index = build_block_csr(
        selected_blocks, block_size, num_keys, documents,
        chunk_rows=kept_rows if together == 1 else kept_rows // together // 64 * 64, piece_slots=tile.piece_slots,
    )  # fmt: skip
    kept_rows = together * index.chunk_rows
    o_slots = torch.empty(kept_rows * row_slots * q_per_kv, value_dim, dtype=q.dtype, device=q.device)
    lse_slots = torch.empty(kept_rows * row_slots * q_per_kv, dtype=torch.float32, device=q.device)
    block_major_kernel, constants = block_major_forward_kernel, {**shape, "ROWS": tile.BLOCK_M}
    if on_hopper:
        block_major_kernel = dispatch.hopper("selected.forward").block_major_forward_hopper_kernel
        constants = hopper_sizes(shape)
    for chunk in range(0, index.num_chunks, together):
        num_chunks = min(together, index.num_chunks - chunk)
        block_major_kernel[(num_chunks * index.pieces_per_chunk,)](
            q, k, v, o_slots, lse_slots, index.slots, index.starts, index.first_pieces, index.piece_keys,
            ids, positions, cu_seqlens, *sizes, chunk, num_chunks, index.chunk_rows, index.num_blocks,
            index.keys_per_chunk, score_scale, **constants, NUM_SELECTED=num_selected, PIECE=tile.piece_slots,
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        )  # fmt: skip
        first_row = chunk * index.chunk_rows
        end_row = min(first_row + kept_rows, rows)
        reduce_slots(
            o_slots, lse_slots, index.keys, o, lse, first_row, end_row, index.unused, 1.0, q_per_kv, num_selected
        )
    return o, lse


def rows_of_chunk(bytes_of_row: int, rows: int) -> int:
    """How many rows' partial results are kept at a time: a multiple of 64, or all of them.

    A quarter of the rows, so that they add little to a call's memory; more where that would not keep a GPU busy, and
    fewer where the buffer is full.
    """
    most, fewest = (
        size // bytes_of_row for size in (dispatch.SELECTED_BUFFER_BYTES, dispatch.SELECTED_BUFFER_BYTES // 8)
    )
    quarter = cdiv(rows, 4 * 64) * 64
    return min(rows, max(64, min(most, max(quarter, fewest)) // 64 * 64))


def chunks_in_cache(rows: int, bytes_of_query: int, num_blocks: int, num_selected: int) -> int:
    """How many chunks, sorted each by itself, one launch takes one after the other, of rows whose partials are kept.

    One group's queries of a chunk, which its blocks gather one after the other, are to stay in the second-level cache;
    but a block is to find enough of them in a chunk that loading its keys and values is little beside them.
    """
    most = max(
        dispatch.SELECTED_CACHED_BYTES // bytes_of_query, dispatch.FEWEST_SLOTS_OF_A_BLOCK * num_blocks // num_selected
    )
    return max(1, min(cdiv(rows, most), rows // 64))


def hopper_sizes(shape: dict[str, int]) -> dict[str, int]:
    """The compile-time sizes that the Hopper kernels take, of those of the portable ones."""
    parts = ("D_1", "D_2", "V_1", "V_2", "KEYS")
    return {name: size for name, size in shape.items() if name not in parts}


def reduce_slots(
    parts: Tensor,
    lse_slots: Tensor | None,
    keys: Tensor,
    out: Tensor,
    lse: Tensor | None,
    first_row: int,
    end_row: int,
    unused: int,
    factor: float,
    q_per_kv: int,
    num_selected: int,
) -> None:
    """Add the slots of a chunk's rows into `out` [B, T, H, *]: weighted by `lse_slots`, or plainly without them."""
    width = out.shape[-1]
    columns = next_power_of_2(width)
    rows = max(4, 2048 // columns)
    groups = out.shape[2] // q_per_kv
    placeholder = parts
    reduce_slots_kernel[(cdiv((end_row - first_row) * out.shape[2], rows),)](
        parts, placeholder if lse_slots is None else lse_slots, keys, out, placeholder if lse is None else lse,
        first_row, end_row, unused, factor,
        GROUPS=groups, Q_PER_KV=q_per_kv, NUM_SELECTED=num_selected, V=width, V_PAD=columns, ROWS=rows,
        WEIGHTED=lse_slots is not None, num_warps=4,
    )  # fmt: skip
