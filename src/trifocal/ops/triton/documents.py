"""Where the blocks of packed documents lie, found by small kernels: PyTorch needs six or seven for each question. The
layers of a model need not ask for the compressed ones, see `Documents.with_blocks`.

Documents that are padding have no tokens and no blocks.
"""

import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents
from trifocal.ops.tiles import cdiv
from trifocal.ops.triton.launch import Kernel

_PLACES = 256


def default_documents(documents: Documents | None, placeholder: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ids, positions and cu_seqlens as a kernel's arguments; a tensor that it never reads where there are none."""
    if documents is None:
        return placeholder, placeholder, placeholder
    return documents.ids, documents.positions, documents.cu_seqlens


@Kernel
@triton.jit(do_not_specialize=["num_documents"])
def first_compressed_blocks_kernel(
    cu_seqlens, first_blocks, num_documents, BLOCK: tl.constexpr, STRIDE: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """Sums of the blocks of all documents before; by a single program."""
    before = 0
    for first in tl.range(0, num_documents, DOCUMENTS):
        document = first + tl.arange(0, DOCUMENTS)
        exists = document < num_documents
        start = tl.load(cu_seqlens + document, mask=exists, other=0)
        end = tl.load(cu_seqlens + document + 1, mask=exists, other=0)
        count = tl.where(end - start >= BLOCK, (end - start - BLOCK) // STRIDE + 1, 0)
        tl.store(first_blocks + document, before + tl.cumsum(count, 0) - count, mask=exists)
        before += tl.sum(count)


def first_compressed_blocks(documents: Documents, geometry: Geometry) -> Tensor:
    """The first compressed block of each document, [documents], int32; found unless the documents have them."""
    placed = documents.placed_blocks(geometry)
    if placed is not None:
        return placed[0]
    num_documents = documents.cu_seqlens.shape[0] - 1
    first_blocks = documents.cu_seqlens.new_empty(num_documents)
    first_compressed_blocks_kernel[(1,)](
        documents.cu_seqlens, first_blocks, num_documents,
        BLOCK=geometry.compression_block_size, STRIDE=geometry.compression_stride, DOCUMENTS=_PLACES,
    )  # fmt: skip
    return first_blocks


@triton.jit
def find_document(first_places, place, num_documents, steps, SIZE: tl.constexpr, APART: tl.constexpr):
    """The last document that begins at or before a place, by halving; document j begins at first_places[j] // SIZE.

    APART: at one place more for each document before it.
    """
    # Invariant: `low` begins at or before the place, `high` behind it. Of documents that begin at one place, only the
    # last has any.
    low = place * 0
    high = low + num_documents
    for _ in tl.range(0, steps):
        middle = (low + high) // 2
        begin = tl.load(first_places + middle) // SIZE
        if APART:
            begin += middle
        low = tl.where(begin <= place, middle, low)
        high = tl.where(begin <= place, high, middle)
    return low


@Kernel
@triton.jit(do_not_specialize=["num_documents", "num_slots", "num_keys", "steps"])
def place_slots_kernel(
    first_blocks, cu_seqlens, query_begin, query_end, num_documents, num_slots, num_keys, steps, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The queries of compressed slots, first and end."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    exists = slot < num_slots
    document = find_document(first_blocks, slot, num_documents, steps, 1, False)
    in_document = slot - tl.load(first_blocks + document)
    last_token = tl.load(cu_seqlens + document) + in_document * STRIDE + (BLOCK - 1)
    end = tl.load(cu_seqlens + document + 1)
    # A slot that no document fills is seen from the end of the last document on: by nobody.
    filled = last_token < end
    tl.store(query_begin + slot, tl.where(filled, last_token, num_keys), mask=exists)
    tl.store(query_end + slot, tl.where(filled, end, num_keys), mask=exists)


def place_slots(
    first_blocks: Tensor, documents: Documents, num_slots: int, num_keys: int, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """The range of tokens, begin and end, at which queries see each compressed slot, [slots], int32; as above."""
    placed = documents.placed_blocks(geometry)
    if placed is not None:
        query_begin, query_end = placed[1].unbind(0)
        return query_begin, query_end
    query_begin, query_end = (first_blocks.new_empty(num_slots) for _ in range(2))
    num_documents = first_blocks.shape[0]
    if num_slots:
        place_slots_kernel[(cdiv(num_slots, _PLACES),)](
            first_blocks, documents.cu_seqlens, query_begin, query_end, num_documents, num_slots, num_keys,
            max(1, num_documents.bit_length()), BLOCK=geometry.compression_block_size,
            STRIDE=geometry.compression_stride, SLOTS=_PLACES,
        )  # fmt: skip
    return query_begin, query_end


@Kernel
@triton.jit(do_not_specialize=["num_documents", "num_blocks", "steps"])
def documents_of_blocks_kernel(
    cu_seqlens, block_documents, num_documents, num_blocks, steps, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """The document of each selection block."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    document = find_document(cu_seqlens, block, num_documents, steps, BLOCK, True)
    tl.store(block_documents + block, document, mask=block < num_blocks)


def documents_of_blocks(cu_seqlens: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """The document of each selection block, [blocks], int32, where document j's first is `start // block_size + j`."""
    num_documents = cu_seqlens.shape[0] - 1
    block_documents = cu_seqlens.new_empty(num_blocks)
    documents_of_blocks_kernel[(cdiv(num_blocks, _PLACES),)](
        cu_seqlens, block_documents, num_documents, num_blocks, max(1, num_documents.bit_length()),
        BLOCK=block_size, BLOCKS=_PLACES,
    )  # fmt: skip
    return block_documents
