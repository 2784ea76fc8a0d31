"""The tasks of random tokens, read back by hand; and their rows through a loader."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from tests.data.loaders import open_loader, same, take
from trifocal.data import DataConfig
from trifocal.data.sources.synthetic import associations, haystack, synthetic_stream
from trifocal.errors import UserError


def open_task(source, **settings):
    sizes = {"length": 256, "batch_size": 4, "vocab_size": 64}
    return open_loader(source, **(sizes | settings))


@pytest.mark.parametrize("length, pairs, vocab_size", [(64, 8, 257), (63, 16, 32)])
def test_recall_asks_for_the_value_of_every_key(length, pairs, vocab_size):
    places = []
    for number in range(20):
        tokens, targets = associations(vocab_size, length, pairs, (0, 0, number))
        assert tokens.shape == targets.shape == (length,)
        assert tokens.dtype == targets.dtype == np.int32
        values = dict(zip(tokens[0 : 2 * pairs : 2].tolist(), tokens[1 : 2 * pairs : 2].tolist(), strict=True))
        assert len(values) == pairs
        assert max(values) < vocab_size // 2 <= min(values.values()) and max(values.values()) < vocab_size
        (asked,) = np.nonzero(targets >= 0)
        assert (tokens < vocab_size // 2).sum() == 2 * pairs, "a key stands for nothing"
        assert min(asked) >= 2 * pairs and sorted(tokens[asked]) == sorted(values)
        assert [values[key] for key in tokens[asked].tolist()] == targets[asked].tolist()
        # The answer follows, like in text; the last one may lie behind the row.
        inside = asked[asked + 1 < length]
        assert (tokens[inside + 1] == targets[inside]).all()
        places += asked.tolist()
    # All the rest of the row is used, the near and the far.
    if length > 8 * pairs - 8:
        assert min(places) < 2 * pairs + 6 and max(places) > length - 6


@pytest.mark.parametrize("needles, length", [(1, 200), (3, 96), (4, 48)])
def test_a_haystack_answers_its_own_questions(needles, length):
    """Also where needles fill all of it: a length of 48 is 4 needles of 6 tokens and their questions."""
    found = set()
    for number in range(30):
        tokens, targets = haystack(60, length, needles, (number,))
        assert tokens.shape == targets.shape == (length,)
        (marks,) = np.nonzero(tokens == 59)
        assert len(marks) == 2 * needles, "the mark is only in needles and questions"
        assert (tokens >= 30).sum() == 12 * needles, "no hay looks like a needle"
        values = {int(tokens[at + 1]): tokens[at + 2 : at + 6].tolist() for at in marks[:needles]}
        different = {*values, *(token for value in values.values() for token in value)}
        assert len(different) == 5 * needles, "no token occurs in two needles, or twice in one"
        assert (np.diff(marks[: needles + 1]) >= 6).all(), "needles overlap"
        assert marks[needles] == length - 6 * needles
        for at in marks[needles:]:
            assert targets[at + 1 : at + 5].tolist() == values[int(tokens[at + 1])]
            assert tokens[at + 2 : at + 6].tolist() == values[int(tokens[at + 1])]
        assert (targets >= 0).sum() == 4 * needles
        found.add(int(marks[0]))
    assert len(found) > 5 or length == 12 * needles


@pytest.mark.parametrize(("needles", "depth"), [(1, 0.0), (1, 0.5), (3, 1.0)])
def test_depth_places_the_needle_that_is_asked_for_first(needles, depth):
    for number in range(10):
        tokens, _ = haystack(50, 124, needles, (number,), depth=depth)
        key = tokens[124 - 6 * needles + 1]
        (places,) = np.nonzero((tokens[:-1] == 49) & (tokens[1:] == key))
        # The last place before the questions is six tokens before them.
        assert places[0] == pytest.approx(depth * (124 - 6 * needles - 6), abs=5 * (needles - 1) + 0.5)


@pytest.mark.parametrize("task", ["recall", "needle"])
def test_rows_have_documents_of_all_lengths(task):
    counts, lengths = Counter[int](), []
    source, vocab_size = ("recall:32", 257) if task == "recall" else ("needle:4", 64)
    rows = synthetic_stream(DataConfig(source=source), vocab_size, 1024, validation=False)
    for _ in range(200):
        row = rows.next_row()
        assert len(row.tokens) == len(row.targets) == 1024 and len(row.starts) == len(row.document_ids)
        ends = [*row.starts[1:], 1024]
        for start, end in zip(row.starts, ends, strict=True):
            tokens, asked = row.tokens[start:end], (row.targets[start:end] >= 0).sum()
            if task == "needle":
                assert asked == 16 and (tokens == 63).sum() == 8
            else:
                assert asked == 32 * (end - start) // 1024 and (tokens < 128).sum() == 2 * asked
        counts[len(row.starts)] += 1
        lengths += [end - start for start, end in zip(row.starts, ends, strict=True)]
    # 50 of each, with a standard deviation of 6.
    assert set(counts) == {1, 2, 4, 8} and all(25 < count < 75 for count in counts.values())
    assert 64 <= min(lengths) < 80 and max(lengths) == 1024
    assert all(any(low < length < high for length in lengths) for low, high in ((100, 128), (260, 380), (512, 1024)))


@pytest.mark.parametrize("source", ["synthetic", "recall:5", "needle:2"])
def test_rows_depend_only_on_their_number(source):
    with open_task(source) as loader:
        batches = take(loader, 6)
    with open_task(source) as loader:
        take(loader, 2)
        state = json.loads(json.dumps(loader.state_dict()))
    with open_task(source) as loader:
        loader.load_state_dict(state)
        assert all(map(same, take(loader, 4), batches[2:]))
    with open_task(source, batch_size=2, rank=1, world_size=2) as loader:
        assert torch.equal(next(loader).tokens, batches[0].tokens[1::2])
    with open_task(source, split="validation") as loader:
        assert not torch.equal(next(loader).tokens, batches[0].tokens)
    assert any(batch.cu_seqlens is not None for batch in batches) == (source == "needle:2")
    with open_task("needle:1") as loader, pytest.raises(UserError, match=r"data\.source"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    "source, message",
    [
        (
            "recall:33",
            "33 pairs need 131 tokens in a row and a model.vocab_size of 66, got 256 and 64; write recall:32",
        ),
        ("needle:9", "9 needles need 144 tokens in a row and a model.vocab_size of 91, got 256 and 64"),
        ("recall:many", "'recall:many': recall takes a whole number above 0, such as recall:8"),
        ("needle:0", "needle takes a whole number above 0"),
    ],
)
def test_what_does_not_fit_is_refused(source, message):
    with pytest.raises(UserError) as caught:
        open_task(source)
    assert message in str(caught.value)
