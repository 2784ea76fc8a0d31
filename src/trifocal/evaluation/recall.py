"""Multi-query associative recall: does the model remember which value belongs to which key?"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from trifocal.data.sources.synthetic import associations, check_recall
from trifocal.evaluation.subject import SPLIT, Subject

_FIRST_DISTANCE = 64


def measure_recall(subject: Subject, length: int, pairs: int, samples: int) -> Iterator[dict[str, Any]]:
    """The share of queries that are answered with their value: a row of the task `recall`, then one of
    `recall_distance` for each distance between query and pair, `first` <= tokens < `end`.
    """
    assert subject.data is not None
    vocab_size = subject.model.config.vocab_size
    check_recall(pairs, vocab_size=vocab_size, sequence_length=length)
    rows = [associations(vocab_size, length, pairs, (subject.data.seed, SPLIT, sample)) for sample in range(samples)]
    right, nats = subject.score_answers(rows)
    hits, distance = right.double(), torch.from_numpy(np.concatenate([_distances(*row, pairs) for row in rows]))
    yield {
        "task": "recall",
        "length": length,
        "pairs": pairs,
        "samples": samples,
        "accuracy": float(hits.mean()),
        "answer_loss": float(nats.mean()),
    }
    first = 0
    while first < length:
        end = 2 * first or _FIRST_DISTANCE
        here = (distance >= first) & (distance < end)
        if here.any():
            yield {
                "task": "recall_distance",
                "length": length,
                "pairs": pairs,
                "first": first,
                "end": end,
                "queries": int(here.sum()),
                "accuracy": float(hits[here].mean()),
            }
        first = end


def _distances(tokens: np.ndarray, targets: np.ndarray, pairs: int) -> np.ndarray:
    """Tokens between each query and its key among the pairs, in the order of the queries."""
    place = {int(key): 2 * number for number, key in enumerate(tokens[0 : 2 * pairs : 2])}
    (asked,) = np.nonzero(targets >= 0)
    return np.array([at - place[int(tokens[at])] for at in asked])
