"""Stalls made on purpose in real processes: an endless loop is stalled, a sleep is slow, a first step is neither."""

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.children import environment
from tests.written_runs import Clock, wait_for
from trifocal.runlog import Heartbeat, Watchdog
from trifocal.runlog.jsonl import Row, read_lines
from trifocal.runlog.run import read_run
from trifocal.runlog.stalls.verdict import judge

TRAINING = """
import sys, time, torch
from trifocal.runlog import Heartbeat, MetricsWriter, Watchdog

run, fault = sys.argv[1], sys.argv[2]

def endless_hook(gradient):
    while fault == "loop" and step == 3:
        sum(range(1000))
    if fault == "sleep" and step == 3:
        time.sleep(600)
    return gradient

weight = torch.nn.Parameter(torch.ones(4, 4))
weight.register_hook(endless_hook)
with MetricsWriter(run + "/metrics.jsonl") as metrics, Heartbeat(
    run + "/heartbeat", interval_seconds=0.1, minimum_stall_seconds=1.5 if fault == "loop" else 300
) as heartbeat, Watchdog(heartbeat, run, on_stall=lambda text: metrics.event(step, "stalled", text)):
    for step in range(1, 10**9):
        with heartbeat.phase("forward"):
            time.sleep(2 if fault == "sleep" and step == 1 else 0.02)
            loss = (weight @ weight).sum()
        with heartbeat.phase("backward"):
            loss.backward()
        metrics.write("train", step, loss=loss.item())
        heartbeat.update(step=step, loss=loss.item())
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str], Any]:
    """Starts a training process with a fault in it, writing to tmp_path/run."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAINING))

    def begin(fault: str) -> Any:
        command = [sys.executable, str(script), str(tmp_path / "run"), fault]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return warm.popen(command, env=environment(OMP_NUM_THREADS=1), **quiet)

    return begin


def state_of(run: Path) -> str:
    path = run / "heartbeat" / "rank0.jsonl"
    rows = read_lines(path) if path.exists() else []
    return judge(rows[-1]).state if rows else ""


