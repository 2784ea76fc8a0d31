"""Documents from plain text files and from JSON lines."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator

from trifocal.data.files import find_files, sizes
from trifocal.data.sources import Cursor, Document, fingerprint
from trifocal.errors import UserError


class TextSource:
    """UTF-8 text files: each a document, or several where a file is long.

    Args:
        path: File, folder (its `.txt` and `.md` files) or glob.
        document_bytes: A longer file is cut at line ends into documents of about this size, so that one book can
            be shuffled and held out in part; 0: never cut.

    Raises:
        UserError: If nothing is there.
    """

    def __init__(self, path: str, document_bytes: int) -> None:
        self.name = f"text:{path}"
        self._files = find_files(self.name, path, (".txt", ".md"))
        self._document_bytes = document_bytes
        self.shards = list(self._files)
        self.fingerprint = fingerprint("text", sizes(self._files), document_bytes)

    def read(self, shard: int, cursor: Cursor | None) -> Iterator[tuple[Document, Cursor]]:
        """The documents of a file; a cursor is a byte offset.

        Raises:
            UserError: If the file is not UTF-8; names it and the offset.
        """
        name = self.shards[shard]
        path = self._files[name]
        (offset,) = cursor or (0,)
        with path.open("rb") as file:
            file.seek(offset)
            while data := file.read(self._document_bytes or -1):
                if len(data) == self._document_bytes:
                    # On to the end of the line, unless the file has no lines to speak of.
                    data += file.readline(self._document_bytes)
                decoder = codecs.getincrementaldecoder("utf-8")()
                last = len(data) < self._document_bytes or self._document_bytes == 0
                try:
                    text = decoder.decode(data, final=last)
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{path} is not UTF-8: byte {offset + error.start} is 0x{data[error.start]:02x} "
                        f"({error.reason}); convert it, for instance with iconv"
                    ) from error
                # The bytes of a character that was cut begin the next document.
                end = offset + len(data) - len(decoder.getstate()[0])
                file.seek(end)
                document_id = name if offset == 0 and last else f"{name}@{offset}"
                offset = end
                yield Document(document_id, text), (offset,)


class JsonlSource:
    """JSON lines: each an object with a text field, each a document.

    Args:
        path: File, folder (its `.jsonl` files) or glob.
        field: The object's key for the text.

    Raises:
        UserError: If nothing is there.
    """

    def __init__(self, path: str, field: str) -> None:
        self.name = f"jsonl:{path}#{field}"
        self._files = find_files(self.name, path, (".jsonl",))
        self._field = field
        self.shards = list(self._files)
        self.fingerprint = fingerprint("jsonl", sizes(self._files), field)

    def read(self, shard: int, cursor: Cursor | None) -> Iterator[tuple[Document, Cursor]]:
        """The documents of a file; a cursor is a byte offset and the number of lines before it.

        Raises:
            UserError: If a line is broken; names file and line. Empty lines and empty texts are left out.
        """
        name = self.shards[shard]
        path = self._files[name]
        offset, number = cursor or (0, 0)
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                offset, number = offset + len(line), number + 1
                if line.strip() and (text := self._text_of(line, f"{path}:{number}")):
                    yield Document(f"{name}:{number}", text), (offset, number)

    def _text_of(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 at byte {error.start} of the line") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
        except RecursionError as error:
            raise UserError(f"{where}: objects and lists are nested too deep") from error
        if not isinstance(record, dict):
            raise UserError(f"{where}: expected an object with {self._field!r}, got {type(record).__name__}")
        if self._field not in record:
            raise UserError(f"{where}: no field {self._field!r}; it has {', '.join(map(repr, record)) or 'none'}")
        text = record[self._field]
        if not isinstance(text, str):
            raise UserError(f"{where}: field {self._field!r} must be a string, got {type(text).__name__}")
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise UserError(
                    f"{where}: field {self._field!r} holds half a surrogate pair at character {error.start}"
                ) from error
        return text
