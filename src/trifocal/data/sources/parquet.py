"""Documents from parquet files, on disk or on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trifocal.data.sources.base import BadDocument, BadDocuments, Cursor, Document, fingerprint, make_document
from trifocal.data.sources.local_files import find_files, sizes
from trifocal.errors import UserError, one_line

# Rows decoded at once. A column that repeats long values is small until it is decoded, and each of its rows may be as
# long as the whole column: fewer rows where they could hold more bytes than this.
_MAX_ROWS_DECODED = 256
_BYTES_DECODED = 1 << 27


class ParquetSource:
    """A column of texts or chats; a file is a shard, a row a document. `files` gives path or address by name;
    `held_out` is that of `Document` for all rows.
    """

    def __init__(
        self,
        name: str,
        files: Mapping[str, Path | str],
        field: str,
        fingerprint: str,
        bad: BadDocuments | None = None,
        held_out: bool | None = None,
        left_out: str = "",
    ) -> None:
        self.name = name
        self.bad = bad or BadDocuments()
        self._held_out = held_out
        self.shards, self.left_out = list(files), left_out
        self.fingerprint = fingerprint
        self._paths = list(files.values())
        self._field = field
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UserError(f"{name} needs an extra: pip install 'trifocal[data]'") from None
        self._arrow = pyarrow
        self._parquet = pyarrow.parquet
        if isinstance(self._paths[0], Path):
            self._open(0)[0].close()

    @classmethod
    def from_path(cls, name: str, path: str, field: str, bad: BadDocuments | None = None) -> ParquetSource:
        """The source of a file, a folder or a glob; UserError if there is no such file."""
        found, left_out = find_files(name, path, (".parquet",))
        return cls(name, found, field, fingerprint("parquet", sizes(found), field), bad, left_out=left_out)

    def read(self, shard: int, cursor: Cursor | None) -> Iterator[tuple[Document, Cursor]]:
        """The documents of a file; a cursor is a row group and a row in it."""
        first_group, first_row = cursor or (0, 0)
        parquet, counts = self._open(shard)
        with parquet:
            for group in range(first_group, len(counts)):
                before = sum(counts[:group])
                for row, document in self._rows(parquet, shard, group, first_row, before):
                    after = (group, row + 1) if row + 1 < counts[group] else (group + 1, 0)
                    yield document, after
                first_row = 0

    def _open(self, shard: int) -> tuple[Any, list[int]]:
        """The file of a shard, and the rows of each of its row groups, by the footer."""
        path = self._paths[shard]
        try:
            file = open_address(path) if isinstance(path, str) else path
            parquet = self._parquet.ParquetFile(file, pre_buffer=False)
            self._check_field(str(path), parquet.schema_arrow)
            counts = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
            if min(counts, default=0) < 0:
                raise ValueError(f"a row group of {min(counts)} rows")
        except (UserError, FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # The libraries raise many kinds of errors.
            raise UserError(f"{path} is not a readable parquet file: {one_line(error)}") from error
        return parquet, counts

    def _check_field(self, path: str, schema: Any) -> None:
        if self._field not in schema.names:
            names = ", ".join(name if name.isprintable() else repr(name) for name in schema.names)
            raise UserError(f"{path} has no field {self._field!r}; its fields are {names}")
        kind = schema.field(self._field).type
        types = self._arrow.types
        if types.is_dictionary(kind):
            kind = kind.value_type
        chats = (types.is_list(kind) or types.is_large_list(kind)) and types.is_struct(kind.value_type)
        if not (chats or types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise UserError(f"{path}: field {self._field!r} must hold strings or lists of messages, got {kind}")

    def _rows(
        self, parquet: Any, shard: int, group: int, first_row: int, before: int
    ) -> Iterator[tuple[int, Document]]:
        """Number and document of a group's rows from `first_row` on; the file has `before` rows before the group."""
        path, row = self._paths[shard], 0
        try:
            size = max(1, parquet.metadata.row_group(group).total_byte_size)
            rows = max(1, min(_MAX_ROWS_DECODED, _BYTES_DECODED // size))
            for batch in parquet.iter_batches(rows, row_groups=[group], columns=[self._field], use_threads=False):
                skipped = min(max(first_row - row, 0), len(batch))
                for number, cell in enumerate(batch.column(self._field).slice(skipped), start=row + skipped):
                    try:
                        value = cell.as_py()
                        if value == "":
                            continue
                        document = make_document(f"{self.shards[shard]}#{before + number}", value, self._held_out)
                    except BadDocument as error:
                        self.bad.found(f"{path}: row {before + number}: field {self._field!r} {error}")
                    except UnicodeDecodeError as error:
                        reason = f"is not UTF-8 at byte {error.start}"
                        self.bad.found(f"{path}: row {before + number}: field {self._field!r} {reason}")
                    else:
                        yield number, document
                row += len(batch)
        except UserError:
            raise
        except Exception as error:  # The libraries raise many kinds of errors.
            raise UserError(f"{path}: row group {group} cannot be read: {one_line(error)}") from error


def open_address(address: str) -> Any:
    """A file on the hub. `huggingface_hub` and `datasets` repeat requests that fail, some for minutes."""
    from datasets.utils.file_utils import xopen

    return xopen(address, "rb")