def test_an_endless_loop_in_a_hook_is_stalled_and_the_summary_names_it(
    start: Callable[[str], Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start("loop")
    try:
        wait_for(lambda: state_of(run) == "stalled")
        wait_for(lambda: any(run.glob("dumps/stalled_*/summary.md")))
        wait_for(lambda: bool(read_run(run).of_kind("event")))
        reason = judge(read_run(run).heartbeats[0][-1]).reason
    finally:
        process.kill()
        process.wait()
    assert "in backward" in reason and "endless_hook" in reason
    (folder,) = run.glob("dumps/stalled_*")
    summary = (folder / "summary.md").read_text()
    assert summary.startswith("# Rank 0 is stalled in backward for 0:0")
    assert "endless_hook (train.py:" in summary and "| 0 | stalled | 2 |" in summary
    assert "- Hint: Look for a hook" in summary and "Nothing is" not in summary
    assert "| 2 | 64 | unknown |" in summary, "the last metrics"
    assert "endless_hook" in (folder / "stacks_rank0.txt").read_text()
    assert [row["name"] for row in read_run(run).of_kind("event")] == ["stalled"]
    wait_for(lambda: judge(read_run(run).heartbeats[0][-1], time.time() + 60).state == "dead")


def test_a_long_first_step_is_neither_and_a_sleep_is_slow_and_leaves_no_dump(
    start: Callable[[str], Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start("sleep")
    try:
        wait_for(lambda: state_of(run) == "slow")
        beats = read_run(run).heartbeats[0]
        reason = judge(beats[-1]).reason
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: any(run.glob("dumps/asked_*/summary.md")))
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    first = [row for row in beats if row["phase"] == "forward" and row["expected_phase_seconds"] is None]
    assert max(row["phase_seconds"] for row in first) > 1
    verdicts = [judge(row, row["unix_time_seconds"]) for row in first]
    assert {verdict.state for verdict in verdicts} == {"running"}
    assert all(verdict.reason.startswith("first forward for 0:0") for verdict in verdicts)
    assert "in backward" in reason and "times its median" in reason and "endless_hook" in reason
    assert not list(run.glob("dumps/stalled_*"))
    (folder,) = run.glob("dumps/asked_*")
    assert "endless_hook" in (folder / "stacks_rank0.txt").read_text()
    assert (folder / "summary.md").read_text().startswith("# Rank 0 was asked for its stacks")


def test_a_healthy_run_that_is_asked_says_that_nothing_is_stuck(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat", interval_seconds=0.05)
    rows: list[Row] = []
    with heartbeat, Watchdog(heartbeat, tmp_path):
        heartbeat.observers.append(rows.append)
        with heartbeat.phase("data"):
            pass
        with heartbeat.phase("data"):
            # A dump has the row that saw the request, which may have been begun before it.
            wait_for(lambda: bool(rows) and rows[-1]["phase"] == "data")
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_for(lambda: any(tmp_path.glob("dumps/asked_*/summary.md")))
    (summary,) = tmp_path.glob("dumps/asked_*/summary.md")
    text = summary.read_text()
    assert "Nothing is: the rank goes on." in text and "Hint" not in text
    assert "- Rank 0 was in data for 0:00 (usually " in text and "None yet." in text


def test_one_dump_a_stall_and_a_new_one_for_the_next(tmp_path: Path) -> None:
    sentences: list[str] = []
    clock = Clock()
    # Its thread is not started: the test beats.
    heartbeat = Heartbeat(tmp_path / "heartbeat", minimum_stall_seconds=120.0, clock=clock)

    def stay(seconds: int) -> None:
        with heartbeat.phase("data"):
            for _ in range(seconds):
                clock.pass_seconds(1.0)
                watchdog.observe(heartbeat.snapshot())

    with Watchdog(heartbeat, tmp_path, on_stall=sentences.append) as watchdog:
        for seconds in (1, 1, 1, 1, 1):
            stay(seconds)
        stay(130)
        assert len(sentences) == 1
        # The limit has learned from the stall: twice its longest time.
        stay(260)
        assert len(sentences) == 1
        stay(521)
        assert len(sentences) == 2
    assert sentences[0].startswith("rank 0 is stalled in data for 2:01 (usually 1 s, limit 120 s)")
    assert sentences[1].startswith("rank 0 is stalled in data for 8:41 (usually 1 s, limit 520 s)")
    assert not (tmp_path / "dumps" / "stacks_rank0.txt").exists()


def test_no_timer_is_left_that_would_write_into_a_closed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat's thread may still be looking at its last row: here, just before the file is closed."""
    calls: list[str] = []
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, **__: calls.append("set"))
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: calls.append("cancelled"))
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    row = heartbeat.snapshot()
    with Watchdog(heartbeat, tmp_path) as watchdog:
        close = watchdog._stacks.close
        monkeypatch.setattr(watchdog._stacks, "close", lambda: (watchdog.observe(row), close()))
    assert calls == ["set", "cancelled"]


def test_every_rank_adds_its_stacks_to_anothers_dump(tmp_path: Path) -> None:
    healthy = Heartbeat(tmp_path / "heartbeat", 1, interval_seconds=0.05)
    stuck = Heartbeat(tmp_path / "heartbeat", 0, interval_seconds=0.05, minimum_stall_seconds=0.2)
    with healthy, Watchdog(healthy, tmp_path), stuck, Watchdog(stuck, tmp_path):
        with stuck.phase("backward"):
            pass
        with stuck.phase("backward"):
            wait_for(lambda: len(list(tmp_path.glob("dumps/stalled_*/stacks_rank*.txt"))) == 2)
    (summary,) = tmp_path.glob("dumps/stalled_*/summary.md")
    assert "| 1 | running |" in summary.read_text()


def test_ranks_that_stall_at_the_same_moment_share_one_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, both = Watchdog._answer_other_ranks, threading.Barrier(2)
    sentences: list[str] = []
    clock = Clock()

    def looked_together(watchdog: Watchdog, row: Row) -> None:
        answer(watchdog, row)
        if row["phase_seconds"] > row["stall_limit_seconds"] and watchdog not in looked:
            # Each rank has looked for dumps before the other begins one.
            looked.append(watchdog)
            both.wait(30)

    looked: list[Watchdog] = []

    def stall(rank: int) -> None:
        heartbeat = Heartbeat(tmp_path / "heartbeat", rank, minimum_stall_seconds=120.0, clock=clock)
        with Watchdog(heartbeat, tmp_path, on_stall=sentences.append) as watchdog:
            with heartbeat.phase("backward"):
                pass
            with heartbeat.phase("backward"):
                row = heartbeat.snapshot()
                watchdog.observe(row | {"phase_seconds": 121.0, "stall_limit_seconds": 120.0})

    monkeypatch.setattr(Watchdog, "_answer_other_ranks", looked_together)
    ranks = [threading.Thread(target=stall, args=(rank,)) for rank in (0, 1)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    (folder,) = tmp_path.glob("dumps/stalled_*")
    assert [text.rpartition("see ")[2] for text in sentences] == [str(folder / "summary.md")] * 2
    assert sorted(path.name for path in folder.glob("stacks_rank*")) == ["stacks_rank0.txt", "stacks_rank1.txt"]


def test_stacks_are_written_even_while_c_code_holds_the_interpreters_lock(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat", interval_seconds=0.05, minimum_stall_seconds=0.4)
    rows: list[Row] = []
    with heartbeat, Watchdog(heartbeat, tmp_path):
        heartbeat.observers.append(rows.append)
        wait_for(lambda: bool(rows))
        # PyDLL, unlike CDLL, keeps the lock: no thread of Python's can run, the heartbeat's neither.
        ctypes.PyDLL(None).usleep(900_000)
        text = (tmp_path / "dumps" / "stacks_rank0.txt").read_text()
    assert "test_stacks_are_written_even_while" in text
