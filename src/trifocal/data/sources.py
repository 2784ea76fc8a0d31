"""What a source of documents is, and the names of sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from trifocal.data.data_config import SOURCES
from trifocal.data.local_files import check_name, expand_home
from trifocal.errors import UserError, nearest

Cursor = tuple[int, ...]
"""A position between two documents of a shard, in the units of the source: bytes, lines or rows."""


class Document(NamedTuple):
    """One text and the name that finds it again.

    Attributes:
        id: Name, such as `a.jsonl:7`.
        text: Its text.
        held_out: Whether it belongs to the validation split; None: decided by a hash of the text.
    """

    id: str
    text: str
    held_out: bool | None = None


class BadDocuments:
    """What is done with documents that hold no readable text: `data.on_bad_document`, for all sources alike but
    `builtin`, whose files nobody chose: it skips and counts them always.

    A document is bad if its text is missing (a null, no such field), no string, no UTF-8, or no JSON. An empty text is
    not bad: it has no tokens, and is passed over without a word. A file that is damaged as a whole always stops a run.

    Args:
        action: `stop` or `skip`.

    Attributes:
        skipped: A hash of each document that was skipped, once however often it was read.
        first: What was wrong with the first; empty if there was none.
    """

    def __init__(self, action: str = "stop") -> None:
        self._action = action
        self.skipped: set[int] = set()
        self.first = ""

    def found(self, message: str) -> None:
        """A bad document was met.

        Args:
            message: Which one, and what is wrong with it.

        Raises:
            UserError: If the run is to stop.
        """
        if self._action == "stop":
            raise UserError(f'{message}; data.on_bad_document "skip" leaves such documents out and counts them')
        self.skip(message)

    def skip(self, message: str) -> None:
        """Leave a bad document out and count it, whatever the setting is: for files that nobody chose."""
        self.first = self.first or message
        self.skipped.add(int.from_bytes(hashlib.blake2b(message.encode(), digest_size=8).digest(), "big"))


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

    bad: BadDocuments
    """What is done with bad documents, and how many there were."""

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
        Kind, path (empty where none is given) and field (`text` where none is given).

    Raises:
        UserError: If the kind is unknown (names the nearest), lacks its path, or takes none.
    """
    kind, _, rest = source.partition(":")
    check_name(source, "data.source")
    if kind not in SOURCES:
        hint = f"the nearest is {nearest(kind, SOURCES)}"
        if expand_home(source, "data.source").exists():
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
    name = path.removesuffix(".gz")
    return {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}.get(Path(name).suffix, "text")


def fingerprint(*parts: object) -> str:
    """A short stable hash of JSON-able parts."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()
