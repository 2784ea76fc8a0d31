"""Where the blocks of packed documents lie. The layers of a model find the compressed ones once, see
`Documents.with_blocks`.
"""

import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents, place_compressed_blocks
from trifocal.ops.tiles import cdiv
from trifocal.ops.triton.launch import Kernel

_BLOCKS = 256


def default_documents(documents: Documents | None, placeholder: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ids, positions and cu_seqlens as a kernel's arguments; a tensor that it never reads where there are none."""
    if documents is None:
        return placeholder, placeholder, placeholder
    return documents.ids, documents.positions, documents.cu_seqlens


def first_compressed_blocks(documents: Documents, geometry: Geometry) -> Tensor:
    """The first compressed block of each document, [documents], int32."""
    return place_compressed_blocks(documents, 0, geometry)[0]


@Kernel
@triton.jit(do_not_specialize=["num_documents", "num_blocks", "steps"])
def documents_of_blocks_kernel(
    cu_seqlens, block_documents, num_documents, num_blocks, steps, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """The document of each selection block, found by halving."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    # Invariant: `low` begins at or before the block, `high` behind it.
    low = block * 0
    high = low + num_documents
    for _ in tl.range(0, steps):
        middle = (low + high) // 2
        begin = tl.load(cu_seqlens + middle) // BLOCK + middle
        low = tl.where(begin <= block, middle, low)
        high = tl.where(begin <= block, high, middle)
    tl.store(block_documents + block, low, mask=block < num_blocks)


def documents_of_blocks(cu_seqlens: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """The document of each selection block, [blocks], int32, where document j's first is `start // block_size + j`."""
    num_documents = cu_seqlens.shape[0] - 1
    block_documents = cu_seqlens.new_empty(num_blocks)
    documents_of_blocks_kernel[(cdiv(num_blocks, _BLOCKS),)](
        cu_seqlens, block_documents, num_documents, num_blocks, max(1, num_documents.bit_length()),
        BLOCK=block_size, BLOCKS=_BLOCKS,
    )  # fmt: skip
    return block_documents
