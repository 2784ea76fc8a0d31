"""What a source of documents is, and the one that a config names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from trifocal.data.config import SOURCES, DataConfig
from trifocal.data.retry import Activity, Retry
from trifocal.errors import UserError, nearest

Cursor = tuple[int, ...]
"""A place between two documents of a shard, in whatever units the source needs to go there directly."""


class Document(NamedTuple):
    """One text and the name that finds it again."""

    id: str
    text: str


class Source(Protocol):
    """Documents in shards, each shard readable from any cursor that it gave out.

    Reading the same shard from the same cursor always gives the same documents: order, cursors and what a resumed
    run sees rest on that.
    """

    name: str
    """The source in messages."""

    shards: list[str]
    """Names of the shards, in an order that is the same on every machine."""

    fingerprint: str
    """Changes when the data do, as far as names and sizes show it."""

    def read(self, shard: int, cursor: Cursor | None) -> Iterator[tuple[Document, Cursor]]:
        """Read on from a cursor, or from the start.

        Args:
            shard: Index into `shards`.
            cursor: A cursor that this shard gave out, or None for its first document.

        Yields:
            Each document with the cursor after it.
        """
        ...

    def close(self) -> None:
        """Give up what is under way, such as a request; may be called from another thread."""
        ...


class SourceName(NamedTuple):
    """A source string taken apart: `kind:path#field`."""

    kind: str
    path: str
    field: str


def parse_source(source: str) -> SourceName:
    """Take a source string apart.

    Args:
        source: Such as `builtin`, `text:book.txt`, `parquet:folder#text`.

    Returns:
        Kind, path (empty where none is given) and field (`text` where none is given).

    Raises:
        UserError: If the kind is unknown (names the nearest), lacks its path, or takes none.
    """
    kind, _, rest = source.partition(":")
    if kind not in SOURCES:
        hint = f"the nearest is {nearest(kind, SOURCES)}"
        if Path(source).expanduser().exists():
            hint = f"for this path write {_kind_of_path(source)}:{source}"
        raise UserError(f"unknown data.source {source!r}; {hint} (known: {', '.join(SOURCES)})")
    path, field = rest, "text"
    if kind in ("jsonl", "parquet", "fineweb-edu") and "#" in rest:
        path, _, field = rest.rpartition("#")
    if kind in ("text", "jsonl", "parquet") and not path:
        raise UserError(f"data.source {source!r} lacks its path; write {kind}:PATH")
    if kind in ("synthetic", "builtin") and path:
        raise UserError(f"data.source {source!r}: {kind} takes no path; write {kind}, or text:{path} to read it")
    if not field:
        raise UserError(f"data.source {source!r} has an empty field after #; write #text, for instance")
    return SourceName(kind, path, field)


def is_local(source: str) -> bool:
    """Whether a source can be read without a network.

    Args:
        source: As `parse_source` takes it.
    """
    kind, path, _ = parse_source(source)
    return kind != "fineweb-edu" if not path else not path.startswith(("http://", "https://"))


def _kind_of_path(path: str) -> str:
    return {".jsonl": "jsonl", ".parquet": "parquet"}.get(Path(path).suffix, "text")


def fingerprint(*parts: object) -> str:
    """A short stable hash of JSON-able parts."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


def make_source(config: DataConfig, retry: Retry, activity: Activity) -> tuple[Source, DataConfig]:
    """Open the source of documents that a config names (any but `synthetic`, which has no documents).

    Args:
        config: Names the source.
        retry: For sources that ask a server when they are opened.
        activity: Of the loader that will read it.

    Returns:
        The source, and the config with a branch of the hub replaced by the commit that it stands for now.

    Raises:
        UserError: If the source is unknown, or its data are missing or empty.
    """
    # Imported here so that a run loads only the libraries of its own source.
    kind, path, field = parse_source(config.source)
    if kind == "builtin":
        from trifocal.data.builtin import BuiltinSource

        return BuiltinSource(include_site_packages=config.include_site_packages), config
    if kind == "text":
        from trifocal.data.text import TextSource

        return TextSource(path, config.text_document_bytes), config
    if kind == "jsonl":
        from trifocal.data.text import JsonlSource

        return JsonlSource(path, field), config
    if kind == "fineweb-edu" and not path:
        from trifocal.data.hub import open_fineweb

        source, revision = open_fineweb(config, field, retry, activity)
        return source, replace(config, fineweb_revision=revision)
    from trifocal.data.parquet import ParquetSource
    from trifocal.data.remote import HttpClient

    client = HttpClient(config.request_timeout_seconds, activity)
    return ParquetSource.from_path(config.source, path, field, client), config
