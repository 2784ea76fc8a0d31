"""Where tokens and blocks lie: in one sequence, or in documents packed one after the other."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trifocal.ops.devices import to_device
from trifocal.ops.geometry import Geometry

# Room for documents is counted in powers of two, and begins with that for documents of this many tokens.
_TOKENS_OF_DOCUMENT = 256
_FEWEST_DOCUMENTS = 16


def place_type(block_size: int) -> torch.dtype:
    """The narrowest type, of those that kernels store, that holds the place of a token in its block."""
    return torch.uint8 if block_size <= 256 else torch.int32


class Documents(NamedTuple):
    """Packed documents, checked once and then passed to every layer.

    Attributes:
        cu_seqlens: First token of each document and, last, the number of tokens, [documents + 1], int32.
        ids: The document of each token, [S], int32.
        positions: The position of each token in its document, [S], int32.
        max_length: No document has more tokens; a number on the host. None: not known.
        compression: Size and stride of the compressed blocks that are placed, from `with_blocks`; None: they are not,
            and each operation finds them.
        first_blocks: The first compressed block of each document, [documents], int32.
        slots: At which tokens queries see each compressed slot, begin and end, [2, S // stride], int32; both are S for
            a slot that no document fills.
        aligned: Whether no document crosses a multiple of `max_length`.
    """

    cu_seqlens: Tensor
    ids: Tensor
    positions: Tensor
    max_length: int | None = None
    compression: Sequence[int] | None = None
    first_blocks: Tensor | None = None
    slots: Tensor | None = None
    aligned: bool = False

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, num_tokens: int) -> "Documents":
        """Check the boundaries [documents + 1], which reads them on the host, and place every token."""
        max_length, aligned = _row_length(cu_seqlens, num_tokens)
        return cls.from_checked(cu_seqlens, num_tokens)._replace(max_length=max_length, aligned=aligned)

    @classmethod
    def of(cls, given: "Tensor | Documents", num_tokens: int, device: torch.device | None = None) -> "Documents":
        """Documents between given boundaries, which go to the device, if one is given, once they were checked: those on
        the host need no wait for a GPU. `Documents` pass unchanged: they were checked when they were made.
        """
        if not isinstance(given, Documents):
            made = cls.from_cu_seqlens(given, num_tokens)
            return made if device is None else made.to(device)
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
        return cls(cu_seqlens, ids, tokens - cu_seqlens[ids], row_length, aligned=row_length is not None)

    def with_blocks(self, geometry: Geometry, places: tuple[Tensor, Tensor] | None = None) -> "Documents":
        """The same with the places of their compressed blocks, found once for all layers, unless they are given or
        these documents have them.
        """
        if places is None:
            if self.placed_blocks(geometry) is not None:
                return self
            num_slots = num_compressed_slots(self.ids.shape[0], geometry, self)
            places = place_compressed_blocks(self, num_slots, geometry)
        placed = _compression(geometry), *places
        return Documents(self.cu_seqlens, self.ids, self.positions, self.max_length, *placed, self.aligned)

    def placed_blocks(self, geometry: Geometry) -> tuple[Tensor, Tensor] | None:
        """`first_blocks` and `slots`, if they are those of this geometry."""
        if self.first_blocks is None or self.slots is None or tuple(self.compression or ()) != _compression(geometry):
            return None
        return self.first_blocks, self.slots

    def with_room(self) -> "Documents":
        """The same with empty documents at the end, so that compiled code fits other packs of as many tokens."""
        num_tokens, length, aligned = self.ids.shape[0], self.max_length, self.aligned
        if length is not None and num_tokens < 2 * length:
            # Of two documents the first may have any length: one row of both costs no more than twice as much.
            length, aligned = num_tokens, True
        return Documents(pad_boundaries(self.cu_seqlens, num_tokens), self.ids, self.positions, length, aligned=aligned)

    def part(self, begin: int, end: int) -> "Documents":
        """Only tokens `begin` to `end`: documents that hold the first or the last of them are cut there, and others are
        empty.
        """
        cu_seqlens, ids = self.cu_seqlens.clamp(begin, end) - begin, self.ids[begin:end]
        positions = self.positions[begin:end]
        if begin:
            positions = torch.arange(end - begin, device=ids.device, dtype=torch.int32) - cu_seqlens[ids]
        return Documents(cu_seqlens, ids, positions, self.max_length, aligned=self.aligned and not begin)

    def to(self, device: torch.device | str) -> "Documents":
        """The same on another device, to which a GPU's copy starts without a wait; blocks are placed anew there."""
        device = torch.device(device)
        cu_seqlens, ids, positions = (to_device(x, device) for x in (self.cu_seqlens, self.ids, self.positions))
        return Documents(cu_seqlens, ids, positions, self.max_length, aligned=self.aligned)


class Rows(NamedTuple):
    """Packed documents cut into rows of `length`, that of the longest, so that cost grows with documents, not with the
    pack of `num_tokens`. Queries see `reach` tokens: the row, and, unless no document crosses rows, the one before.
    """

    length: int
    reach: int
    num_tokens: int

    @classmethod
    def of(cls, documents: Documents) -> "Rows":
        """The rows of documents; one for all if their lengths are not known on the host."""
        num_tokens = documents.ids.shape[0]
        length = longest_document(num_tokens, documents)
        return cls(length, length if documents.aligned or length == num_tokens else 2 * length, num_tokens)

    @property
    def num_rows(self) -> int:
        """Number of rows; the last one may be padded."""
        return -(-self.num_tokens // self.length)

    def cut(self, x: Tensor, padding: int = 0) -> Tensor:
        """[1, T, *] -> [rows, length, *]."""
        missing = self.num_rows * self.length - self.num_tokens
        if missing:
            x = torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, missing), value=padding)
        return x.view(self.num_rows, self.length, *x.shape[2:])

    def join(self, x: Tensor) -> Tensor:
        """[rows, length, *] -> [1, T, *]."""
        return x.flatten(0, 1)[None, : self.num_tokens]

    def keys(self, tokens: Tensor, spacing: int = 1) -> Tensor:
        """Keys that each row may see, [rows, keys], int64, S and above where there are no more; `tokens` from which on
        keys are seen, [S], ascend, `spacing` apart at least, nobody's last.
        """
        first = torch.arange(1, self.num_rows + 1, device=tokens.device, dtype=tokens.dtype) * self.length - self.reach
        inside = torch.arange(-(-self.reach // spacing), device=tokens.device)
        return torch.searchsorted(tokens, first)[:, None] + inside


def take(x: Tensor, keys: Tensor, padding: int | None = None) -> Tensor:
    """Keys of rows, [1, S, *] and [rows, keys] -> [rows, keys, *]; where there is none the last one, or the padding."""
    size = x.shape[1]
    taken = x[0].index_select(0, keys.clamp(max=size - 1).flatten()).view(*keys.shape, *x.shape[2:])
    return taken if padding is None else taken.where(keys < size, padding)


def longest_document(num_tokens: int, documents: Documents | None) -> int:
    """Tokens that no document exceeds."""
    if documents is None or documents.max_length is None:
        return num_tokens
    # Documents may have been cut: then none is as long as it was.
    return min(num_tokens, documents.max_length)


def check_boundaries(cu_seqlens: Tensor, num_tokens: int, name: str = "cu_seqlens") -> list[int]:
    """The boundaries on the host, read once; ValueError unless they are those of documents of `num_tokens` tokens."""
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
    return boundaries


def pad_boundaries(cu_seqlens: Tensor, num_tokens: int, documents: int = 0) -> Tensor:
    """Append empty documents to cu_seqlens, to have `documents` at least, so that compiled code fits the next batch."""
    room = max(_FEWEST_DOCUMENTS, num_tokens // _TOKENS_OF_DOCUMENT)
    while room < max(cu_seqlens.numel() - 1, documents):
        room *= 2
    return torch.nn.functional.pad(cu_seqlens, (0, room + 1 - cu_seqlens.numel()), value=num_tokens)


def _row_length(cu_seqlens: Tensor, num_tokens: int) -> tuple[int, bool]:
    """A length that no document exceeds, and whether none crosses a multiple of it: that of documents of equal length,
    else the next power of two, so that compiled code fits many packs. The boundaries are checked.
    """
    boundaries = check_boundaries(cu_seqlens, num_tokens)
    lengths = [end - start for start, end in itertools.pairwise(boundaries)]
    longest = max(lengths)
    if set(lengths[:-1]) <= {longest}:
        return longest, True
    length = min(boundaries[-1], 1 << (longest - 1).bit_length())
    return length, all(start // length == (end - 1) // length for start, end in itertools.pairwise(boundaries))


# Compiled, it would be so for each pack anew. All that `torch.compiler.disable` does, after importing the compiler.
_row_length._torchdynamo_disable = True  # type: ignore[attr-defined]


class CompressedLayout(NamedTuple):
    """Where compressed blocks lie.

    Attributes:
        ids: The document of each block, [C]; -1 for a slot that no document fills.
        starts: Position of each block's first token in its document, [C].
        first_blocks: The first block of each document, [documents].
    """

    ids: Tensor
    starts: Tensor
    first_blocks: Tensor


def compressed_layout(documents: Documents, num_blocks: int, geometry: Geometry) -> CompressedLayout:
    """Place `num_blocks` compressed slots, not under the documents' own count, each document's on its own grid."""
    counts = compressed_counts(documents, geometry)
    ends = counts.cumsum(0, dtype=torch.int32)
    first_blocks = ends - counts
    slots = torch.arange(num_blocks, device=ends.device, dtype=torch.int32)
    ids = torch.searchsorted(ends, slots, right=True, out_int32=True)
    filled = ids < counts.numel()
    starts = (slots - first_blocks[ids.clamp(max=counts.numel() - 1)]) * geometry.compression_stride
    return CompressedLayout(torch.where(filled, ids, -1), torch.where(filled, starts, 0), first_blocks)


def compressed_counts(documents: Documents, geometry: Geometry) -> Tensor:
    """Compressed blocks of each document, [documents]."""
    block, stride = _compression(geometry)
    return ((documents.cu_seqlens.diff() + (stride - block)) // stride).clamp(min=0)


def place_compressed_blocks(documents: Documents, num_slots: int, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """`Documents.first_blocks` and the first `num_slots` of `Documents.slots`, made unless the documents have them."""
    placed = documents.placed_blocks(geometry)
    if placed is not None:
        first_blocks, slots = placed
        return first_blocks, slots[:, :num_slots]
    layout = compressed_layout(documents, num_slots, geometry)
    filled, of_slots = layout.ids >= 0, layout.ids.clamp(min=0)
    last_tokens = documents.cu_seqlens[of_slots] + layout.starts + (geometry.compression_block_size - 1)
    ranges = torch.stack((last_tokens, documents.cu_seqlens[of_slots + 1]))
    return layout.first_blocks, ranges.where(filled, documents.ids.shape[0])


def _compression(geometry: Geometry) -> tuple[int, int]:
    return geometry.compression_block_size, geometry.compression_stride


def num_packed_compressed_blocks(documents: Documents, geometry: Geometry) -> int:
    """Compressed blocks of all documents together; reads the boundaries on the host."""
    boundaries = documents.cu_seqlens.tolist()
    return sum(geometry.num_compressed_blocks(end - start) for start, end in itertools.pairwise(boundaries))


def num_compressed_slots(num_tokens: int, geometry: Geometry, documents: Documents | None) -> int:
    """Compressed blocks of a sequence of `num_tokens` tokens; with documents, slots that suffice for any together."""
    return (
        geometry.num_compressed_blocks(num_tokens) if documents is None else num_tokens // geometry.compression_stride
    )
