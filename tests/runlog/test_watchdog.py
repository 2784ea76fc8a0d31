"""Dumps: one for each stall, with the stacks of every rank."""

import contextlib
import json

from tests.written_runs import Clock, wait_for
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.runlog.jsonl import JsonLinesWriter
from trifocal.runlog.stalls.watchdog import Watchdog


def test_a_healthy_run_that_is_asked_says_that_nothing_is_stuck_and_continues(tmp_path):
    heartbeat = Heartbeat(tmp_path / "heartbeat", rank=2, interval_seconds=0.05)
    rows = []
    with heartbeat, Watchdog(heartbeat, tmp_path) as watchdog:
        heartbeat.observers.append(rows.append)
        with heartbeat.phase("data"):
            pass
        with heartbeat.phase("data"):
            # A dump has the row that saw the request, which may have been begun before it.
            wait_for(lambda: bool(rows) and rows[-1]["phase"] == "data")
            watchdog.ask()
            wait_for(lambda: any(tmp_path.glob("dumps/asked_*/summary.md")))
    (summary,) = tmp_path.glob("dumps/asked_*/summary.md")
    text = summary.read_text()
    assert "Nothing is stuck: every rank is making progress." in text
    assert "- Rank 2 was in data for 0:00 (usually " in text
    stacks = (summary.parent / "stacks_rank2.txt").read_text()
    assert "Thread MainThread" in stacks and "in test_a_healthy_run_that_is_asked" in stacks
    assert "Thread trifocal-heartbeat" in stacks and "heartbeat.py" in stacks, "of every thread"


def test_one_dump_a_stall_and_a_new_one_for_the_next(tmp_path):
    sentences = []
    clock = Clock()
    # Its thread is not started: the test beats.
    heartbeat = Heartbeat(tmp_path / "heartbeat", minimum_stall_seconds=120.0, clock=clock)

    def stay(seconds):
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


def test_every_rank_adds_its_stacks_to_anothers_dump(tmp_path):
    healthy = Heartbeat(tmp_path / "heartbeat", 1, interval_seconds=0.05)
    stuck = Heartbeat(tmp_path / "heartbeat", 0, interval_seconds=0.05, minimum_stall_seconds=0.2)
    with healthy, Watchdog(healthy, tmp_path), stuck, Watchdog(stuck, tmp_path):
        with stuck.phase("backward"):
            pass
        with stuck.phase("backward"):
            wait_for(lambda: len(list(tmp_path.glob("dumps/stalled_*/stacks_rank*.txt"))) == 2)
    (summary,) = tmp_path.glob("dumps/stalled_*/summary.md")
    assert "| 1 | running |" in summary.read_text()


def test_ranks_that_are_all_asked_make_one_dump(tmp_path):
    """As by a scheduler, which signals every process."""
    heartbeats = [Heartbeat(tmp_path / "heartbeat", rank) for rank in range(3)]
    with contextlib.ExitStack() as stack:
        watchdogs = [stack.enter_context(Watchdog(heartbeat, tmp_path)) for heartbeat in heartbeats]
        for watchdog in watchdogs:
            watchdog.ask()
        for watchdog, heartbeat in 2 * [*zip(watchdogs, heartbeats, strict=True)]:
            watchdog.observe(heartbeat.snapshot())
        wait_for(lambda: len(list(tmp_path.glob("dumps/*/rank*.json"))) == 3)
    (folder,) = (path for path in (tmp_path / "dumps").iterdir() if path.is_dir())
    assert len(list(folder.glob("stacks_rank*.txt"))) == 3


def test_a_pause_is_no_stall_and_no_time_of_a_phase(tmp_path, caplog, monkeypatch):
    """As after Ctrl-Z: the training thread or the heartbeat's may be the first that runs again."""
    clock, said = Clock(), []
    heartbeat = Heartbeat(tmp_path / "heartbeat", clock=clock)
    # A line may be shown beside a bar, which is drawn anew.
    monkeypatch.setattr(caplog.handler, "format", lambda record: str(heartbeat.seconds_run()))
    writer = JsonLinesWriter(tmp_path / "rows.jsonl")
    with Watchdog(heartbeat, tmp_path, on_stall=said.append), writer:
        for beats_first in (True, False):
            for seconds in (1.0, 5000.0, 1.0):
                with heartbeat.phase("backward"):
                    heartbeat._beat(writer, "running")
                    clock.pass_seconds(seconds)
                    if beats_first:
                        heartbeat._beat(writer, "running")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert not said
    assert {row["stall_limit_seconds"] for row in rows[1:]} <= {None, 120.0}
    assert rows[-1]["total_seconds"]["backward"] == 3.0
    assert heartbeat.seconds_run() == clock.now - 10_000.0
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "rank 0: nothing ran for 1:23:20"
    ] * 2
