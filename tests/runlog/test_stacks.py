"""Stacks on a signal and in one line."""

import gc
import os
import signal
import threading
import weakref
from pathlib import Path

import pytest
import torch
from tests.written_runs import wait_for

from trifocal.runlog import Heartbeat, StackDump, Watchdog
from trifocal.runlog.stacks import running_threads, where


def wait_here(started: threading.Event, stop: threading.Event) -> None:
    started.set()
    stop.wait()


def test_a_signal_writes_every_threads_stack_and_the_run_goes_on(tmp_path: Path) -> None:
    started, stop = threading.Event(), threading.Event()
    other = threading.Thread(target=wait_here, args=(started, stop))
    other.start()
    started.wait()
    with StackDump(tmp_path / "dumps", rank=2) as dump:
        os.kill(os.getpid(), signal.SIGUSR1)
        # Faulthandler writes it line by line.
        wait_for(lambda: "wait_here" in dump.path.read_text() and "most recent call first" in dump.path.read_text())
        text = dump.path.read_text()
    stop.set()
    other.join()
    assert dump.path.name == "stacks_rank2.txt"
    assert "test_a_signal_writes_every_threads_stack" in text and "wait_here" in text


def test_no_file_is_left_when_nobody_asked(tmp_path: Path) -> None:
    with StackDump(tmp_path / "dumps"):
        pass
    assert list(tmp_path.rglob("*")) == [tmp_path / "dumps"]


def test_where_names_the_innermost_frames_of_another_thread() -> None:
    older = running_threads()
    started, stop = threading.Event(), threading.Event()
    other = threading.Thread(target=wait_here, args=(started, stop))
    other.start()
    started.wait()
    assert other.ident is not None
    wait_for(lambda: where(other.ident or 0, others=older)[0].startswith("wait (threading.py:"))
    place, compiling = where(other.ident, depth=3, others=older)
    stop.set()
    other.join()
    assert place.startswith("wait (threading.py:") and "wait_here (test_stacks.py:" in place
    assert not compiling


@pytest.fixture
def no_garbage_collector():
    """Circles of references stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_look_holds_no_tensor_of_the_frames_that_it_saw(no_garbage_collector: None, tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat", interval_seconds=0.01)
    rows: list[object] = []
    seen = threading.Event()

    def observe(row: object) -> None:
        rows.append(row)
        seen.set()

    def backward() -> "weakref.ref[torch.Tensor]":
        tile = torch.ones(1000)
        for _ in range(3):
            seen.clear()
            assert seen.wait(10)
        heartbeat.snapshot()
        return weakref.ref(tile)

    with heartbeat, Watchdog(heartbeat, tmp_path), heartbeat.phase("backward"):
        heartbeat.observers.append(observe)
        tile = backward()
        assert any("backward (test_stacks.py:" in str(row) for row in rows), "it was seen"
        seen.clear()
        assert seen.wait(10)
        assert tile() is None
