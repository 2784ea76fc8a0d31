"""The loader: exact state, any number of processes, bounded work ahead, and how it fails."""

import json
import re
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.data import loaders
from tests.data.loaders import same, take
from tests.written_runs import Clock, wait_for
from trifocal.data import DataConfig, Loader, make_tokenizer, prefetch
from trifocal.data.prefetch import Activity
from trifocal.data.reader import make_source
from trifocal.data.sources.base import BadDocuments
from trifocal.data.sources.text import JsonlSource
from trifocal.data.stream import DocumentStream, Position, in_validation
from trifocal.errors import UserError
from trifocal.nn.context import ContextShard

TOKENIZER = make_tokenizer("bytes")
TEXTS = [f"{file} {line} " + "abc " * (line * 7 % 23) for file in range(3) for line in range(37)]
DEFAULTS = {"shuffle_documents": 8, "shuffle_sequences": 20, "validation_fraction": 0.1}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Three files of documents; an epoch is about 6,000 tokens."""
    folder = tmp_path_factory.mktemp("lines")
    for file in range(3):
        lines = [json.dumps({"text": text}) for text in TEXTS[37 * file : 37 * file + 37]]
        (folder / f"{file}.jsonl").write_text("\n".join(lines))
    return f"jsonl:{folder}"


def open_loader(source, *, length=48, batch_size=2, **settings):
    return loaders.open_loader(source, length, batch_size, **DEFAULTS | settings)


@pytest.fixture(scope="module")
def uninterrupted(source):
    with open_loader(source) as loader:
        batches = take(loader, 150)
    assert min(batches[-1].epochs) >= 1
    return batches


def test_a_running_loader_can_be_set_back(source, uninterrupted):
    with open_loader(source) as loader:
        start = loader.state_dict()
        take(loader, 9)
        loader.load_state_dict(start)
        assert all(map(same, take(loader, 9), uninterrupted))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_processes_that_share_rows_get_their_chunks(source, uninterrupted, batch_size):
    """Rows laid end to end are cut; a row of several begins a document. The position is that of one process."""
    shards = [ContextShard(rank, 2, list) for rank in range(2)]
    with open_loader(source, batch_size=batch_size) as loader:
        whole, position = [next(loader) for _ in range(40)], loader.state_dict()
    assert any(batch.cu_seqlens is None for batch in whole)
    for shard in shards:
        with open_loader(source, batch_size=batch_size, local_tokens=shard.local_tokens) as loader:
            for batch in whole:
                mine = next(loader)
                assert torch.equal(mine.rows, batch.tokens) and mine.tokens.shape == (1, batch_size * 24)
                assert torch.equal(mine.tokens, shard.local_tokens(batch.tokens.view(1, -1)))
                assert torch.equal(mine.targets, shard.local_tokens(batch.targets.view(1, -1)))
                assert mine[3:-1] == batch[3:-1]
                borders = batch.cu_seqlens
                if borders is None and batch_size > 1:
                    borders = torch.tensor([0, 48, 96])
                assert (mine.cu_seqlens is None) == (borders is None)
                assert borders is None or mine.cu_seqlens.tolist() == borders.tolist()
            assert loader.state_dict() == position


def test_a_process_opens_only_the_files_of_its_own_streams(source, monkeypatch):
    opened = []
    healthy = JsonlSource.read

    def read(self, shard, cursor):
        opened.append(shard)
        return healthy(self, shard, cursor)

    monkeypatch.setattr(JsonlSource, "read", read)
    found = []
    for rank in (0, 1):
        opened.clear()
        # The first epoch: three files are dealt to two kinds of streams.
        with open_loader(source, streams=4, rank=rank, world_size=2, shuffle_sequences=1, prefetch_batches=1) as loader:
            take(loader, 4)
        found.append(set(opened))
    assert found[0] and found[1] and not found[0] & found[1]


@pytest.mark.parametrize("streams", [1, 3, 7])
def test_streams_share_out_every_document(source, streams):
    """In each of its epochs a stream has its part: together they have all, each once."""
    names = Counter()
    opened, _ = make_source(DataConfig(source=source), Activity(), "train", BadDocuments())
    for part in range(streams):
        documents = DocumentStream(
            opened, TOKENIZER, longest_chat=1, validation=False, validation_fraction=0.1, seed=3,
            block_documents=8, activity=Activity(), part=part, parts=streams,
        )  # fmt: skip
        for document in documents.read(Position()):
            if document.position.epoch:
                break
            names[document.id] += 1
    assert set(names.values()) == {1}
    assert len(names) == 111 - sum(in_validation(text, 0.1) for text in TEXTS)


def test_one_process_of_several_streams_cannot_continue_without_the_others(source):
    with open_loader(source, streams=4, rank=0, world_size=2) as loader:
        next(loader)
        state = loader.state_dict()
    with open_loader(source, streams=4) as loader, pytest.raises(ValueError, match=r"lacks streams \[1, 3\]"):
        loader.load_state_dict(state)


def test_synthetic_tokens_are_drawn_alike_and_predict_the_next():
    with open_loader("synthetic", length=512) as loader:
        batches = take(loader, 6)
    assert torch.equal(batches[0].tokens[:, 1:], batches[0].targets[:, :-1])
    counts = torch.bincount(torch.cat([b.tokens.reshape(-1) for b in batches]), minlength=257)
    # 6,144 draws over 257 tokens: every mean of 24 within six standard deviations.
    assert len(counts) == 257 and abs(counts - 6144 / 257).max() < 6 * (6144 / 257) ** 0.5


def test_other_data_settings_refuse_the_state(source):
    with open_loader(source) as loader:
        state = loader.state_dict()
    for key, value in {"seed": 1, "shuffle_sequences": 21, "length": 64, "validation_fraction": 0.2}.items():
        name = "train.sequence_length" if key == "length" else f"data.{key}"
        with (
            open_loader(source, **{key: value}) as loader,
            pytest.raises(UserError, match=rf"data position belongs to .*: {re.escape(name)} \S+ -> \S+; resume"),
        ):
            loader.load_state_dict(state)
    with open_loader(source, split="validation") as loader, pytest.raises(UserError, match="split train -> validation"):
        loader.load_state_dict(state)


def test_other_files_refuse_the_state(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some text " * 50)
    with open_loader(f"text:{path}", validation_fraction=0.0) as loader:
        state = loader.state_dict()
    path.write_text("other text " * 51)
    with open_loader(f"text:{path}", validation_fraction=0.0) as loader:
        with pytest.raises(UserError, match=r"to text:.*a\.txt: the files \(names and sizes\) \w+ -> \w+; bring back"):
            loader.load_state_dict(state)
        with pytest.raises(UserError, match=r"version 2, expected 5: continue with the version"):
            loader.load_state_dict(state | {"version": 2})


def test_work_ahead_is_bounded(source, monkeypatch):
    made, depth = [], 3
    original = Loader._produce

    def counted(self):
        made.append(None)
        return original(self)

    monkeypatch.setattr(Loader, "_produce", counted)
    with open_loader(source, prefetch_batches=depth) as loader:
        for taken in (1, 2, 3):
            next(loader)
            wait_for(lambda taken=taken: len(made) >= taken + depth)
            time.sleep(0.05)
            # The queue is full and one batch more waits for room.
            assert len(made) <= taken + depth + 1


def broken_read(self, shard, cursor):
    raise ZeroDivisionError("a bug in a source")
    yield


def test_an_error_in_the_thread_reaches_the_consumer(source, monkeypatch):
    monkeypatch.setattr(JsonlSource, "read", broken_read)
    with open_loader(source) as loader:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ZeroDivisionError: a bug in a source") as info:
                next(loader)
            cause = info.value.__cause__
            assert isinstance(cause, ZeroDivisionError)
            assert traceback.extract_tb(cause.__traceback__)[-1].name == "broken_read"


def test_good_batches_before_a_bad_line_are_given_and_the_error_keeps_its_kind(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "%s"}\nbroken\n' % ("x" * 95))
    with open_loader(f"jsonl:{path}", validation_fraction=0.0, shuffle_documents=1, shuffle_sequences=1) as loader:
        assert next(loader).tokens.numel() == 96
        with pytest.raises(UserError, match=r"a\.jsonl:2: not JSON") as info:
            next(loader)
        assert isinstance(info.value.__cause__, UserError)


def test_epochs_do_not_go_back_after_a_resume(source):
    """Of the streams without a row since then, the saved epoch counts."""
    settings = {"streams": 4, "batch_size": 1}
    with open_loader(source, **settings) as loader:
        steps = [(loader.state_dict(), next(loader).epochs) for _ in range(600)]
    assert steps[-1][1] > (1,)
    for state, epochs in steps[::7]:
        with open_loader(source, **settings) as loader:
            loader.load_state_dict(state)
            assert epochs[0] - 1 <= next(loader).epochs[0] <= epochs[0]


class Blocked:
    """Reading that hangs until it is let go."""

    def __init__(self, monkeypatch):
        self.release = threading.Event()
        original = JsonlSource.read

        def read(source, shard, cursor):
            self.release.wait(20)
            yield from original(source, shard, cursor)

        monkeypatch.setattr(JsonlSource, "read", read)


def test_a_stall_is_reported_while_it_lasts_and_then_passes(source, monkeypatch):
    blocked = Blocked(monkeypatch)
    reports = []

    def on_stall(age, activity):
        reports.append((age, activity))
        if len(reports) == 3:
            blocked.release.set()

    monkeypatch.setattr(prefetch, "STALL_SECONDS", 0.05)
    with open_loader(source, on_stall=on_stall) as loader:
        next(loader)
    assert len(reports) == 3
    for number, (age, activity) in enumerate(reports, start=1):
        assert age >= 0.05 * number
        assert activity.startswith("reading jsonl:")
    assert loader.latency()[1] >= 0.15


def test_the_activity_is_that_of_the_work_at_hand():
    """Reading, not the wait for the trainer before it."""
    activity, seen = Activity(), []

    def produce():
        seen.append(activity.text)
        activity.text = f"reading {len(seen)}"
        return len(seen)

    prefetcher = prefetch.Prefetcher(produce, depth=1, activity=activity, on_stall=lambda *_: None)
    assert [prefetcher.get() for _ in range(3)] == [1, 2, 3]
    prefetcher.close()
    assert seen[:3] == ["starting", "reading 1", "reading 2"]


def test_a_stall_past_the_limit_is_an_error(source, monkeypatch, caplog):
    blocked = Blocked(monkeypatch)
    monkeypatch.setattr(prefetch, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(prefetch, "STALL_LIMIT_SECONDS", 0.2)
    with open_loader(source) as loader:
        with pytest.raises(UserError, match=r"data stall: no batch for 0 s; .* reading jsonl:"):
            next(loader)
        blocked.release.set()
    assert "data stall: no batch for" in caplog.text


def test_while_the_process_is_stopped_nobody_waits_for_data(source, monkeypatch):
    """As after Ctrl-Z for more than half an hour: the wait goes on, and its data come."""
    blocked, clock = Blocked(monkeypatch), Clock()
    monkeypatch.setattr(prefetch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(time, "monotonic", clock)

    def stopped_and_continued():
        clock.pass_seconds(10_000)
        blocked.release.set()
        return False

    with open_loader(source, on_stall=pytest.fail, interrupted=stopped_and_continued) as loader:
        next(loader)


def test_a_wait_can_be_interrupted_and_loses_nothing(source, monkeypatch):
    with open_loader(source) as loader:
        expected = next(loader)
    blocked = Blocked(monkeypatch)
    with open_loader(source, interrupted=lambda: True) as loader:
        with pytest.raises(prefetch.Stopped):
            next(loader)
        blocked.release.set()
        while loader._prefetcher._queue.empty():
            time.sleep(0.01)
        # Nor is a batch that is there held back.
        assert same(next(loader), expected)


def test_closing_ends_the_thread_and_the_loader(source):
    before = threading.active_count()
    loader = open_loader(source)
    next(loader)
    assert threading.active_count() == before + 1
    loader.close()
    assert threading.active_count() == before
    loader.close()
    assert loader.state_dict()["sample_index"] == 2
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def test_a_closed_loader_leaves_no_file_open(source, monkeypatch):
    """An open one would be closed at the interpreter's end, with a traceback."""
    files = []
    open_path = Path.open
    monkeypatch.setattr(Path, "open", lambda *arguments: files.append(open_path(*arguments)) or files[-1])
    with open_loader(source, prefetch_batches=1) as loader:
        next(loader)
    assert files and all(file.closed for file in files)
