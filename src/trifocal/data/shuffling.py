"""Rows in random order, so that the rows of a batch come from different documents."""

from __future__ import annotations

from typing import Any

from trifocal.data.packing import Row, RowStream
from trifocal.data.stream import shuffled


class ShuffledStream:
    """Shuffles each block of consecutive rows of a stream.

    A document longer than a row fills consecutive rows, and batches of these would be alike for many steps. So the
    rows of block `b`, `[b * K, (b + 1) * K)` of the stream, come in an order that depends on the seed and `b`. A
    position is the stream's position at the start of the block, and the number of rows used of the block. Rows are
    counted across epochs: a block may hold rows of two epochs, or of many if the source is small.

    For each row handed out, a row of the next block is read: the work is even, and `K` rows are kept.

    Args:
        rows: The stream; this object is its only reader.
        block_rows: `K`; 1 keeps the order.
        seed: Orders the rows.
    """

    def __init__(self, rows: RowStream, block_rows: int, *, seed: int) -> None:
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
        """The next row. Its epoch is that of the unshuffled row in its place, so epochs never decrease.

        Raises:
            UserError: If the split is empty or a document cannot be read.
        """
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
        """Skip a row, and return its epoch."""
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
