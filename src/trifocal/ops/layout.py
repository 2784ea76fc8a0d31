"""Where tokens and blocks lie: in one sequence, or in documents packed one behind the other."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from trifocal.ops.geometry import Geometry

# Room for documents is counted in powers of two, and begins with that for documents of this many tokens.
_TOKENS_OF_DOCUMENT = 256
_FEWEST_DOCUMENTS = 16


def place_type(block_size: int) -> torch.dtype:
    """The narrowest type that holds the place of a token in a block of so many tokens, of those that kernels store."""
    return torch.uint8 if block_size <= 256 else torch.int32


class Documents(NamedTuple):
    """Packed documents, checked once and then passed to every layer.

    Attributes:
        cu_seqlens: First token of each document and, last, the number of tokens, [documents + 1], int32.
        ids: The document of each token, [S], int32.
        positions: The position of each token in its document, [S], int32.
        max_length: No document has more tokens; a number on the host. None: not known.
        aligned: Whether no document crosses a multiple of `max_length`.
    """

    cu_seqlens: Tensor
    ids: Tensor
    positions: Tensor
    max_length: int | None = None
    aligned: bool = False

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, num_tokens: int) -> "Documents":
        """Check the boundaries, which reads them on the host, and place every token.

        Args:
            cu_seqlens: [documents + 1], an integer type.
            num_tokens: Tokens in all documents together.

        Raises:
            ValueError: If the boundaries do not start at 0, do not end at `num_tokens` or do not increase.
        """
        check_boundaries(cu_seqlens, num_tokens)
        max_length, aligned = _row_length(cu_seqlens.tolist())
        return cls.from_checked(cu_seqlens, num_tokens)._replace(max_length=max_length, aligned=aligned)

    @classmethod
    def of(cls, given: "Tensor | Documents", num_tokens: int) -> "Documents":
        """Documents between given boundaries. `Documents` pass unchanged: they were checked when they were made.

        Raises:
            ValueError: If `from_cu_seqlens` refuses them, or if they hold another number of tokens.
        """
        if not isinstance(given, Documents):
            return cls.from_cu_seqlens(given, num_tokens)
        if given.ids.shape[0] != num_tokens:
            # The boundaries of one token would spread over all, and dense attention would see the future.
            raise ValueError(f"the documents hold {given.ids.shape[0]} tokens, but there are {num_tokens}")
        return given

    @classmethod
    def from_checked(cls, cu_seqlens: Tensor, num_tokens: int, row_length: int | None = None) -> "Documents":
        """Place every token, trusting the boundaries: no look at the data, so it can be compiled.

        `row_length`, if given: no document crosses a multiple of it.
        """
        # A kernel reads a boundary's neighbour in memory as the next boundary.
        cu_seqlens = cu_seqlens.to(torch.int32).contiguous()
        tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=torch.int32)
        ids = torch.searchsorted(cu_seqlens[1:], tokens, right=True, out_int32=True)
        return cls(cu_seqlens, ids, tokens - cu_seqlens[ids], row_length, row_length is not None)

    def first(self, num_tokens: int) -> "Documents":
        """The first tokens alone: the document that holds the last of them ends there, and those behind are empty."""
        cu_seqlens = self.cu_seqlens.clamp(max=num_tokens)
        return self._replace(cu_seqlens=cu_seqlens, ids=self.ids[:num_tokens], positions=self.positions[:num_tokens])

    def to(self, device: torch.device | str) -> "Documents":
        """The same on another device, to which a GPU's copy starts without a wait."""
        device = torch.device(device)

        def moved(part: Tensor) -> Tensor:
            if device.type == "cuda" and not part.is_cuda:
                part = part.pin_memory()
            return part.to(device, non_blocking=True)

        return self._replace(cu_seqlens=moved(self.cu_seqlens), ids=moved(self.ids), positions=moved(self.positions))


def longest_document(num_tokens: int, documents: Documents | None) -> int:
    """Tokens that no document exceeds."""
    if documents is None or documents.max_length is None:
        return num_tokens
    # Documents may have been cut: then none is as long as it was.
    return min(num_tokens, documents.max_length)


