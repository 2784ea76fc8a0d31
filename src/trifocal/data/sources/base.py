"""The protocol of a source of documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, Protocol

from trifocal.data.sources.chats import BadChat, Chat, read_chat
from trifocal.errors import UserError

Cursor = tuple[int, ...]
"""A position between two documents of a shard, in the units of the source: bytes, lines or rows."""


class Document(NamedTuple):
    """A text or a chat, with its name, such as `a.jsonl:7`; the text of a chat are the messages as JSON, the same from
    every kind of file. `held_out`: whether it belongs to the validation split; None: a hash of the text decides.
    """

    id: str
    text: str
    held_out: bool | None = None
    messages: Chat | None = None


class BadDocument(ValueError):
    """A field's value that is no document; the text is the reason, to follow the name of the field."""


def make_document(name: str, value: Any, held_out: bool | None = None) -> Document:
    """The document of a field's value: a string is a text, a list the messages of a chat; BadDocument if it is none."""
    if value is None:
        raise BadDocument("is null")
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
    """Stops at documents without readable text, or chats that are broken or refused, or skips them, by the action.
    `skipped` has a hash of each, so that each counts once; `first` is the first one's message.
    """

    def __init__(self, action: str = "stop") -> None:
        self._action = action
        self.skipped: set[int] = set()
        self.first = ""

    def found(self, message: str) -> None:
        """Skip a bad document, which the message names with its fault, or raise UserError if the action is `stop`."""
        if self._action == "stop":
            raise UserError(f'{message}; data.on_bad_document "skip" leaves such documents out and counts them')
        self.skip(message)

    def skip(self, message: str) -> None:
        """Leave a bad document out and count it, whatever the action is."""
        self.first = self.first or message
        self.skipped.add(int.from_bytes(hashlib.blake2b(message.encode(), digest_size=8).digest(), "big"))


class Source(Protocol):
    """Documents in shards. From the same cursor a shard always gives the same documents: exact resume depends on it."""

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
        """Each document of a shard with the cursor after it, from a cursor that the shard gave out, or the start."""


def fingerprint(*parts: object) -> str:
    """A short stable hash of JSON-able parts."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()
