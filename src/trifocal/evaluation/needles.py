"""Needles in haystacks: does the model find one sentence in a long text, wherever it stands?"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trifocal.data import Loader
from trifocal.data.sources.synthetic import VALUE_TOKENS, haystack, task_size
from trifocal.data.stream import random_words
from trifocal.evaluation.subject import SPLIT, Subject, TooShort

Prompt = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Tokens with the question and all of its answer but the last token, and targets, -100 but for the answer; [T]."""

_NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Grace", "Henry")
_DIGITS = 5
# The needles of a depth stand in a range of at most this many tokens: in one place, all would lie alike in the blocks
# of sparse attention, and the figure would be that of this one position in a block.
_RANGE = 128


class Haystacks:
    """Prompts of any length and depth, of the task `needle` or of validation documents with sentences "The pass key of
    NAME is NUMBER." among them: any model of text can answer by copying.
    """

    def __init__(self, subject: Subject) -> None:
        assert subject.data is not None
        self._data, self._tokenizer = subject.data, subject.tokenizer
        self._vocab_size = subject.model.config.vocab_size
        self.is_task = self._data.parsed.kind == "needle"
        self.needles = task_size(self._data.parsed, 0) if self.is_task else 1

    def prompts(self, length: int, depths: Sequence[float], samples: int) -> Iterator[tuple[float, list[Prompt]]]:
        """For each depth, from 0 to 1, all samples' prompts, of up to `length` tokens, with the same haystacks."""
        if self.is_task and length < 12 * self.needles:
            raise TooShort(f"{self.needles} needles and their questions need {12 * self.needles} tokens, got {length}")
        texts = [] if self.is_task else self._read_texts(length, samples)
        for depth in depths:
            places = enumerate(self._places(depth, length, samples))
            if self.is_task:
                yield depth, [self._of_task(length, i, place) for i, place in places]
            else:
                yield depth, [self._of_text(texts[i], length, i, place) for i, place in places]

    def _places(self, depth: float, length: int, samples: int) -> list[float]:
        """Where the needle of each sample stands, from 0 to 1; the same for all depths but for the depth."""
        reach = min(_RANGE, length // 8)
        offsets = random_words(samples, "places of a depth", self._data.seed) % np.uint64(reach + 1)
        return [(depth * (length - reach) + int(offset)) / length for offset in offsets]

    def _of_task(self, length: int, sample: int, place: float) -> Prompt:
        key = (self._data.seed, SPLIT, sample)
        tokens, targets = haystack(self._vocab_size, length, self.needles, key, depth=place)
        # Only the first question: its needle has the place.
        end = np.flatnonzero(targets >= 0)[VALUE_TOKENS - 1] + 1
        return tokens[:end], targets[:end]

    def _of_text(self, text: NDArray[np.int32], length: int, sample: int, place: float) -> Prompt:
        name, number = (int(word) for word in random_words(2, "pass key", self._data.seed, sample) >> np.uint64(1))
        question = self._tokenizer.encode(f"\nThe pass key of {_NAMES[name % len(_NAMES)]} is")
        answer = self._tokenizer.encode(f" {number % 10**_DIGITS:0{_DIGITS}}.")
        room = length + 1 - 2 * (len(question) + len(answer))
        if room < 1:
            raise TooShort(f"a needle and its question need {length + 1 - room} tokens, got {length}")
        before = round(place * room)
        tokens = np.concatenate([text[:before], question, answer, text[before:room], question, answer])
        targets = np.full(len(tokens) - 1, -100, dtype=np.int32)
        targets[-len(answer) :] = answer
        return tokens[:-1], targets

    def _read_texts(self, length: int, samples: int) -> list[NDArray[np.int32]]:
        """Validation text for each sample, at least `length` tokens, without separators."""
        data = replace(self._data, shuffle_sequences=1)
        rows: list[NDArray[np.int32]] = []
        with Loader(
            data,
            tokenizer=self._tokenizer,
            sequence_length=length,
            batch_size=1,
            vocab_size=self._vocab_size,
            split="validation",
        ) as loader:
            for _ in range(samples):
                row = np.empty(0, dtype=np.int32)
                while len(row) < length:
                    tokens = next(loader).tokens[0].numpy().astype(np.int32)
                    row = np.concatenate([row, tokens[tokens != self._tokenizer.separator]])
                rows.append(row[:length])
        return rows


def measure_needles(subject: Subject, length: int, depths: Sequence[float], samples: int) -> Iterator[dict[str, Any]]:
    """The share of needles that are found, a row of the task `needle` for each depth. An answer counts if each token is
    the likeliest, given those before it: greedy generation then gives it.
    """
    haystacks = Haystacks(subject)
    for depth, prompts in haystacks.prompts(length, depths, samples):
        right, losses = subject.score_answers(prompts)
        found = sum(bool(own.all()) for own in right.split([int((targets >= 0).sum()) for _, targets in prompts]))
        yield {
            "task": "needle",
            "length": length,
            "needles": haystacks.needles,
            "depth": depth,
            "samples": samples,
            "accuracy": found / samples,
            "answer_loss": float(losses.double().mean()),
        }
