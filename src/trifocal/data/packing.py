"""Rows of tokens from a stream of documents. No document sees another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trifocal.data.stream import DocumentStream, Position, TokenDocument

IGNORED = -100
"""The target of a token without a next one."""


class Row(NamedTuple):
    """One row of a stream.

    Args:
        tokens: [T] int32.
        targets: The next token of the same document, -100 at its last; of a chat, -100 for all but answers, [T] int32.
        starts: Index of each document's first token in the row; ascending, from 0.
        document_ids: The document at each start.
        epoch: Complete passes over the source before the row's first token.
    """

    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    starts: list[int]
    document_ids: list[str]
    epoch: int


class RowStream(Protocol):
    """Endless rows with an exact position."""

    def next_row(self) -> Row:
        """The next row."""
        ...

    def skip_row(self) -> int:
        """Skip a row that this process does not need, and return its epoch."""
        ...

    def state(self) -> dict[str, Any]:
        """The position after the last row, JSON types only."""
        ...

    def seek(self, state: dict[str, Any]) -> None:
        """Go to a position that `state` gave."""
        ...


class PackedStream:
    """Documents laid end to end and cut into rows of equal length.

    A document is the tokens of its text and the separator, so the model learns to end. Each token is an input once
    and, except the first, a target once. The target of the separator is -100: the next token is another document's.
    A document that does not fit continues in the next row, where it starts anew: its position is 0 there, and it sees
    nothing of the row before.

    A chat is never divided, as its answers would lose their questions: if it does not fit, it begins the next row, and
    separators without targets fill the rest of this one, behind the last document. The targets of a chat are the
    tokens of its answers alone.

    Args:
        documents: The documents.
        sequence_length: Tokens of a row.
    """

    def __init__(self, documents: DocumentStream, sequence_length: int) -> None:
        self._documents = documents
        self._length = sequence_length
        self.seek(Position().to_json() | {"offset": 0})

    def seek(self, state: dict[str, Any]) -> None:
        """Go to a position that `state` gave."""
        self._position = Position.from_json(state)
        self._offset: int = state["offset"]
        self._iterator: Iterator[TokenDocument] = iter(())
        self._document: TokenDocument | None = None

    def state(self) -> dict[str, Any]:
        """The document in which the last row ended, and the number of its tokens that are used."""
        return self._position.to_json() | {"offset": self._offset}

    def next_row(self) -> Row:
        """The next row.

        Raises:
            UserError: If the split is empty or a document cannot be read.
        """
        tokens = np.empty(self._length, dtype=np.int32)
        targets = np.empty_like(tokens)
        starts: list[int] = []
        ids: list[str] = []
        epoch = 0
        filled = 0
        while filled < self._length:
            document = self._current()
            if filled == 0:
                epoch = document.position.epoch
            begin, learned = self._offset, document.learned
            if learned is not None and len(document.tokens) > self._length - filled:
                tokens[filled:], targets[filled:] = self._documents.separator, IGNORED
                break
            self._offset = min(begin + self._length - filled, len(document.tokens))
            starts.append(filled)
            ids.append(document.id)
            following = document.tokens[begin + 1 : self._offset + 1]
            end = filled + self._offset - begin
            tokens[filled:end] = document.tokens[begin : self._offset]
            if learned is not None:
                following = np.where(learned[1:], following, np.int32(IGNORED))
            targets[filled : filled + len(following)] = following
            targets[filled + len(following) : end] = IGNORED
            filled = end
        return Row(tokens, targets, starts, ids, epoch)

    def skip_row(self) -> int:
        """Skip a row, and return its epoch. It must be made, to find its end."""
        return self.next_row().epoch

    def _current(self) -> TokenDocument:
        """The document of the next token."""
        if self._document is None:
            self._iterator = self._documents.read(self._position)
            self._document = next(self._iterator)
        if self._offset == len(self._document.tokens):
            self._document = next(self._iterator)
            self._offset = 0
        self._position = self._document.position
        return self._document
