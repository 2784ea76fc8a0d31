"""Lost processes, found by the notes in the common store. The processes here never trained."""

import json
import os
import socket
import subprocess
import time

import pytest
import torch.distributed as dist

from tests.written_runs import Clock, wait_for
from trifocal.distributed import peers as module
from trifocal.distributed.peers import PeerLost, PeerMonitor
from trifocal.distributed.processes import DistributedContext
from trifocal.errors import UserError
from trifocal.runlog.proc import process_state
from trifocal.train.coordinator import _exists as exists

WHAT = {"step": 7, "phase": "forward", "phase_seconds": 1.0, "where": "forward (block.py:1)"}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.2)
    # There is no group: the processes here do not meet.
    monkeypatch.setattr(DistributedContext, "sum", lambda self, values: list(values))


@pytest.fixture
def store():
    return dist.HashStore()


def note(store, rank, beat, **values):
    """A note as another process leaves it."""
    row = {"beat": beat, "status": "running", "message": "", "pid": os.getpid(), "host": socket.gethostname()}
    store.set(f"rank{rank}", json.dumps({**row, "time": float(beat), **WHAT, **values}))


def watched(store, size=2, seconds=0.6):
    sentences = []
    statuses = []
    peers = PeerMonitor(
        DistributedContext(0, size, store=store),
        lambda: dict(WHAT),
        exists,
        silence_seconds=seconds,
        on_lost=sentences.append,
        leave=statuses.append,
    )
    return peers, sentences, statuses


def test_a_process_that_is_gone_is_named_and_this_one_ends(store, sleeper, capfd):
    note(store, 1, 1, pid=sleeper.pid)
    peers, sentences, statuses = watched(store, seconds=60)
    with peers:
        time.sleep(0.3)
        assert not statuses
        # A zombie until this process looks at it: gone all the same.
        sleeper.kill()
        wait_for(lambda: statuses)
    assert statuses == [1]
    seen = "last seen in forward for 1 s at step 7, forward (block.py:1)"
    expected = f"rank 1 (process {sleeper.pid}) is gone, {seen}; rank 0 stops too"
    assert sentences == [expected]
    assert expected in capfd.readouterr().err


def test_a_silent_process_is_named(store):
    note(store, 1, 1)
    peers, sentences, statuses = watched(store)
    with peers:
        wait_for(lambda: statuses)
    assert sentences[0].startswith(f"rank 1 (process {os.getpid()} on {socket.gethostname()}) has been silent for")


def test_the_time_in_which_this_process_was_stopped_is_no_silence_of_the_others(store, monkeypatch):
    """A group is stopped, and this process is the first that continues."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    note(store, 1, 1)
    peers, _, _ = watched(store, seconds=20)
    assert peers._look() is None
    clock.pass_seconds(5000.0)
    assert peers._look() is None
    clock.pass_seconds(0.05)
    note(store, 1, 2)
    assert peers._look() is None
    for _ in range(500):
        clock.pass_seconds(0.05)
        sentence = peers._look()
    assert "has been silent for 25 s" in sentence


def test_a_process_never_seen_here_is_not_gone(store):
    """Two containers may have one host name and not see each other's processes."""
    note(store, 1, 1, pid=2**22 + 1)
    peers, _, statuses = watched(store, seconds=60)
    with peers:
        time.sleep(0.5)
    assert not statuses


def test_signs_of_life_and_an_end_are_no_loss(store):
    note(store, 1, 1)
    note(store, 2, 1, status="finished")
    peers, _, statuses = watched(store, size=3)
    with pytest.raises(UserError), peers:
        for beat in range(2, 12):
            note(store, 1, beat)
            time.sleep(0.1)
        raise UserError("bad\ndata")
    assert not statuses
    last = json.loads(store.get("rank0"))
    assert (last["status"], last["message"]) == ("failed", "UserError: bad data")


def test_who_went_without_a_word_comes_before_those_who_failed_because_of_it(store, sleeper):
    note(store, 1, 1, status="failed", message="ValueError: late", time=20.0)
    note(store, 2, 1, status="failed", message="ValueError: early", time=10.0)
    note(store, 3, 1, pid=sleeper.pid)
    peers, _, _ = watched(store, size=4, seconds=60)
    with peers:
        lost = peers.explain()
        assert str(lost) == "rank 2 has failed: ValueError: early; rank 0 stops too"
        sleeper.kill()
        wait_for(lambda: process_state(sleeper.pid) == "Z")
        lost = peers.explain()
    assert isinstance(lost, PeerLost)
    assert "rank 3" in str(lost) and "is gone" in str(lost)


def test_who_went_first_is_named_when_others_have_followed(store, sleeper):
    """The others end because of it, the lower ranks among them before this one."""
    follower = subprocess.Popen(["sleep", "600"])
    try:
        note(store, 1, 1, pid=follower.pid)
        note(store, 2, 1, pid=sleeper.pid)
        peers, _, _ = watched(store, size=3, seconds=60)
        with peers:
            for process in (sleeper, follower):
                process.kill()
                wait_for(lambda process=process: process_state(process.pid) == "Z")
                assert str(peers.explain()).startswith(f"rank 2 (process {sleeper.pid}) is gone")
            # It had ended well, and its last note comes late.
            note(store, 2, 2, status="finished")
            assert str(peers.explain()).startswith(f"rank 1 (process {follower.pid}) is gone")
    finally:
        follower.kill()
        follower.wait()


def test_a_request_to_another_process_to_stop_is_known_here(store):
    asked = []
    peers = PeerMonitor(
        DistributedContext(0, 2, store=store),
        lambda: WHAT | {"stop": True},
        exists,
        on_stop=lambda: asked.append("stop"),
    )
    for stop in (False, True):
        assert not asked
        note(store, 1, 1, stop=stop)
        peers._look()
    assert asked == ["stop"] and json.loads(store.get("rank0"))["stop"]


def test_nobody_is_blamed_while_all_are_well(store):
    note(store, 1, 1)
    peers, _, statuses = watched(store, seconds=0.4)
    stop = time.monotonic() + 0.9
    beats = iter(range(2, 1000))
    healthy = peers._exchange

    def exchange(now):
        note(store, 1, next(beats))
        healthy(now)

    peers._exchange = exchange
    with peers:
        assert peers.explain() is None
        assert time.monotonic() > stop - 0.6
        assert peers.table() == "rank 1: forward for 1 s at step 7, forward (block.py:1)"
    assert not statuses