def check_boundaries(cu_seqlens: Tensor, num_tokens: int, name: str = "cu_seqlens") -> None:
    """Raise ValueError unless these are boundaries of documents of `num_tokens` tokens; reads them on the host."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        given = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ValueError(f"{name} must be a tensor of int32 or int64, got {given}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"{name} must have the shape [documents + 1], got {list(cu_seqlens.shape)}")
    boundaries = cu_seqlens.tolist()
    if boundaries[0] != 0:
        raise ValueError(f"{name} must start at 0, got {boundaries[0]}")
    if boundaries[-1] != num_tokens:
        raise ValueError(f"{name} must end at the number of tokens, {num_tokens}, got {boundaries[-1]}")
    for document, (start, end) in enumerate(itertools.pairwise(boundaries)):
        if end <= start:
            raise ValueError(f"{name} must increase, but document {document} goes from {start} to {end}")


def pad_boundaries(cu_seqlens: Tensor, num_tokens: int, documents: int = 0) -> Tensor:
    """Append empty documents, so that compiled code and recorded graphs fit the next batch too; reads no values.

    Args:
        cu_seqlens: [documents + 1].
        num_tokens: Tokens in all documents together.
        documents: Pad up to so many at least.
    """
    room = max(_FEWEST_DOCUMENTS, num_tokens // _TOKENS_OF_DOCUMENT)
    while room < max(cu_seqlens.numel() - 1, documents):
        room *= 2
    return torch.nn.functional.pad(cu_seqlens, (0, room + 1 - cu_seqlens.numel()), value=num_tokens)


def _row_length(boundaries: list[int]) -> tuple[int, bool]:
    """A length that no document exceeds, and whether none crosses a multiple of it.

    Documents of equal length: that length. Others: the next power of two, so that compiled code fits many packs.
    """
    lengths = [end - start for start, end in itertools.pairwise(boundaries)]
    longest = max(lengths)
    if set(lengths[:-1]) <= {longest}:
        return longest, True
    length = min(boundaries[-1], 1 << (longest - 1).bit_length())
    return length, all(start // length == (end - 1) // length for start, end in itertools.pairwise(boundaries))


class CompressedLayout(NamedTuple):
    """Where compressed blocks lie.

    Attributes:
        ids: The document of each block, [C]; -1 for a slot that no document fills.
        starts: Position of each block's first token in its document, [C].
        first_blocks: The first block of each document, [documents].
        counts: Blocks of each document, [documents].
    """

    ids: Tensor
    starts: Tensor
    first_blocks: Tensor
    counts: Tensor


def compressed_layout(documents: Documents, num_blocks: int, geometry: Geometry) -> CompressedLayout:
    """Place `num_blocks` compressed slots: document after document, each with its own grid.

    No look at the data: `num_blocks` may be any number not under the documents' own count.
    """
    first_blocks, counts = _first_blocks(documents, geometry)
    ends = first_blocks + counts
    slots = torch.arange(num_blocks, device=ends.device, dtype=torch.int32)
    ids = torch.searchsorted(ends, slots, right=True, out_int32=True)
    filled = ids < counts.numel()
    starts = (slots - first_blocks[ids.clamp(max=counts.numel() - 1)]) * geometry.compression_stride
    return CompressedLayout(torch.where(filled, ids, -1), torch.where(filled, starts, 0), first_blocks, counts)


def _first_blocks(documents: Documents, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """First block and number of blocks of each document."""
    block, stride = geometry.compression_block_size, geometry.compression_stride
    counts = ((documents.cu_seqlens.diff() + (stride - block)) // stride).clamp(min=0)
    return counts.cumsum(0, dtype=torch.int32) - counts, counts


def num_packed_compressed_blocks(documents: Documents, geometry: Geometry) -> int:
    """Compressed blocks of all documents together; reads the boundaries on the host."""
    boundaries = documents.cu_seqlens.tolist()
    return sum(geometry.num_compressed_blocks(end - start) for start, end in itertools.pairwise(boundaries))


def max_packed_compressed_blocks(num_tokens: int, geometry: Geometry) -> int:
    """Slots that suffice for the compressed blocks of any documents of `num_tokens` tokens together."""
    return num_tokens // geometry.compression_stride
