"""The protocol of a source of documents, and the names of sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trifocal.data.data_config import SOURCES, SYNTHETIC
from trifocal.data.sources.chats import BadChat, Chat, read_chat, read_messages
from trifocal.errors import UserError, nearest
from trifocal.paths import check_path_text, parse_json, user_path

Cursor = tuple[int, ...]
"""A position between two documents of a shard, in the units of the source: bytes, lines or rows."""


class Document(NamedTuple):
    """A text or a chat, with its name.

    Attributes:
        id: Name, such as `a.jsonl:7`.
        text: Its text; of a chat, the messages as JSON, the same from every kind of file.
        held_out: Whether it belongs to the validation split; None: a hash of the text decides.
        messages: The messages of a chat; None for a text.
    """

    id: str
    text: str
    held_out: bool | None = None
    messages: Chat | None = None


CHATS_AS_TEXT = "texts that are chats in JSON, learned as they are written (a list of messages is read as a chat)"


class BadDocument(ValueError):
    """A field's value that is no document; the text is the reason, to follow the name of the field."""


def make_document(name: str, value: Any, held_out: bool | None = None) -> Document:
    """The document of a field's value: a string is a text, a list the messages of a chat.

    Args:
        name: Name of the document.
        value: The value, or the error of its decoding.
        held_out: `Document.held_out`.

    Raises:
        BadDocument: If it is neither.
    """
    if value is None:
        raise BadDocument("is null")
    if isinstance(value, UnicodeDecodeError):
        raise BadDocument(f"is not UTF-8 at byte {value.start}")
    if not isinstance(value, str | list):
        raise BadDocument(f"must be a string or a list of messages, got {type(value).__name__}")
    try:
        messages = None if isinstance(value, str) else read_chat(value)
        text = (
            value if isinstance(value, str) else json.dumps(messages, ensure_ascii=False, sort_keys=True, default=str)
        )
        text.encode("utf-8")
    except BadChat as error:
        raise BadDocument(f"holds no chat: {error}") from error
    except UnicodeEncodeError as error:
        raise BadDocument(f"holds half a surrogate pair at character {error.start}") from error
    return Document(name, text, held_out, messages)


def no_field(field: str, names: Collection[str]) -> str:
    """The message that records lack a field; names the fields that they have."""
    listed = ", ".join(map(repr, names)) or "none"
    hint = "; write #messages behind the source for chats" if "messages" in names else ""
    return f"no field {field!r}; it has {listed if len(listed) < 200 else listed[:200] + '…'}{hint}"


class BadDocuments:
    """Stops at documents without readable text, or skips and counts them, as `data.on_bad_document` says.

    One rule for all sources, except that `builtin` always skips: its files come with Python.

    A document is bad if its text is missing (a null, no such field), no string, no UTF-8, or no JSON, and a chat if its
    messages are broken or the template refuses them. An empty text is not bad: it has no tokens, and is left out. A
    file that cannot be read at all always stops a run.

    Args:
        action: `stop` or `skip`.

    Attributes:
        skipped: A hash of each skipped document, so that each counts once.
        first: The message about the first one; empty if there is none.
        cut: A hash of each chat that was cut to the length of a row.
        read: Kinds of the documents that were read: texts, chats, or `CHATS_AS_TEXT`.
    """

    def __init__(self, action: str = "stop") -> None:
        self._action = action
        self.skipped: set[int] = set()
        self.first = ""
        self.cut: set[int] = set()
        self.read: set[str] = set()

    def found(self, message: str) -> None:
        """Handle a bad document, which the message names with its fault: stop, or skip it.

        Raises:
            UserError: If the action is `stop`.
        """
        if self._action == "stop":
            raise UserError(f'{message}; data.on_bad_document "skip" leaves such documents out and counts them')
        self.skip(message)

    def skip(self, message: str) -> None:
        """Leave a bad document out and count it, whatever the action is."""
        self.first = self.first or message
        self.skipped.add(_number(message))

    def note_kind(self, document: Document) -> None:
        """Note whether a text or a chat was read; the first text tells whether texts are chats in JSON."""
        if document.messages:
            self.read.add("chats")
        elif not self.read & {"texts", CHATS_AS_TEXT}:
            self.read.add(CHATS_AS_TEXT if _is_chat(document.text) else "texts")

    def count_cut(self, name: str) -> None:
        """Count a chat that was cut."""
        self.cut.add(_number(name))


