"""What a source of documents is, and the names of sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from trifocal.data.config import SOURCES
from trifocal.errors import UserError, nearest

Cursor = tuple[int, ...]
"""A position between two documents of a shard, in the units of the source: bytes, lines or rows."""


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


class SourceName(NamedTuple):
    """The parts of a source string `kind:path#field`."""

    kind: str
    path: str
    field: str


def parse_source(source: str) -> SourceName:
    """Split a source string into its parts.

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
