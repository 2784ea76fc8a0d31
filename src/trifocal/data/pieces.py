"""Documents cut into pieces, so that some of little text can be held out for validation.

One byte in `piece_bytes / validation_fraction` is marked, counted through all documents; a piece is held out if it
contains a marked byte. So the held-out pieces are evenly spread, also if pieces are equal, and depend on the documents'
sizes alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from trifocal.data.sources import Cursor, Document, Source, fingerprint
from trifocal.data.stream import in_validation
from trifocal.errors import UserError

FEWEST_HELD_OUT = 4
"""Where fewer documents are held out, text is cut into smaller ones."""
_SMALLEST_PIECE = 64


def length_of_pieces(total: int, fraction: float) -> int:
    """Bytes of a piece, so that `FEWEST_HELD_OUT` of them make up a share of the whole text."""
    return max(_SMALLEST_PIECE, int(total * fraction) // FEWEST_HELD_OUT)


def end_of_piece(data: bytes, limit: int) -> int:
    """Where the first piece of longer UTF-8 text ends: at its last line end, or within a line longer than a piece."""
    return data.rfind(b"\n", 0, limit) + 1 or _character_start(data, limit)


def has_mark(first: int, end: int, every: int) -> bool:
    """Whether one of the bytes `[first, end)` is marked; the first mark is in the middle of the first stretch."""
    return (end + every - 1 - every // 2) // every > (first + every - 1 - every // 2) // every


def _character_start(data: bytes, end: int) -> int:
    """The end, or the start of the character that a cut at the end would split."""
    for start in range(end, end - 4, -1):
        if data[start] & 0xC0 != 0x80:
            return start
    return end  # No UTF-8.


def cut_if_none_is_held_out(source: Source, fraction: float) -> Source:
    """The source, cut into pieces if it has few documents and a hash of their texts holds out none of them.

    Reads documents until one is held out or there are enough: some twenty of many, all of a few.

    Args:
        source: Local files.
        fraction: Share of the documents that is held out; 0 holds out none.
    """
    if not fraction:
        return source
    starts: dict[tuple[int, Cursor | None], int] = {}
    total = 0
    try:
        for shard in range(len(source.shards)):
            before: Cursor | None = None
            for document, after in source.read(shard, None):
                if in_validation(document.text, fraction) or len(starts) * fraction >= FEWEST_HELD_OUT:
                    return source
                starts[shard, before] = total
                total += len(document.text.encode())
                before = after
    except UserError:
        # Raised again where the document is read.
        return source
    return CutSource(source, starts, total, fraction) if total else source


class CutSource:
    """A source whose documents are cut into pieces.

    A cursor is the number of pieces that are read of a document, and then the other source's cursor before it.

    Args:
        source: The whole documents.
        starts: Bytes of text before each document, by its shard and the cursor before it.
        total: Bytes of all documents.
        fraction: Share of the text that is held out.
    """

    def __init__(
        self, source: Source, starts: dict[tuple[int, Cursor | None], int], total: int, fraction: float
    ) -> None:
        self._source, self._starts = source, starts
        self._limit = length_of_pieces(total, fraction)
        self._marked_every = int(self._limit / fraction)
        self.name, self.shards, self.bad = source.name, source.shards, source.bad
        self.fingerprint = fingerprint(source.fingerprint, self._limit, self._marked_every)

    def read(self, shard: int, cursor: Cursor | None) -> Iterator[tuple[Document, Cursor]]:
        """The pieces of a shard's documents."""
        done, *rest = cursor or (0,)
        before: Cursor | None = tuple(rest) or None
        for document, after in self._source.read(shard, before):
            data, first = document.text.encode(), self._starts[shard, before]
            offset = 0
            for number in range(len(data)):
                end = offset + self._end(data[offset : offset + self._limit + 1])
                last = end == len(data)
                if number >= done:
                    name = document.id if last and not offset else f"{document.id}@{offset}"
                    held_out = has_mark(first + offset, first + end, self._marked_every)
                    piece = Document(name, data[offset:end].decode(), held_out)
                    yield piece, ((0, *after) if last else (number + 1, *(before or ())))
                if last:
                    break
                offset = end
            before, done = after, 0

    def content_hashes(self) -> list[str]:
        """Those of the source."""
        return self._source.content_hashes()

    def _end(self, data: bytes) -> int:
        return len(data) if len(data) <= self._limit else end_of_piece(data, self._limit)
