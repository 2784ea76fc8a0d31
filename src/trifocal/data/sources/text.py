"""Documents from plain text files and from JSON lines."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trifocal.data.sources.base import BadDocument, BadDocuments, Cursor, Document, fingerprint, make_document, no_field
from trifocal.data.sources.local_files import find_files, opened, sizes
from trifocal.errors import UserError, one_line
from trifocal.paths import MAX_FILE_BYTES, parse_json

# The least number of held-out pieces to expect; text that is too short for it is cut into smaller documents.
_HELD_OUT_PIECES = 4
_SMALLEST_PIECE = 64
_DOCUMENT_BYTES = 65536
_ABSENT = object()


class TextSource:
    """UTF-8 text files: a file is a document, a long file several. A byte order mark may begin a file.

    A file longer than `document_bytes` is cut at line ends, or within a line that is longer. If fewer than four
    documents would be held out, the text is cut into smaller ones. One byte in `document_bytes / validation_fraction`
    is marked, counted through all files; a piece with a marked byte is held out. So held-out pieces are evenly spread,
    also if pieces are equal, and depend only on the files' sizes.
    """

    def __init__(
        self,
        path: str,
        *,
        validation_fraction: float = 0.0,
        bad: BadDocuments | None = None,
        document_bytes: int = _DOCUMENT_BYTES,
    ) -> None:
        self.name = f"text:{path}"
        self.bad = bad or BadDocuments()
        self._files, self.left_out = find_files(self.name, path, (".txt", ".md"), compressed=True)
        self.shards = list(self._files)
        found = sizes(self._files)
        self._starts = [0, *itertools.accumulate(size for _, size in found)]
        self._document_bytes, self._marked_every = document_bytes, 0
        total, fraction = self._starts[-1], validation_fraction
        documents = sum(-(-size // document_bytes) for _, size in found)
        self._all_marked = 0 < documents * fraction < _HELD_OUT_PIECES
        if self._all_marked:
            smaller = max(_SMALLEST_PIECE, int(total * fraction) // _HELD_OUT_PIECES)
            self._document_bytes = min(document_bytes, smaller)
        if fraction > 0:
            self._marked_every = int(self._document_bytes / fraction)
        # Not the held-out pieces: they follow from data.validation_fraction, which is compared by itself.
        self.fingerprint = fingerprint("text", found, document_bytes)

    def read(self, shard: int, cursor: Cursor | None) -> Iterator[tuple[Document, Cursor]]:
        """The documents of a file; a cursor is a byte offset into its (uncompressed) content."""
        path = self._files[self.shards[shard]]
        (offset,) = cursor or (0,)
        limit = self._document_bytes
        with opened(path) as file:
            file.seek(offset)
            rest = b""
            while data := rest + file.read(limit + 1 - len(rest)):
                rest = b""
                last = len(data) <= limit
                if not last:
                    # At the last line end, or within a line longer than a document.
                    end = data.rfind(b"\n", 0, limit) + 1 or _character_start(data, limit)
                    data, rest = data[:end], data[end:]
                document = self._document(shard, path, data, offset, last=last)
                offset += len(data)
                if document is not None:
                    yield document, (offset,)

    def _document(self, shard: int, path: Path, data: bytes, offset: int, *, last: bool) -> Document | None:
        """The document of a piece of a file; None if it is not UTF-8 and `bad` skips it."""
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            self.bad.found(
                f"{path} is not UTF-8: byte {offset + error.start} is 0x{data[error.start]:02x} "
                f"({error.reason}); convert it, for instance with iconv"
            )
            return None
        name, whole = self.shards[shard], offset == 0 and last
        text = text if offset else text.removeprefix("\ufeff")
        held_out = None
        if self._marked_every and (self._all_marked or not whole):
            first = self._starts[shard] + offset
            held_out = self._marks_before(first + len(data)) > self._marks_before(first)
        return Document(name if whole else f"{name}@{offset}", text, held_out)

    def _marks_before(self, byte: int) -> int:
        """Number of marked bytes before a byte. The first mark is in the middle of the first stretch."""
        every = self._marked_every
        return (byte + every - 1 - every // 2) // every


def _character_start(data: bytes, end: int) -> int:
    """The end, or the start of the character that a cut at the end would split."""
    for start in range(end, end - 4, -1):
        if data[start] & 0xC0 != 0x80:
            return start
    return end  # No UTF-8.


class JsonlSource:
    """JSON lines, a document each. The field is the key of the text, or of a chat's messages; one with dots, such as
    `a.text`, is the key of that name, or else `text` of the object at `a`.
    """

    def __init__(self, path: str, field: str, *, bad: BadDocuments | None = None) -> None:
        self.name = f"jsonl:{path}#{field}"
        self.bad = bad or BadDocuments()
        self._files, self.left_out = find_files(self.name, path, (".jsonl",), compressed=True)
        self._field = field
        self.shards = list(self._files)
        self.fingerprint = fingerprint("jsonl", sizes(self._files), field)

    def read(self, shard: int, cursor: Cursor | None) -> Iterator[tuple[Document, Cursor]]:
        """The documents of a file; a cursor is a byte offset into its (uncompressed) content, and the lines before."""
        name = self.shards[shard]
        path = self._files[name]
        offset, number = cursor or (0, 0)
        with opened(path) as file:
            file.seek(offset)
            # A small compressed file may hold a line of more than the memory.
            while line := file.readline(MAX_FILE_BYTES):
                offset, number = offset + len(line), number + 1
                if len(line) == MAX_FILE_BYTES:
                    raise UserError(f"{path}:{number}: the line has over {MAX_FILE_BYTES:,} bytes; shorten it")
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip() and (document := self._document(f"{name}:{number}", line, f"{path}:{number}")):
                    yield document, (offset, number)

    def _document(self, name: str, line: bytes, where: str) -> Document | None:
        """The document of a line; None if it is empty, or bad and skipped."""
        try:
            record = parse_json(line)
            if not isinstance(record, dict):
                reason = f"expected an object with {self._field!r}, got {type(record).__name__}"
            elif (value := self._value(record)) is _ABSENT:
                reason = no_field(self._field, record)
            else:
                return make_document(name, value) if value != "" else None
        except BadDocument as error:
            reason = f"field {self._field!r} {error}"
        except ValueError as error:
            reason = f"not JSON that can be read: {one_line(error)}"
        self.bad.found(f"{where}: {reason}")
        return None

    def _value(self, record: dict[str, Any]) -> Any:
        if self._field in record:
            return record[self._field]
        value: Any = record
        for key in self._field.split("."):
            value = value.get(key, _ABSENT) if isinstance(value, dict) else _ABSENT
        return value
