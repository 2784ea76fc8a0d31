"""Documents that `datasets` streams: JSON, CSV, text and other formats of data sets that are not in parquet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trifocal.data.activity import DataError
from trifocal.data.local_files import content_hash
from trifocal.data.sources import BadDocument, BadDocuments, Cursor, Document, make_document, no_field
from trifocal.errors import UserError, one_line


class StreamedSource:
    """A field of a streamed data set; a file is a shard, a record a document.

    Args:
        name: The source in messages.
        dataset: A `datasets.IterableDataset`.
        files: Path or URL of each of its files by name, in its order.
        field: The field of the text, or of the list of messages of a chat.
        fingerprint: Hash of the files' names and sizes.
        bad: The rule for records without text.
        held_out: As in `Document`, for all records.

    Raises:
        UserError: If `datasets` does not read file by file, as it does not with folders of images or sounds.
    """

    def __init__(
        self,
        name: str,
        dataset: Any,
        files: dict[str, Path | str],
        field: str,
        fingerprint: str,
        bad: BadDocuments | None = None,
        held_out: bool | None = None,
    ) -> None:
        self.name = name
        self.bad = bad or BadDocuments()
        self.shards = list(files)
        self.fingerprint = fingerprint
        self._dataset, self._paths = dataset, list(files.values())
        self._field, self._held_out = field, held_out
        if dataset.num_shards != len(files):
            raise UserError(
                f"{name} has {len(files)} files, but datasets reads them as {dataset.num_shards}; only files of text "
                "can be streamed"
            )

    def read(self, shard: int, cursor: Cursor | None) -> Iterator[tuple[Document, Cursor]]:
        """The documents of a file; a cursor is the number of records before it, which are read again and skipped.

        Raises:
            UserError: If the file cannot be read, lacks the field, or a record is bad and stops the run.
            DataError: If it is on a server that does not answer; `datasets` repeats failed requests.
        """
        (row,) = cursor or (0,)
        name = self.shards[shard]
        for record in self._records(shard, row):
            row += 1
            if self._field not in record:
                raise UserError(f"{self.name} ({name}): {no_field(self._field, record)}")
            value = record[self._field]
            if value == "":
                continue
            try:
                document = make_document(f"{name}#{row - 1}", value, self._held_out)
            except BadDocument as error:
                self.bad.found(f"{self.name} ({name}): record {row - 1}: field {self._field!r} {error}")
            else:
                yield document, (row,)

    def content_hashes(self) -> list[str]:
        """`content_hash` of each file; empty for files on a server."""
        local = [path for path in self._paths if isinstance(path, Path)]
        return [content_hash(path) for path in local] if len(local) == len(self._paths) else []

    def _records(self, shard: int, skipped: int) -> Iterator[dict[str, Any]]:
        part = self._dataset.shard(num_shards=len(self.shards), index=shard)
        try:
            yield from part.skip(skipped) if skipped else part
        except (ConnectionError, TimeoutError) as error:
            raise DataError(
                f"{self.name} ({self.shards[shard]}): the server does not answer: {one_line(error)}"
            ) from error
        except Exception as error:  # The libraries raise many kinds of errors, one for each format.
            raise UserError(f"{self.name} ({self.shards[shard]}) cannot be read: {one_line(error)}") from error
