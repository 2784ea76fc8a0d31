"""The protocol of a source of documents, and the names of sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from trifocal.data.data_config import SOURCES, SYNTHETIC
from trifocal.errors import UserError, nearest
from trifocal.paths import check_path_text, user_path

Cursor = tuple[int, ...]
"""A position between two documents of a shard, in the units of the source: bytes, lines or rows."""


class Document(NamedTuple):
    """A text with its name.

    Attributes:
        id: Name, such as `a.jsonl:7`.
        text: Its text.
        held_out: Whether it belongs to the validation split; None: a hash of the text decides.
    """

    id: str
    text: str
    held_out: bool | None = None


class BadDocuments:
    """Stops at documents without readable text, or skips and counts them, as `data.on_bad_document` says.

    One rule for all sources, except that `builtin` always skips: its files come with Python.

    A document is bad if its text is missing (a null, no such field), no string, no UTF-8, or no JSON. An empty text is
    not bad: it has no tokens, and is left out. A file that cannot be read at all always stops a run.

    Args:
        action: `stop` or `skip`.

    Attributes:
        skipped: A hash of each skipped document, so that each counts once.
        first: The message about the first one; empty if there is none.
    """

    def __init__(self, action: str = "stop") -> None:
        self._action = action
        self.skipped: set[int] = set()
        self.first = ""

    def found(self, message: str) -> None:
        """Handle a bad document: stop, or skip it.

        Args:
            message: Names the document and its fault.

        Raises:
            UserError: If the action is `stop`.
        """
        if self._action == "stop":
            raise UserError(f'{message}; data.on_bad_document "skip" leaves such documents out and counts them')
        self.skip(message)

    def skip(self, message: str) -> None:
        """Leave a bad document out and count it, whatever the action is."""
        self.first = self.first or message
        self.skipped.add(int.from_bytes(hashlib.blake2b(message.encode(), digest_size=8).digest(), "big"))


class Source(Protocol):
    """Documents in shards, each shard readable from any cursor that it gave out.

    The same shard and cursor always give the same documents: exact resume depends on it.
    """

    name: str
    """The source in messages."""

    shards: list[str]
    """Names of the shards, in an order that is the same on every machine."""

    fingerprint: str
    """Hash of the files' names and sizes."""

    bad: BadDocuments
    """The rule for bad documents, and their count."""

    def content_hashes(self) -> list[str]:
        """`content_hash` of each shard; empty where the shards are on a server."""
        ...

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
        Kind, path (empty where none is given; the number of `recall` and `needle`) and field (`text` where none is
        given).

    Raises:
        UserError: If the kind is unknown (names the nearest), lacks its path, or takes none.
    """
    kind, _, rest = source.partition(":")
    check_path_text(source, "data.source")
    if kind not in SOURCES:
        hint = f"the nearest is {nearest(kind, SOURCES)}"
        if user_path(source, "data.source").exists():
            hint = f"for this path write {_kind_of_path(source)}:{source}"
        raise UserError(f"unknown data.source {source!r}; {hint} (known: {', '.join(SOURCES)})")
    path, field = rest, "text"
    if kind in ("jsonl", "parquet", "fineweb-edu") and "#" in rest:
        path, _, field = rest.rpartition("#")
    if kind in ("text", "jsonl", "parquet") and not path:
        raise UserError(f"data.source {source!r} lacks its path; write {kind}:PATH")
    if kind in ("synthetic", "builtin") and path:
        raise UserError(f"data.source {source!r}: {kind} takes no path; write {kind}, or text:{path} to read it")
    if kind in ("recall", "needle") and path and not (path.isdecimal() and len(path) < 10 and int(path)):
        raise UserError(f"data.source {source!r}: {kind} takes a whole number above 0, such as {kind}:8")
    if not field:
        raise UserError(f"data.source {source!r} has an empty field after #; write #text, for instance")
    return SourceName(kind, path, field)


def has_text(source: str) -> bool:
    """Whether a source gives text; the tokens of the others are drawn.

    Args:
        source: A source string, as in `parse_source`.
    """
    return parse_source(source).kind not in SYNTHETIC


def is_local(source: str) -> bool:
    """Whether a source can be read without a network.

    Args:
        source: A source string, as in `parse_source`.
    """
    kind, path, _ = parse_source(source)
    return kind != "fineweb-edu" if not path else not path.startswith(("http://", "https://"))


def _kind_of_path(path: str) -> str:
    name = path.removesuffix(".gz")
    return {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}.get(Path(name).suffix, "text")


def fingerprint(*parts: object) -> str:
    """A short stable hash of JSON-able parts."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()
