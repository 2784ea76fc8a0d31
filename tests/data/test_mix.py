"""Several sources: exact shares, the rows of each as without the others, and what a resume may change."""

import json
import random
import tomllib
from fractions import Fraction

import pytest
import torch

from tests.data.loaders import open_loader, same, take
from trifocal.data import DataConfig, make_tokenizer
from trifocal.data.loader import merge_states, read_validation
from trifocal.data.mix import SourceDraw, next_source
from trifocal.errors import UserError
from trifocal.fields import from_table
from trifocal.train import RunConfig
from trifocal.train.config.load import override
from trifocal.train.config.toml import to_toml

SETTINGS = {"shuffle_documents": 8, "shuffle_sequences": 5, "validation_fraction": 0.2}
LENGTH = 24
WEIGHTS = (3.0, 1.0, 0.5)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Three files of JSON lines, whose documents have the letter of their source. An epoch of b is a few rows."""
    folder = tmp_path_factory.mktemp("mix")
    for name, count in (("a", 90), ("b", 20), ("c", 60)):
        texts = [f"{name}{number} " + name * (number % 13) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tuple(f"jsonl:{folder}/{name}.jsonl" for name in "abc")


def open_mix(sources, weights=WEIGHTS, *, batch_size=1, **more):
    return open_loader(tuple(sources), LENGTH, batch_size, **SETTINGS | {"weights": tuple(weights)} | more)


def letters(batches):
    """The source of each row, by its letter."""
    return "".join(
        "abc"[int((row == ord("b")).any()) + 2 * int((row == ord("c")).any())] for b in batches for row in b.tokens
    )


@pytest.mark.parametrize("seed", range(8))
def test_each_source_has_its_share_to_less_than_one_row_at_every_row(seed):
    generator = random.Random(seed)
    weights = [generator.choice((generator.random(), generator.randint(0, 9), 1e-3)) for _ in range(2 + seed)]
    weights[0] = weights[0] or 1.0
    rows, whole = [0] * len(weights), sum(map(Fraction, weights))
    for number in range(1, 200):
        rows[next_source(weights, rows)] += 1
        for weight, count in zip(weights, rows, strict=True):
            assert abs(count - number * Fraction(weight) / whole) < 1


@pytest.mark.parametrize("streams", [2, 3])
def test_with_several_streams_shares_are_exact_after_each_round_and_every_stream_is_read(streams):
    draw = SourceDraw(streams, lambda row: (1.0, 1.0), seed=5)
    drawn = [draw.source(row) for row in range(40 * streams)]
    for end in range(streams, len(drawn), streams):
        assert abs(2 * sum(drawn[:end]) - end) < 2
    for place in range(streams):
        assert 8 < sum(drawn[place::streams]) < 32
    for row in range(1, 2 * streams):
        again, states = (
            SourceDraw(streams, lambda row: (1.0, 1.0), seed=5),
            SourceDraw(streams, lambda row: (1.0, 1.0), seed=5),
        )
        assert [states.source(i) for i in range(row)] == drawn[:row]
        again.seek(states.state(row))
        assert [again.source(i) for i in range(row, row + 9)] == drawn[row : row + 9]


def test_a_source_gives_the_rows_that_it_gives_without_the_others(sources):
    with open_mix(sources) as loader:
        batches = take(loader, 90)
    order = letters(batches)
    assert [order.count(letter) for letter in "abc"] == [60, 20, 10]
    assert batches[-1].epochs[1] > batches[-1].epochs[0]
    for number, source in enumerate(sources):
        own = [batch for batch, letter in zip(batches, order, strict=True) if letter == "abc"[number]]
        with open_loader(source, LENGTH, **SETTINGS) as loader:
            for mixed, single in zip(own, take(loader, len(own)), strict=True):
                assert torch.equal(mixed.tokens, single.tokens) and torch.equal(mixed.targets, single.targets)
                assert mixed.epochs[number] == single.epochs[0]


@pytest.mark.parametrize(("streams", "world_size"), [(1, 3), (2, 3), (4, 2)])
def test_processes_share_what_one_would_see_and_continue_in_any_number(sources, streams, world_size):
    """The weights change on the way, too, and a position may lie within a round of the streams. With 4 streams each
    process reads its own, with 1 and 2 those of others too.
    """
    settings = {"streams": streams, "weights_after": (0.0, 1.0, 3.0), "change_row": 60}
    with open_mix(sources, batch_size=world_size, **settings) as loader:
        whole = take(loader, 60 // world_size + 20)
    for batches in (7, 60 // world_size + 3):
        states = []
        for rank in range(world_size):
            with open_mix(sources, rank=rank, world_size=world_size, **settings) as loader:
                for batch, global_batch in zip(take(loader, batches), whole, strict=False):
                    assert torch.equal(batch.tokens, global_batch.tokens[rank : rank + 1])
                    assert torch.equal(batch.targets, global_batch.targets[rank : rank + 1])
                    assert batch.sample_index == global_batch.sample_index + rank
                states.append(loader.state_dict())
        state = json.loads(json.dumps(merge_states(states)))
        with open_mix(sources, batch_size=world_size, **settings) as loader:
            take(loader, batches)
            assert loader.state_dict() == merge_states(states)
            loader.load_state_dict(state)
            for batch, expected in zip(take(loader, 15), whole[batches:], strict=False):
                assert torch.equal(batch.tokens, expected.tokens) and torch.equal(batch.targets, expected.targets)
        with open_mix(sources, rank=1, world_size=2, **settings) as loader:
            loader.load_state_dict(state)
            rows = torch.cat([batch.tokens for batch in whole[batches:]])
            assert torch.equal(torch.cat([batch.tokens for batch in take(loader, 5)]), rows[_second_of_two(state)][:5])


def test_a_stream_without_a_row_yet_is_in_its_first_epoch(tmp_path, sources):
    """So that a run tells the epochs that a resumed one does."""
    (tmp_path / "short.jsonl").write_text('{"text": "once"}\n')
    mixed = (f"jsonl:{tmp_path}/short.jsonl", sources[0])
    with open_mix(mixed, (1, 4), streams=4, validation_fraction=0.0) as loader:
        state = loader.state_dict()
        epochs = [batch.epochs for batch in take(loader, 60)]
        loader.load_state_dict(state)
        assert [batch.epochs for batch in take(loader, 60)] == epochs
    assert epochs[-1][0] > 0


def test_the_epoch_of_joined_positions_is_the_lowest():
    states = [{"sources": [{"streams": {str(rank): {}}, "epoch": 3 - rank}]} for rank in range(2)]
    assert merge_states(states)["sources"] == [{"streams": {"0": {}, "1": {}}, "epoch": 2}]


def _second_of_two(state):
    """The rows behind a position that the second of two processes has."""
    return slice((state["sample_index"] + 1) % 2, None, 2)


def test_weights_change_at_a_row_and_count_from_there(sources):
    with open_mix(sources, weights_after=(0.0, 1.0, 1.0), change_row=10) as loader:
        order = letters(take(loader, 30))
    assert [order[:10].count(letter) for letter in "abc"] == [7, 2, 1]
    for end in range(10, 31):
        assert [abs(order[10:end].count(letter) - (end - 10) / 2) < 1 for letter in "bc"] == [True, True]
    assert "a" not in order[10:]


def test_a_resume_may_change_weights_and_add_or_leave_out_sources(sources):
    a, b, c = sources
    rows = {}
    for source in sources:
        with open_loader(source, LENGTH, **SETTINGS) as loader:
            rows[source] = [batch.tokens for batch in take(loader, 40)]

    def check(loader, used, counts):
        """Take as many rows as counted: from each source those behind the used ones."""
        batches = take(loader, sum(counts.values()))
        for number, source in enumerate(sources):
            first = used.get(source, 0)
            own = [b.tokens for b, letter in zip(batches, letters(batches), strict=True) if letter == "abc"[number]]
            expected = rows[source][first : first + counts.get(source, 0)]
            assert len(own) == len(expected) and all(map(torch.equal, own, expected))
        return json.loads(json.dumps(loader.state_dict()))

    with open_loader(a, LENGTH, **SETTINGS) as loader:
        state = check(loader, {}, {a: 4})
    # A run on one source is prolonged on a mix, then with other weights, then without the first source, then on one.
    with open_mix((a, b), (1, 3)) as loader:
        loader.load_state_dict(state)
        state = check(loader, {a: 4}, {a: 3, b: 9})
    with open_mix((a, b), (1, 1)) as loader:
        loader.load_state_dict(state)
        state = check(loader, {a: 7, b: 9}, {a: 4, b: 4})
    with open_mix((c, b), (1, 1)) as loader:
        loader.load_state_dict(state)
        state = check(loader, {b: 13}, {c: 3, b: 3})
    with open_loader(b, LENGTH, **SETTINGS) as loader:
        loader.load_state_dict(state)
        check(loader, {b: 16}, {b: 5})
    with (
        open_loader(a, LENGTH, **SETTINGS) as loader,
        pytest.raises(UserError, match=r"belongs to .*c\.jsonl.*; name a saved source in data\.source too"),
    ):
        loader.load_state_dict(state)
    with open_mix((b, c), (1, 1), seed=3) as loader, pytest.raises(UserError, match=r"data\.seed 1337 -> 3; resume"):
        loader.load_state_dict(state)


def test_files_of_a_mix_that_changed_are_refused_and_moved_ones_are_found(tmp_path, sources):
    (tmp_path / "old").mkdir()
    for name in ("one", "two"):
        (tmp_path / "old" / f"{name}.txt").write_text(f"{name} text " * 200)

    def of(folder):
        return tuple(f"text:{tmp_path}/{folder}/{name}.txt" for name in ("one", "two"))

    with open_mix(of("old"), (1, 1)) as loader:
        take(loader, 4)
        state, expected = loader.state_dict(), take(loader, 4)
    (tmp_path / "old").rename(tmp_path / "new")
    with open_mix(of("new"), (1, 1)) as loader:
        loader.load_state_dict(state)
        assert all(map(same, take(loader, 4), expected))
    (tmp_path / "new").rename(tmp_path / "old")
    (tmp_path / "old" / "two.txt").write_text("more text " * 201)
    with (
        open_mix(of("old"), (1, 1)) as loader,
        pytest.raises(UserError, match=r"two\.txt: the files \(names and sizes\)"),
    ):
        loader.load_state_dict(state)


def test_validation_has_the_rows_of_each_source(sources):
    def read(config):
        sizes = {"sequence_length": LENGTH, "sequences": 6, "at_once": 4, "vocab_size": 257}
        return read_validation(config, tokenizer=make_tokenizer("bytes"), **sizes)

    mixed = read(DataConfig(source=sources, weights=(0, 1, 1), **SETTINGS))
    parts = [read(DataConfig(source=source, **SETTINGS)) for source in sources]
    assert len(mixed) == 6 and all(map(same, mixed, [batch for part in parts for batch in part]))


def test_bad_documents_of_all_sources_are_counted(tmp_path, sources):
    path = tmp_path / "broken.jsonl"
    path.write_text("".join(json.dumps({"text": f"a{i}"} if i % 2 else {"other": i}) + "\n" for i in range(40)))
    with open_mix((sources[2], f"jsonl:{path}"), (1, 1), on_bad_document="skip") as loader:
        take(loader, 40)
        assert len(loader.bad_documents.skipped) == 20


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": ()}, "data.source is an empty list"),
        ({"source": ("builtin", "text:")}, "'text:' lacks its path"),
        ({"source": ("builtin", "builtin")}, "names 'builtin' more than once; give it a larger weight"),
        ({"source": ("builtin", "needle:4")}, "'needle:4' has no text; only sources of text can be mixed"),
        ({"weights": (1, 2, 3)}, "data.weights has 3 numbers, data.source 2 sources"),
        ({"weights": (2, -1)}, "data.weights must not be negative, nor all 0, got 2.0, -1.0"),
        ({"weights": (0, 0)}, "data.weights must not be negative, nor all 0, got 0.0, 0.0"),
        ({"weights_after": (0, 0)}, "data.weights_after must not be negative, nor all 0"),
        ({"change_step": 5}, "data.change_step 5 needs data.weights_after"),
        ({"change_step": -5, "weights_after": (1, 2)}, "and may not be negative"),
        ({"source": "builtin", "weights": (1,)}, "data.weights needs several sources, data.source is 'builtin'"),
        ({"split": ("train", "train", "test")}, "data.split has 3 values, data.source 2; give one, or as many"),
        ({"source": "builtin", "revision": ("a", "b")}, "data.revision has 2 values, data.source 1"),
    ],
)
def test_bad_settings(values, message):
    with pytest.raises(UserError) as caught:
        from_table(RunConfig, {"data": {"source": ("builtin", "text:x")} | values})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_one_file_twice_and_a_source_that_is_empty(tmp_path, sources):
    twice = sources[0].replace("/a.jsonl", "/../" + sources[0].split("/")[-2] + "/a.jsonl")
    with pytest.raises(UserError, match="are the same files; give one of them a larger weight"):
        open_mix((sources[0], twice), (1, 1))
    (tmp_path / "empty.jsonl").write_text("")
    with (
        open_mix((sources[0], f"jsonl:{tmp_path}/empty.jsonl"), (1, 1)) as loader,
        pytest.raises(UserError, match=r"empty\.jsonl.* has no document to train on .* or lower data\.valid"),
    ):
        take(loader, 3)
    with pytest.raises(UserError, match=r"no such file or folder: .*missing"):
        open_mix((sources[0], f"jsonl:{tmp_path}/missing"), (1, 1))


def test_a_config_with_several_sources_is_written_and_read(sources):
    flags = ["--data.source", *sources[:2], "--data.weights", "3,1", "--data.split", "train", "train_sft"]
    config = override(RunConfig(), flags)
    assert (config.data.source, config.data.weights) == (sources[:2], (3.0, 1.0))
    assert [part.split for part in config.data.parts] == ["train", "train_sft"]
    assert config.data.name == f"{sources[0]} + {sources[1]}" and config.data.has_text and config.data.is_local
    assert from_table(RunConfig, tomllib.loads(to_toml(config))) == config
    # Weights belong to the sources that they are given for; a list of one source is that source.
    assert override(config, ["--data.source", *sources[1:], "--data.split", "train"]).data.weights == ()
    assert override(config, {"data.source": [sources[0]], "data.split": "train"}).data.source == sources[0]
    assert config.data.only(sources[1]) == DataConfig(source=sources[1], split="train_sft")
    assert config.data.only("builtin") == DataConfig(source="builtin")
