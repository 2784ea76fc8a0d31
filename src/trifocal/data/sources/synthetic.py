"""Rows that are drawn, not read: random tokens, and two tasks that need exact recall. Row `i` depends on its number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trifocal.data.data_config import DataConfig, SourceName
from trifocal.data.packing import IGNORED, Row
from trifocal.data.stream import random_words
from trifocal.errors import UserError

Words = NDArray[np.uint64]
Tokens = NDArray[np.int32]

VALUE_TOKENS = 4
"""Tokens of a needle's value, the answer of its question."""
_NEEDLE = 2 + VALUE_TOKENS
"""Tokens of a needle: the mark, the key, the value. A question and its answer have as many."""
_SHORTEST_HAYSTACK = 16
"""The shortest haystack of a row, for each of its needles."""
_PAIRS_PER_TOKEN = 8
"""`recall` without a number has one pair per this many tokens."""
_FEWEST_PAIRS = 4
"""A row of `recall` has no documents with fewer pairs, on average."""


class SyntheticStream:
    """Endless rows, each made only from its number; a position is the number of the next row."""

    def __init__(self, make_row: Callable[[int], Row]) -> None:
        self._make_row = make_row
        self._row = 0

    def seek(self, state: dict[str, Any]) -> None:
        self._row = state["row"]

    def state(self) -> dict[str, Any]:
        return {"row": self._row}

    def skip_row(self) -> int:
        self._row += 1
        return 0

    def next_row(self) -> Row:
        self._row += 1
        return self._make_row(self._row - 1)


