"""Documents from parquet files, local or on an HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trifocal.data.files import find_files, sizes
from trifocal.data.remote import HttpClient, HttpFile
from trifocal.data.sources import Cursor, Document, fingerprint
from trifocal.errors import UserError

# Rows decoded at once; the compressed column of the whole row group is in memory anyway.
_ROWS_DECODED = 1024


def is_url(path: str) -> bool:
    """Whether a path is to be read over HTTP."""
    return path.startswith(("http://", "https://"))


class _Footer(NamedTuple):
    shard: int
    size: int | None
    metadata: Any


class ParquetSource:
    """A column of texts; a file is a shard, a row a document.

    Args:
        name: The source in messages.
        files: Path or URL of each file by its name.
        field: The column.
        fingerprint: Of the files' names and sizes.
        client: For URLs.

    Raises:
        UserError: If pyarrow is missing, or the first file is local and not what it should be.
    """

    def __init__(
        self, name: str, files: dict[str, Path | str], field: str, fingerprint: str, client: HttpClient
    ) -> None:
        self.name = name
        self.shards = list(files)
        self.fingerprint = fingerprint
        self._paths = list(files.values())
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
    def from_path(cls, name: str, path: str, field: str, client: HttpClient) -> ParquetSource:
        """The source of a file, a folder, a glob, or of URLs with commas between.

        Raises:
            UserError: If nothing is there.
        """
        if is_url(path):
            urls = [url.strip() for url in path.split(",")]
            if broken := [url for url in urls if not is_url(url)]:
                raise UserError(f"data.source {name}: {broken[0]!r} is no URL; between commas each must be one")
            return cls(name, dict(zip(urls, urls, strict=True)), field, fingerprint("urls", urls, field), client)
        found = find_files(name, path, (".parquet",))
        return cls(name, dict(found), field, fingerprint("parquet", sizes(found), field), client)

    def read(self, shard: int, cursor: Cursor | None) -> Iterator[tuple[Document, Cursor]]:
        """The documents of a file; a cursor is a row group and a row in it. Null and empty texts are left out.

        Raises:
            UserError: If the file is not parquet, or lacks the field.
            DataError: If it is on a server that fails at every attempt.
        """
        first_group, first_row = cursor or (0, 0)
        with self._open(shard) as parquet:
            counts = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
            for group in range(first_group, len(counts)):
                before = sum(counts[:group])
                for row, text in self._rows(parquet, shard, group, first_row):
                    after = (group, row + 1) if row + 1 < counts[group] else (group + 1, 0)
                    yield Document(f"{self.shards[shard]}#{before + row}", text), after
                first_row = 0

    def _open(self, shard: int) -> Any:
        """The file opened, its footer kept: a retry does not ask for it again."""
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
        except self._arrow.ArrowInvalid as error:
            raise UserError(f"{path} is not a readable parquet file: {_one_line(error)}") from error
        if known is None:
            self._check_field(path, parquet.schema_arrow)
            self._footer = _Footer(shard, size, parquet.metadata)
        return parquet

    def _check_field(self, path: Path | str, schema: Any) -> None:
        if self._field not in schema.names:
            raise UserError(f"{path} has no field {self._field!r}; its fields are {', '.join(schema.names)}")
        kind = schema.field(self._field).type
        types = self._arrow.types
        if types.is_dictionary(kind):
            kind = kind.value_type
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise UserError(f"{path}: field {self._field!r} must hold strings, it holds {kind}")

    def _rows(self, parquet: Any, shard: int, group: int, first_row: int) -> Iterator[tuple[int, str]]:
        """Row number and text of a row group's rows from one on."""
        row = 0
        try:
            for batch in parquet.iter_batches(
                _ROWS_DECODED, row_groups=[group], columns=[self._field], use_threads=False
            ):
                skipped = min(max(first_row - row, 0), len(batch))
                texts = batch.column(0).slice(skipped).to_pylist()
                for number, text in enumerate(texts, start=row + skipped):
                    if text:
                        yield number, text
                row += len(batch)
        except UserError:
            raise
        except (self._arrow.ArrowInvalid, UnicodeDecodeError, OSError) as error:
            raise UserError(f"{self._paths[shard]}: row group {group} cannot be read: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
