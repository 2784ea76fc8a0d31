"""The queries that chose a block: the selected branch's index, and the choice as bits.

A slot is one place of the choice, number `(row * G + group) * N + place` with `row = batch * T + query`. The index is a
stable sort of the slots by block, so a block's slots come in the order of their queries: every sum over them has one
order. Blocks are then cut into pieces of a bounded number of slots, so that one that everybody chose is no longer work
than the others. Nothing here looks at the data on the host: sizes are upper bounds from shapes.

A choice is a set. Repetitions, blocks past the query's own and pads (negative) are unused slots.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.layout import Documents, longest_document
from trifocal.ops.tiles import cdiv
from trifocal.ops.triton.documents import default_documents
from trifocal.ops.triton.launch import Kernel


class BlockCSR(NamedTuple):
    """The slots sorted by chunk of rows, batch, group and block.

    A key numbers one block within one chunk: `(chunk * B * G + batch * G + group) * num_blocks + block`. With packed
    documents `block` counts through the pack: a document's first block is `first_token // block_size + document`.

    Attributes:
        keys: Key of each slot, [B * T * G * N], int16 if all fit, else int32; `unused` for slots without a block.
        slots: Slots in the order of their keys, [B * T * G * N], int64.
        starts: Where each key's slots begin, [keys + 1], int32.
        first_pieces: The first piece of each key, [keys + 1], int32.
        piece_keys: Key of each piece, [bound], int32; past the last piece, the number of keys.
        num_chunks: Chunks of rows.
        chunk_rows: Rows in a chunk; the last has fewer.
        num_blocks: Blocks of one batch entry and group, an upper bound.
        keys_per_chunk: B * G * num_blocks.
        pieces_per_chunk: Upper bound on the pieces of a chunk.
        piece_slots: Most slots of a piece.
    """

    keys: Tensor
    slots: Tensor
    starts: Tensor
    first_pieces: Tensor
    piece_keys: Tensor
    num_chunks: int
    chunk_rows: int
    num_blocks: int
    keys_per_chunk: int
    pieces_per_chunk: int
    piece_slots: int

    @property
    def unused(self) -> int:
        """The key of an unused slot: one more than the last."""
        return self.num_chunks * self.keys_per_chunk


def split_blocks(selected_blocks: Tensor, block_size: int, largest: int) -> tuple[Tensor, int]:
    """Cut blocks of `block_size`, a multiple of 16, into equal ones of at most `largest` tokens: the choice in these,
    [B, T, G, N * parts], contiguous, int32, and their size.
    """
    parts = cdiv(block_size, largest)
    while block_size % parts:
        parts += 1
    if selected_blocks.dtype != torch.int32 or parts > 1:
        # Blocks past the last position stay past it, in 32 bits and as the number of a part.
        selected_blocks = selected_blocks.clamp(-1, 2**31 // parts - 1).to(torch.int32)
    if parts == 1:
        return selected_blocks.contiguous(), block_size
    part = torch.arange(parts, device=selected_blocks.device, dtype=torch.int32)
    finer = selected_blocks[..., None] * parts + part
    finer = finer.where(selected_blocks[..., None] >= 0, -1)
    return finer.flatten(3), block_size // parts


def count_blocks(num_keys: int, block_size: int, documents: Documents | None) -> int:
    """Blocks of one batch entry; of packed documents an upper bound, which needs no look at the data."""
    if documents is None:
        return cdiv(num_keys, block_size)
    return num_keys // block_size + documents.cu_seqlens.shape[0] - 1


@triton.jit
def row_token(row, num_queries, query_shift, ids, positions, cu_seqlens, PACKED: tl.constexpr):
    """Token, position in its document, first token of the document and number of the document of rows."""
    token = row % num_queries + query_shift
    if PACKED:
        document = tl.load(ids + token)
        position = tl.load(positions + token)
        first_token = tl.load(cu_seqlens + document)
    else:
        document = token * 0
        position = token
        first_token = document
    return token, position, first_token, document


@Kernel
@triton.jit(
    do_not_specialize=[
        "num_slots_of_rows", "num_queries", "query_shift", "chunk_rows", "num_blocks", "keys_per_chunk", "unused"
    ]
)  # fmt: skip
def _slot_keys_kernel(
    selected_blocks, keys, ids, positions, cu_seqlens, num_slots_of_rows, num_queries, query_shift, chunk_rows,
    num_blocks, keys_per_chunk, unused, GROUPS: tl.constexpr, NUM_SELECTED: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The key of every slot; one number is read for each earlier place of the slot's choice, all from cache."""
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    inside = slot < num_slots_of_rows
    slot = tl.where(inside, slot, 0)
    place = (slot % NUM_SELECTED).to(tl.int32)
    row_group = (slot // NUM_SELECTED).to(tl.int32)
    row = row_group // GROUPS
    group = row_group % GROUPS
    block = tl.load(selected_blocks + slot)
    _, position, first_token, document = row_token(row, num_queries, query_shift, ids, positions, cu_seqlens, PACKED)
    used = inside & (block >= 0) & (block <= position // BLOCK)
    for earlier in range(NUM_SELECTED - 1):
        other = tl.load(selected_blocks + slot - place + earlier, mask=earlier < place, other=-1)
        used = used & (other != block)
    if PACKED:
        block += first_token // BLOCK + document
    batch = row // num_queries
    key = (row // chunk_rows) * keys_per_chunk + (batch * GROUPS + group) * num_blocks + block
    tl.store(keys + slot, tl.where(used, key, unused), mask=inside)


def build_block_csr(
    selected_blocks: Tensor,
    block_size: int,
    num_keys: int,
    documents: Documents | None,
    *,
    chunk_rows: int,
    piece_slots: int,
) -> BlockCSR:
    """Sort the choice [B, T, G, N] by block, `chunk_rows` rows at a time, into pieces of up to `piece_slots` slots."""
    batch, num_queries, groups, num_selected = selected_blocks.shape
    device = selected_blocks.device
    rows, num_slots = batch * num_queries, selected_blocks.numel()
    num_blocks = count_blocks(num_keys, block_size, documents)
    chunk_rows = min(chunk_rows, rows)
    num_chunks = cdiv(rows, chunk_rows)
    keys_per_chunk = batch * groups * num_blocks
    num_of_keys = num_chunks * keys_per_chunk
    if max(num_slots, num_of_keys) >= 2**31:
        raise ValueError(
            f"the choice is too large to index: B*T*G*N = {num_slots} slots and {num_of_keys} keys, "
            "both must be under 2**31"
        )
    # Sorting goes by bytes of the keys: half the time where two suffice.
    key_type = torch.int16 if num_of_keys < 2**15 else torch.int32
    keys = torch.empty(num_slots, dtype=key_type, device=device)
    ids, positions, cu_seqlens = default_documents(documents, keys)
    slots_of_program = 1024
    _slot_keys_kernel[(cdiv(num_slots, slots_of_program),)](
        selected_blocks, keys, ids, positions, cu_seqlens, num_slots, num_queries, num_keys - num_queries,
        chunk_rows, num_blocks, keys_per_chunk, num_of_keys,
        GROUPS=groups, NUM_SELECTED=num_selected, BLOCK=block_size, PACKED=documents is not None,
        SLOTS=slots_of_program,
    )  # fmt: skip
    sorted_keys, slots = torch.sort(keys, stable=True)
    # From a key before the first on, which has no slots: so the sums of pieces begin with zero.
    every_key = torch.arange(-1, num_of_keys + 1, dtype=key_type, device=device)
    starts = torch.searchsorted(sorted_keys, every_key, out_int32=True)
    pieces = (starts.diff() + (piece_slots - 1)) // piece_slots
    first_pieces = pieces.cumsum(0, dtype=torch.int32)
    pieces_per_chunk = (
        min(keys_per_chunk, chunk_rows * groups * num_selected) + chunk_rows * groups * num_selected // piece_slots
    )
    # A key's pieces lie behind its first: each piece belongs to the last key that begins at or before it.
    every_piece = torch.arange(min(num_chunks * pieces_per_chunk, num_slots), dtype=torch.int32, device=device)
    piece_keys = torch.searchsorted(first_pieces[1:], every_piece, right=True, out_int32=True)
    return BlockCSR(
        keys, slots, starts[1:], first_pieces, piece_keys,
        num_chunks, chunk_rows, num_blocks, keys_per_chunk, pieces_per_chunk, piece_slots,
    )  # fmt: skip


@triton.jit
def find_piece(
    number, chunk, num_chunks, starts, first_pieces, piece_keys, keys_per_chunk, num_blocks,
    GROUPS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The slots of a piece of these chunks, begin and end (equal if there is none), its batch, group and block."""
    first_key = chunk * keys_per_chunk
    piece = tl.load(first_pieces + first_key) + number
    exists = piece < tl.load(first_pieces + first_key + num_chunks * keys_per_chunk)
    key = tl.load(piece_keys + piece, mask=exists, other=first_key)
    begin = tl.load(starts + key) + (piece - tl.load(first_pieces + key)) * PIECE
    end = tl.minimum(begin + PIECE, tl.load(starts + key + 1))
    end = tl.where(exists, end, begin)
    batch_group = key % keys_per_chunk // num_blocks
    block = key % keys_per_chunk % num_blocks
    return begin, end, batch_group // GROUPS, batch_group % GROUPS, block


@triton.jit
def block_place(
    block, slots, begin, num_queries, query_shift, ids, cu_seqlens,
    SLOTS_OF_ROW: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """First token of a block and that token's position in its document; the slots from `begin` on chose the block."""
    first_token = block * BLOCK
    first_position = first_token
    if PACKED:
        token = (tl.load(slots + begin).to(tl.int32) // SLOTS_OF_ROW) % num_queries + query_shift
        document = tl.load(ids + token)
        document_start = tl.load(cu_seqlens + document)
        first_position = (block - document_start // BLOCK - document) * BLOCK
        first_token = document_start + first_position
    return first_token, first_position


@triton.jit
def block_of_program(
    num_blocks, part_queries, num_keys, query_shift, block_documents, cu_seqlens,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """This program's block in its document, its first token, the document's end, its part, and that part's queries.

    With SPLIT each block has parts, cut at multiples of `part_queries` from its document's first query; the last part,
    which all blocks of a longest document have, starts first and holds all queries that are left.
    """
    block = tl.program_id(1)
    part = block // num_blocks
    block = block % num_blocks
    document_start = 0 * block
    document_end = document_start + num_keys
    if PACKED:
        # Blocks count through the pack; a document's numbers may leave one out before the next document's.
        document = tl.load(block_documents + block)
        document_start = tl.load(cu_seqlens + document)
        document_end = tl.load(cu_seqlens + document + 1)
        block = block - document_start // BLOCK - document
    first_token = document_start + block * BLOCK
    begin_query = tl.maximum(first_token - query_shift, 0)
    end_query = document_end - query_shift
    if SPLIT:
        last_part = tl.num_programs(1) // num_blocks - 1
        part = last_part - part
        begin_part = tl.maximum(document_start - query_shift, 0) + part * part_queries
        begin_query = tl.maximum(begin_query, begin_part)
        end_query = tl.where(part == last_part, end_query, tl.minimum(end_query, begin_part + part_queries))
    return block, first_token, document_end, part, begin_query, end_query


@Kernel
@triton.jit(do_not_specialize=["num_queries", "query_shift", "num_words"])
def _choice_bits_kernel(
    selected_blocks, bits, positions, num_queries, query_shift, num_words, GROUPS: tl.constexpr,
    NUM_SELECTED: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    inside = query < num_queries
    word = tl.program_id(1)
    batch_group = tl.program_id(2)
    batch = (batch_group // GROUPS).to(tl.int64)
    position = query + query_shift
    if PACKED:
        position = tl.load(positions + position, mask=inside, other=0)
    own_block = position // BLOCK
    choice = selected_blocks + ((batch * num_queries + query) * GROUPS + batch_group % GROUPS) * NUM_SELECTED
    chosen = tl.zeros([QUERIES], tl.int32)
    for place in range(NUM_SELECTED):
        block = tl.load(choice + place, mask=inside, other=-1)
        here = (block >= 0) & (block <= own_block) & (block // 32 == word)
        chosen = chosen | tl.where(here, 1 << (block & 31), 0)
    place_of_word = (batch_group.to(tl.int64) * num_words + word) * num_queries
    tl.store(bits + place_of_word + query, chosen, mask=inside)


def choice_bits(selected_blocks: Tensor, block_size: int, num_keys: int, documents: Documents | None) -> Tensor:
    """The choice as bits, [B, G, words, T], int32: bit `j % 32` of word `j // 32` for block j, up to the longest
    document; blocks beyond, where its length was given too small, are not attended to.
    """
    batch, num_queries, groups, num_selected = selected_blocks.shape
    num_words = cdiv(longest_document(num_keys, documents), 32 * block_size)
    bits = torch.empty(batch, groups, num_words, num_queries, dtype=torch.int32, device=selected_blocks.device)
    queries = 128
    _, positions, _ = default_documents(documents, bits)
    _choice_bits_kernel[(cdiv(num_queries, queries), num_words, batch * groups)](
        selected_blocks, bits, positions, num_queries, num_keys - num_queries, num_words,
        GROUPS=groups, NUM_SELECTED=num_selected, BLOCK=block_size, PACKED=documents is not None, QUERIES=queries,
    )  # fmt: skip
    return bits