def synthetic_stream(config: DataConfig, vocab_size: int, sequence_length: int, *, validation: bool) -> SyntheticStream:
    """The rows of a synthetic source, in tokens from `[0, vocab_size)`; UserError if they are too few for the task."""
    kind, count = config.parsed.kind, task_size(config.parsed, sequence_length)
    most = 1
    if kind == "recall":
        check_recall(count, vocab_size=vocab_size, sequence_length=sequence_length)
        most = count // _FEWEST_PAIRS
    elif kind == "needle":
        shortest, vocabulary = _SHORTEST_HAYSTACK * count, needle_vocabulary(count)
        if shortest > sequence_length or vocabulary > vocab_size:
            raise UserError(
                f"data.source needle: {count} needles need {shortest} tokens in a row and a model.vocab_size of "
                f"{vocabulary}, got {sequence_length} and {vocab_size}"
            )
        most = sequence_length // (2 * shortest)

    def make_row(number: int) -> Row:
        key = (config.seed, int(validation), number)
        name = f"{config.source}:{number}"

        def make_document(start: int, end: int) -> tuple[Tokens, Tokens]:
            if kind == "recall":
                pairs = max(1, count * (end - start) // sequence_length)
                return associations(vocab_size, end - start, pairs, (*key, start))
            return haystack(vocab_size, end - start, count, (*key, start))

        if kind == "synthetic":
            drawn = _below(random_words(sequence_length + 1, "synthetic", *key), vocab_size)
            return Row(drawn[:-1], drawn[1:], [0], [name], 0)
        return _documents(sequence_length, most, make_document, key, name)

    return SyntheticStream(make_row)


def task_size(source: SourceName, sequence_length: int) -> int:
    """Pairs of a `recall` source, needles of a `needle` source, 0 for others."""
    kind, number, _ = source
    if kind == "recall":
        return int(number) if number else max(1, sequence_length // _PAIRS_PER_TOKEN)
    return int(number or 1) if kind == "needle" else 0


def check_recall(pairs: int, *, vocab_size: int, sequence_length: int) -> None:
    """Refuse pairs that a row cannot hold, or for which there are too few keys."""
    most = min((sequence_length + 1) // 4, vocab_size // 2)
    if pairs > most:
        raise UserError(
            f"data.source recall: {pairs} pairs need {4 * pairs - 1} tokens in a row and a model.vocab_size of "
            f"{2 * pairs}, got {sequence_length} and {vocab_size}; write recall:{max(most, 1)}, or fewer"
        )


def needle_vocabulary(needles: int) -> int:
    """The smallest vocabulary that has other keys and values for each needle."""
    return 2 * needles * (_NEEDLE - 1) + 1


def _documents(
    length: int, most: int, make: Callable[[int, int], tuple[Tokens, Tokens]], key: tuple[int, ...], name: str
) -> Row:
    """A row of one document, or two, or four, … up to `most`, each number as often, so that a task is learned on many
    short ones first; lengths vary by up to a half. `make` gives tokens and targets from first token to end.
    """
    most = max(1, most)
    first, *others = (int(word) for word in random_words(most, "document lengths", *key))
    count = 1 << first % most.bit_length()
    reach = length // (4 * count)
    starts = [0] + [
        number * length // count + word % (2 * reach + 1) - reach for number, word in enumerate(others[: count - 1], 1)
    ]
    tokens, targets = (
        np.concatenate(parts)
        for parts in zip(*(make(*ends) for ends in zip(starts, [*starts[1:], length], strict=True)), strict=True)
    )
    return Row(tokens, targets, starts, [f"{name}@{start}" for start in starts], 0)


def associations(vocab_size: int, length: int, pairs: int, key: tuple[int, ...]) -> tuple[Tokens, Tokens]:
    """Pairs of a key and its value, then each key again, followed by its value: tokens and targets, each [T] int32.

    The lower half of the vocabulary are keys, the upper half values. Each key occurs in one pair and in one query, so
    that each question has one answer. After the pairs, every two tokens are a query with its value, or two random
    values; the places of the queries are drawn alike from the whole rest. The values of the queries are the only
    targets. `key` is that of the random numbers.

    Source: the task of arXiv:2312.04927. It differs in two things: there the distance of a query follows a power law
    that prefers near ones, and the tokens in between may be keys.
    """
    num_keys = vocab_size // 2
    places = (length + 1 - 2 * pairs) // 2
    words = np.split(
        random_words(length + 1 + num_keys + pairs + places, "recall", *key), np.cumsum([length + 1, num_keys, pairs])
    )
    drawn = num_keys + _below(words[0], vocab_size - num_keys)
    keys = _choose(words[1], pairs)
    values = num_keys + _below(words[2], vocab_size - num_keys)
    drawn[0 : 2 * pairs : 2], drawn[1 : 2 * pairs : 2] = keys, values
    queries = 2 * pairs + 2 * _choose(words[3], pairs)
    drawn[queries], drawn[queries + 1] = keys, values
    targets = np.full(length, IGNORED, dtype=np.int32)
    targets[queries] = values
    return drawn[:-1], targets


def haystack(
    vocab_size: int, length: int, needles: int, key: tuple[int, ...], *, depth: float | None = None
) -> tuple[Tokens, Tokens]:
    """One haystack: random tokens with needles among them, and at its end a question for each needle, with its answer:
    tokens and targets, each [T] int32, T being `length`.

    A needle is a mark, a key and a value of four tokens. A question repeats mark and key; the value that follows is its
    answer, and the only target. The mark is the last token of the vocabulary. Keys and values are others of its upper
    half, all different; the hay is drawn from the lower half. So each question has one answer.

    `key` is that of the random numbers. `depth` is the place of the needle that is asked for first, from 0, the
    beginning, to 1, the end before the questions; None draws it like the others.
    """
    mark, hay = vocab_size - 1, vocab_size // 2
    text = length - needles * _NEEDLE
    words = np.split(random_words(length + mark - hay + text, "needle", *key), np.cumsum([length, mark - hay]))
    tokens = _below(words[0], hay)
    written = np.full((needles, _NEEDLE), mark, dtype=np.int32)
    written[:, 1:] = hay + _choose(words[1], needles * (_NEEDLE - 1)).reshape(needles, -1)
    # Places that do not overlap: of rows of ones and needles, where a needle counts as one.
    room = text - needles * (_NEEDLE - 1)
    if depth is None:
        places = _choose(words[2][:room], needles)
    else:
        first = round(depth * (room - 1))
        others = _choose(words[2][: room - 1], needles - 1)
        places = np.concatenate(([first], others + (others >= first)))
    places = places + (_NEEDLE - 1) * np.argsort(np.argsort(places))
    tokens[places[:, None] + np.arange(_NEEDLE)] = written
    tokens[text:] = written.reshape(-1)
    targets = np.full(length, IGNORED, dtype=np.int32)
    answers = text + _NEEDLE * np.arange(needles)[:, None] + np.arange(2, _NEEDLE)
    targets[answers - 1] = tokens[answers]
    return tokens, targets


def _below(words: Words, end: int) -> Tokens:
    """Numbers in `[0, end)`."""
    return (words % np.uint64(end)).astype(np.int32)


def _choose(words: Words, count: int) -> NDArray[np.intp]:
    """Different indices of the words, `count` of them, in random order."""
    if count == 0:
        return np.empty(0, dtype=np.intp)
    smallest = np.argpartition(words, count - 1)[:count]
    return smallest[np.argsort(words[smallest], kind="stable")]
