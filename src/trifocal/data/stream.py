"""The endless, shuffled stream of a split's documents, readable from any position in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trifocal.data.prefetch import Activity
from trifocal.data.sources.base import Cursor, Document, Source
from trifocal.data.sources.chats import BadChat, Chat
from trifocal.data.tokenizers import Tokenizer
from trifocal.errors import UserError, one_line

# Texts in one call of the tokenizer: enough for its threads, few enough to waste little on a resume.
_ENCODED_TOGETHER = 32
# A block of very long documents ends at this size, which bounds memory.
_BLOCK_CHARACTERS = 1 << 25
# A part is empty if it has no document in this many epochs in a row, times the number of parts.
_EMPTY_EPOCHS = 8
_NO_TOKENS = np.empty(0, dtype=np.int32)

_Encoded = tuple[NDArray[np.int32], NDArray[np.bool_] | None]
"""Tokens of a document and, of a chat, which of them are targets."""


@dataclass(frozen=True)
class Position:
    """A position between two documents, as plain numbers."""

    epoch: int = 0
    """Complete passes over the source."""
    shard: int = 0
    """Complete shards of this epoch's order."""
    block: Cursor | None = None
    """Cursor of the shard's current block; None at its start."""
    index: int = 0
    """Documents of the shuffled block before this position, including those of the other split."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Position:
        """The position from its fields, as JSON gives them."""
        block = values["block"]
        return cls(values["epoch"], values["shard"], None if block is None else tuple(block), values["index"])


class TokenDocument(NamedTuple):
    """A document, with the position before it, in tokens [n] int32: those of its text, then the separator; of a chat,
    the template's. `learned` says which tokens of a chat are targets, [n] bool: the assistant's. None for a text: all.
    """

    position: Position
    id: str
    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_] | None = None


def random_words(count: int, purpose: str, *key: int) -> NDArray[np.uint64]:
    """Random 64-bit words of a purpose and a key, everywhere the same: NumPy promises that of bare bit generators."""
    digest = hashlib.blake2b(repr((purpose, key)).encode(), digest_size=16).digest()
    return np.random.PCG64(int.from_bytes(digest, "big")).random_raw(count)


def shuffled(count: int, purpose: str, *key: int) -> NDArray[np.intp]:
    """A permutation of `range(count)` that depends only on the purpose and the key."""
    return np.argsort(random_words(count, purpose, *key), kind="stable")


def in_validation(text: str, fraction: float) -> bool:
    """Whether a text is held out. A hash of the text decides, so equal texts are never in both splits."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


