"""Documents from parquet files, local or on an HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trifocal.data.activity import Stopped
from trifocal.data.local_files import content_hash, find_files, sizes
from trifocal.data.remote import HttpClient, HttpFile
from trifocal.data.sources import BadDocument, BadDocuments, Cursor, Document, fingerprint, make_document
from trifocal.errors import UserError, one_line
from trifocal.masking import mask_text

# Rows decoded at once; the compressed column of the whole row group is in memory anyway.
_ROWS_DECODED = 1024


def is_url(path: str) -> bool:
    """Whether a path is an HTTP address."""
    return path.startswith(("http://", "https://"))


class _Footer(NamedTuple):
    shard: int
    size: int | None
    metadata: Any


class ParquetSource:
    """A column of texts or chats; a file is a shard, a row a document. A file that cannot be read stops the run.

    Args:
        name: The source in messages.
        files: Path or URL of each file by its name.
        field: The column.
        fingerprint: Hash of the files' names and sizes.
        client: For URLs.
        bad: The rule for rows without text.
        held_out: As in `Document`, for all rows.

    Raises:
        UserError: If pyarrow is missing, or the first file is local and no parquet file with that column.
    """

    def __init__(
        self,
        name: str,
        files: dict[str, Path | str],
        field: str,
        fingerprint: str,
        client: HttpClient,
        bad: BadDocuments | None = None,
        held_out: bool | None = None,
    ) -> None:
        self.name = name
        self.bad = bad or BadDocuments()
        self._held_out = held_out
        self.shards = list(files)
        self.fingerprint = fingerprint
        self._paths = list(files.values())
        # For messages, without the secrets of URLs.
        self._shown = [mask_text(str(path)) for path in self._paths]
        self._field = field
        self._client = client
        self._footer: _Footer | None = None
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UserError(f"{name} needs an extra: pip install 'trifocal[data]'") from None
        self._arrow = pyarrow
        self._parquet = pyarrow.parquet
        if isinstance(self._paths[0], Path):
            with self._open(0):
                pass

    @classmethod
    def from_path(
        cls, name: str, path: str, field: str, client: HttpClient, bad: BadDocuments | None = None
    ) -> ParquetSource:
        """The source of a file, a folder, a glob, or of URLs separated by commas.

        Raises:
            UserError: If there is no such file.
        """
        if is_url(path):
            urls = [url.strip() for url in path.split(",")]
            if broken := [url for url in urls if not is_url(url)]:
                raise UserError(f"data.source {name}: {broken[0]!r} is no URL; between commas each must be one")
            # Names stay when a password or a signature changes.
            files = {mask_text(url): url for url in urls}
            return cls(name, dict(files), field, fingerprint("urls", list(files), field), client, bad)
        found = find_files(name, path, (".parquet",))
        return cls(name, dict(found), field, fingerprint("parquet", sizes(found), field), client, bad)

    def read(self, shard: int, cursor: Cursor | None) -> Iterator[tuple[Document, Cursor]]:
        """The documents of a file; a cursor is a row group and a row in it.

        Raises:
            UserError: If the file is not parquet or damaged, lacks the field, or a row is bad and stops the run.
            DataError: If it is on a server that fails at every attempt.
        """
        first_group, first_row = cursor or (0, 0)
        with self._open(shard) as parquet:
            counts = self._count_rows(parquet, shard)
            for group in range(first_group, len(counts)):
                before = sum(counts[:group])
                for row, document in self._rows(parquet, shard, group, first_row, before):
                    after = (group, row + 1) if row + 1 < counts[group] else (group + 1, 0)
                    yield document, after
                first_row = 0

    def _open(self, shard: int) -> Any:
        """Open the file and keep its footer, so that a retry does not ask for it again."""
        path = self._paths[shard]
        known = self._footer if self._footer is not None and self._footer.shard == shard else None
        try:
            file: Any = path
            size = None
            if isinstance(path, str):
                file = HttpFile(self._client, path, None if known is None else known.size)
                size = file.size
            parquet = self._parquet.ParquetFile(
                file, metadata=None if known is None else known.metadata, pre_buffer=False
            )
            if known is None:
                self._check_field(self._shown[shard], parquet.schema_arrow)
                self._footer = _Footer(shard, size, parquet.metadata)
        except (UserError, Stopped, FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # The library raises many kinds of errors for a damaged footer.
            raise UserError(f"{self._shown[shard]} is not a readable parquet file: {one_line(error)}") from error
        return parquet

    def _count_rows(self, parquet: Any, shard: int) -> list[int]:
        """Rows of each row group, by the footer."""
        try:
            counts = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
        except Exception as error:  # As above.
            raise UserError(f"{self._shown[shard]} is not a readable parquet file: {one_line(error)}") from error
        if min(counts, default=0) < 0:
            raise UserError(f"{self._shown[shard]} is not a readable parquet file: a row group of {min(counts)} rows")
        return counts

    def _check_field(self, path: str, schema: Any) -> None:
        if self._field not in schema.names:
            names = ", ".join(name if name.isprintable() else repr(name) for name in schema.names)
            raise UserError(f"{path} has no field {self._field!r}; its fields are {names}")
        if (count := schema.names.count(self._field)) > 1:
            raise UserError(f"{path} has {count} fields {self._field!r}; name another, or rename all but one")
        kind = schema.field(self._field).type
        types = self._arrow.types
        if types.is_dictionary(kind):
            kind = kind.value_type
        chats = (types.is_list(kind) or types.is_large_list(kind)) and types.is_struct(kind.value_type)
        if not (chats or types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise UserError(f"{path}: field {self._field!r} must hold strings or lists of messages, it holds {kind}")

    def content_hashes(self) -> list[str]:
        """`content_hash` of each file; empty for URLs."""
        local = [path for path in self._paths if isinstance(path, Path)]
        return [content_hash(path) for path in local] if len(local) == len(self._paths) else []

    def _rows(
        self, parquet: Any, shard: int, group: int, first_row: int, before: int
    ) -> Iterator[tuple[int, Document]]:
        """Number and document of a group's rows from `first_row` on; the file has `before` rows before the group."""
        row = 0
        try:
            for batch in parquet.iter_batches(
                _ROWS_DECODED, row_groups=[group], columns=[self._field], use_threads=False
            ):
                skipped = min(max(first_row - row, 0), len(batch))
                for number, value in enumerate(_values(batch.column(0).slice(skipped)), start=row + skipped):
                    if value == "":
                        continue
                    try:
                        document = make_document(f"{self.shards[shard]}#{before + number}", value, self._held_out)
                    except BadDocument as error:
                        self.bad.found(f"{self._shown[shard]}: row {before + number}: field {self._field!r} {error}")
                    else:
                        yield number, document
                row += len(batch)
        except (UserError, Stopped):
            raise
        except Exception as error:  # The library raises many kinds of errors for damaged pages.
            raise UserError(f"{self._shown[shard]}: row group {group} cannot be read: {one_line(error)}") from error


def _values(column: Any) -> list[str | list[Any] | UnicodeDecodeError | None]:
    """The values of a column, with the error in place of a value that is not UTF-8."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value(value) for value in column]


def _value(value: Any) -> str | list[Any] | UnicodeDecodeError | None:
    try:
        content: str | list[Any] | None = value.as_py()
    except UnicodeDecodeError as error:
        return error
    return content
