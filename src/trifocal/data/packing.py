"""Rows of tokens from a stream of documents, shuffled. No document sees another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trifocal.data.stream import DocumentStream, Position, TokenDocument, shuffled

IGNORED = -100
"""The target of a token without a next one."""


class Row(NamedTuple):
    """One row of a stream: tokens and targets, [T] int32, and the documents with the index of their first token in it.
    Targets are -100 at a document's last token, and of a chat but for answers; epochs count from the first token.
    """

    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    starts: list[int]
    document_ids: list[str]
    epoch: int


class PackedStream:
    """Documents laid end to end and cut into rows of equal length.

    A document is the tokens of its text and the separator, whose target is -100. One that does not fit continues in the
    next row, where it starts anew: its position is 0 there, and it sees nothing of the row before.

    A chat is never divided, as its answers would lose their questions: if it does not fit, it begins the next row, and
    separators without targets fill the rest of this one. Only the tokens of its answers are targets.
    """

    def __init__(self, documents: DocumentStream, sequence_length: int) -> None:
        self._documents = documents
        self._length = sequence_length
        self.seek(asdict(Position()) | {"offset": 0})

    def seek(self, state: dict[str, Any]) -> None:
        self._position = Position.from_json(state)
        self._offset: int = state["offset"]
        self._iterator: Iterator[TokenDocument] = iter(())
        self._document: TokenDocument | None = None

    def state(self) -> dict[str, Any]:
        """The document in which the last row ended, and the number of its tokens that are used."""
        return asdict(self._position) | {"offset": self._offset}

    def next_row(self) -> Row:
        """The next row; UserError if the split is empty or a document cannot be read."""
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


class ShuffledStream:
    """Shuffles each block of `block_rows` consecutive rows of a stream of which it is the only reader; 1 keeps the
    order.

    A document longer than a row fills consecutive rows, and batches of these would be alike for many steps. The order
    of a block depends on the seed and its number. A position is the stream's position at the start of the block, and
    the number of rows used. For each row handed out, one of the next block is read: the work is even, and a block is
    kept.
    """

    def __init__(self, rows: PackedStream, block_rows: int, *, seed: int) -> None:
        self._rows = rows
        self._block_rows = block_rows
        self._seed = seed
        self.seek({"block": 0, "row": 0, "start": rows.state()})

    def seek(self, state: dict[str, Any]) -> None:
        """Go to a position that `state` gave. The next row then reads its whole block."""
        self._block: int = state["block"]
        self._used: int = state["row"]
        self._start: dict[str, Any] = state["start"]
        self._end: dict[str, Any] = {}
        # The rows that are left of the block, the next one last; the epochs of all its rows, in the stream's order.
        self._left: list[Row] = []
        self._epochs: list[int] = []
        # Rows already read of the following block.
        self._ahead: list[Row] = []
        self._rows.seek(self._start)

    def state(self) -> dict[str, Any]:
        """Number of the block, number of its rows that are used, and the stream's position at its start."""
        return {"block": self._block, "row": self._used, "start": self._start}

    def next_row(self) -> Row:
        """The next row, with the epoch of the unshuffled row in its place: epochs never decrease."""
        size = self._block_rows
        if not self._left:
            self._begin_block()
        else:
            # One for each row used; after a resume, which has read none, more, spread evenly.
            lacking, chances = size - len(self._ahead), size - self._used + 1
            for _ in range(-(-lacking // chances)):
                self._ahead.append(self._rows.next_row())
        row = self._left.pop()._replace(epoch=self._epochs[self._used])
        self._used += 1
        if self._used == size:
            self._block, self._used, self._start = self._block + 1, 0, self._end
        return row

    def skip_row(self) -> int:
        return self.next_row().epoch

    def _begin_block(self) -> None:
        """Read the missing rows of the block, and shuffle the block."""
        block, self._ahead = self._ahead, []
        while len(block) < self._block_rows:
            block.append(self._rows.next_row())
        self._end = self._rows.state()
        self._epochs = [row.epoch for row in block]
        order = shuffled(len(block), "rows", self._seed, self._block)
        self._left = [block[i] for i in reversed(order[self._used :])]
