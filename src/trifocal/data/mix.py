"""The source of each row, where there are several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from trifocal.data.stream import shuffled

Weights = tuple[float, ...]


class Drawn(NamedTuple):
    """The rows of each source since its weights hold; both are empty before the first row."""

    weights: Weights = ()
    rows: tuple[int, ...] = ()


class SourceDraw:
    """Draws the sources of rows, in order, so that each source has its share of them to less than one row, at any row
    since its weights hold. Nothing is random, and the counts are exact.

    With several streams that is so after each round of `streams` rows: as a stream has the rows of its place in all
    rounds, the sources of a round are shuffled, so that each source reads all of its streams.

    `weights_at` gives the weights of a round from the number of its first row.
    """

    def __init__(self, streams: int, weights_at: Callable[[int], Weights], *, seed: int) -> None:
        self._streams, self._weights_at, self._seed = streams, weights_at, seed
        self.seek(Drawn())

    def seek(self, drawn: Drawn) -> None:
        """Begin with the round of any row, after the rows of the rounds before."""
        self._before = self._after = drawn
        self._round: int | None = None
        self._sources: list[int] = []

    def source(self, row: int) -> int:
        """The index of a row's source. Rows are asked for in order, one after another."""
        number, place = divmod(row, self._streams)
        if number != self._round:
            self._draw(number)
        return self._sources[place]

    def state(self, row: int) -> Drawn:
        """What `seek` needs where `row` is the next row."""
        return self._before if row // self._streams == self._round else self._after

    def _draw(self, number: int) -> None:
        self._round, self._before = number, self._after
        weights = self._weights_at(number * self._streams)
        rows = [0] * len(weights) if weights != self._before.weights else list(self._before.rows)
        drawn = []
        for _ in range(self._streams):
            drawn.append(next_source(weights, rows))
            rows[drawn[-1]] += 1
        order = shuffled(self._streams, "sources", self._seed, number)
        self._sources, self._after = [drawn[i] for i in order], Drawn(weights, tuple(rows))


def next_source(weights: Sequence[float], rows: Sequence[int]) -> int:
    """The source of the next row, after this many rows of each: of those below their share with it, the one whose next
    row is due first. This quota method of Balinski and Young keeps each count within a row of its share.
    """
    exact = [Fraction(weight) for weight in weights]
    share = (sum(rows) + 1) / sum(exact)
    below = [index for index, weight in enumerate(exact) if rows[index] < weight * share]
    return min(below, key=lambda index: ((rows[index] + 1) / exact[index], index))