def _is_chat(text: str) -> bool:
    """Whether a text is a chat in JSON."""
    try:
        return bool(read_messages(parse_json(text)))
    except ValueError:
        return False


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Source(Protocol):
    """Documents in shards, each shard readable from any cursor that it gave out.

    The same shard and cursor always give the same documents: exact resume depends on it.
    """

    name: str
    """The source in messages."""

    shards: list[str]
    """Names of the shards, in an order that is the same on every machine."""

    left_out: str
    """Other files in the folder, such as `2 .zst, 1 .json`; empty if there is none."""

    fingerprint: str
    """Hash of the files' names and sizes."""

    bad: BadDocuments
    """The rule for bad documents, and their count."""

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
        source: A string like `builtin`, `text:book.txt`, `parquet:folder#text`, `hf:owner/name:config#messages`.

    Returns:
        Kind, path (empty where none is given; the number of `recall` and `needle`; name and configuration of `hf`) and
        field (`text` where none is given).

    Raises:
        UserError: If the kind is unknown (names the nearest), lacks its path, or takes none; if it is a URL.
    """
    kind, _, rest = source.partition(":")
    check_path_text(source, "data.source")
    if "://" in source:
        # Not repeated in the message: it may hold a password.
        raise UserError(
            "data.source is an address with ://; expected local files or hf:OWNER/NAME: download the files first, and "
            "give a login in the environment (HF_TOKEN), not in the address"
        )
    if kind not in SOURCES:
        hint = f"the nearest is {nearest(kind, SOURCES)}"
        if user_path(source, "data.source").exists() or "/" in kind or Path(kind).suffix:
            hint = f"for this path write {_kind_of_path(source)}:{source}"
        raise UserError(f"unknown data.source {source!r}; {hint} (known: {', '.join(SOURCES)})")
    path, field = rest, "text"
    if kind in ("jsonl", "parquet", "hf", "fineweb-edu") and "#" in rest:
        path, _, field = rest.rpartition("#")
    if kind in ("text", "jsonl", "parquet", "hf") and not path:
        raise UserError(f"data.source {source!r} lacks its path; write {kind}:{'NAME' if kind == 'hf' else 'PATH'}")
    if kind in ("synthetic", "builtin") and path:
        raise UserError(f"data.source {source!r}: {kind} takes no path; write {kind}, or text:{path} to read it")
    if kind in ("recall", "needle") and path and not (path.isdecimal() and len(path) < 10 and int(path)):
        raise UserError(f"data.source {source!r}: {kind} takes a whole number above 0, such as {kind}:8")
    if not field:
        raise UserError(f"data.source {source!r} has an empty field after #; write #text, for instance")
    return SourceName(kind, path, field)


def has_text(source: str) -> bool:
    """Whether a source gives text; the tokens of the others are drawn."""
    return parse_source(source).kind not in SYNTHETIC


def is_local(source: str) -> bool:
    """Whether a source can be read without a network."""
    kind, path, _ = parse_source(source)
    return dataset_name(path)[0].is_dir() if kind == "hf" else kind != "fineweb-edu" or bool(path)


def dataset_name(path: str) -> tuple[Path, str]:
    """Name and configuration of an `hf` source; the name is a folder's path or the hub's `OWNER/NAME`.

    Args:
        path: `NAME` or `NAME:CONFIG`. A folder with a colon in its name is found, too.
    """
    whole = user_path(path, "data.source")
    name, _, config = path.rpartition(":")
    return (whole, "") if not name or whole.is_dir() else (user_path(name, "data.source"), config)


def _kind_of_path(path: str) -> str:
    name = path.removesuffix(".gz")
    return {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}.get(Path(name).suffix, "text")


def fingerprint(*parts: object) -> str:
    """A short stable hash of JSON-able parts."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()