class DocumentStream:
    """A split of a source, shuffled by a seed, epoch after epoch: the shards are permuted, and within a shard each
    block of `block_documents` documents. So a position needs a few numbers, whatever the size of the source.

    A chat longer than `longest_chat` tokens is cut. Of `parts` equal parts of the split this is number `part`, with its
    own epochs; together they give every document once an epoch. Up to the number of shards, each part opens its own
    shards only; beyond that, parts share shards and divide the documents.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        *,
        longest_chat: int,
        validation: bool,
        validation_fraction: float,
        seed: int,
        block_documents: int,
        activity: Activity,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._longest_chat = longest_chat
        self.separator = tokenizer.separator
        self._validation = validation
        self._fraction = validation_fraction
        self._documents = 0
        self._seed = seed
        self._block_documents = block_documents
        self._activity = activity
        num_shards = len(source.shards)
        self._parts = parts
        self._shard_parts = max(count for count in range(1, parts + 1) if parts % count == 0 and count <= num_shards)
        self._shard_part = part % self._shard_parts
        self._document_parts = parts // self._shard_parts
        self._document_part = part // self._shard_parts

    def read(self, start: Position) -> Iterator[TokenDocument]:
        """The documents from a position on, without end; UserError if the split has none in a whole epoch."""
        epoch, first_shard, cursor, index = start.epoch, start.shard, start.block, start.index
        num_shards = len(self._source.shards)
        empty_epochs = 0
        while True:
            whole = first_shard == 0 and cursor is None and index == 0
            found, self._documents = False, 0
            order = shuffled(num_shards, "shards", self._seed, epoch)
            for done in range(first_shard, num_shards):
                if done % self._shard_parts != self._shard_part:
                    continue
                shard = int(order[done])
                for block, documents in self._blocks(shard, cursor):
                    position = Position(epoch, done, block, index)
                    for document in self._read_block(shard, position, documents):
                        found = True
                        yield document
                    index = 0
                cursor, index = None, 0
            empty_epochs = 0 if found or not whole else empty_epochs + 1
            # Each epoch divides the documents anew: a part may be without one in some epochs.
            if empty_epochs >= (1 if self._parts == 1 else _EMPTY_EPOCHS * self._parts):
                raise UserError(self._empty_message())
            epoch, first_shard = epoch + 1, 0

    def _blocks(self, shard: int, start: Cursor | None) -> Iterator[tuple[Cursor | None, list[Document]]]:
        """A shard's blocks with their cursors, from the block at `start` on."""
        documents: list[Document] = []
        characters = 0
        name = f"{self._source.name} ({self._source.shards[shard]})"
        try:
            self._activity.check()
            self._activity.text = f"reading {name}"
            for document, after in self._source.read(shard, start):
                documents.append(document)
                self._documents += 1
                characters += len(document.text)
                if len(documents) == self._block_documents or characters >= _BLOCK_CHARACTERS:
                    yield start, documents
                    documents, characters, start = [], 0, after
                    self._activity.text = f"reading {name}"
        except OSError as error:
            raise UserError(f"{name} cannot be read: {one_line(error)}") from error
        if documents:
            yield start, documents

    def _read_block(self, shard: int, start: Position, documents: list[Document]) -> Iterator[TokenDocument]:
        """The split's documents of a block, in the epoch's order."""
        # By the shard's number, not its position: a shard's order does not depend on the other shards.
        order = shuffled(len(documents), "block", self._seed, start.epoch, shard, *(start.block or ()))
        chosen = [
            (index, documents[order[index]])
            for index in range(start.index, len(documents))
            if (index + start.epoch + shard) % self._document_parts == self._document_part
            and self._held_out(documents[order[index]]) == self._validation
        ]
        for first in range(0, len(chosen), _ENCODED_TOGETHER):
            group = chosen[first : first + _ENCODED_TOGETHER]
            self._activity.check()
            self._activity.text = f"tokenizing {self._source.name} ({group[0][1].id})"
            for (index, document), (tokens, learned) in zip(group, self._encode(group), strict=True):
                if len(tokens):
                    position = Position(start.epoch, start.shard, start.block, index)
                    yield TokenDocument(position, document.id, tokens, learned)

    def _encode(self, group: Sequence[tuple[int, Document]]) -> Iterator[_Encoded]:
        """The tokens of some documents; none of a document that is left out."""
        texts = iter(self._tokenizer.encode_batch([document.text for _, document in group if not document.messages]))
        for _, document in group:
            if document.messages:
                yield self._encode_chat(document, document.messages)
            else:
                tokens = next(texts)
                yield (np.append(tokens, np.int32(self.separator)) if len(tokens) else tokens), None

    def _encode_chat(self, document: Document, messages: Chat) -> _Encoded:
        bad, length = self._source.bad, self._longest_chat
        try:
            tokens, answers = self._tokenizer.encode_chat(messages)
        except BadChat as error:
            bad.found(f"{document.id}: {error}")
            return _NO_TOKENS, None
        # The first token of a row is no target.
        if not answers[1:length].any():
            bad.skip(f"{document.id}: no answer begins within train.sequence_length, {length} tokens")
            return _NO_TOKENS, None
        return tokens[:length], answers[:length]

    def _held_out(self, document: Document) -> bool:
        return in_validation(document.text, self._fraction) if document.held_out is None else document.held_out

    def _empty_message(self) -> str:
        bad = self._source.bad
        what, change = ("validate on", "raise") if self._validation else ("train on", "lower")
        skipped = f", {len(bad.skipped)} skipped as bad; the first: {bad.first}" if bad.skipped else ""
        fewer = ", or lower data.streams" if self._parts > 1 else ""
        return (
            f"{self._source.name} has no document to {what} (of {self._documents:,} read{skipped}); give it more text, "
            f"or {change} data.validation_fraction, now {self._fraction:g}{fewer}"
        )
