"""The heartbeat with real threads, files and busy C code."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.written_runs import Clock, wait_for
from trifocal.runlog import heartbeat as heartbeat_module
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.runlog.jsonl import read_lines


def rows_of(folder, rank=0):
    return read_lines(folder / f"rank{rank}.jsonl")


def test_phases_learn_what_to_expect(tmp_path):
    clock = Clock()
    heartbeat = Heartbeat(tmp_path, minimum_stall_seconds=0.01, clock=clock)
    assert heartbeat.snapshot()["phase"] == "start"
    for seconds in (0.5, 2.0, 1.0):
        with heartbeat.phase("data"):
            clock.pass_seconds(seconds)
    assert heartbeat.snapshot()["phase"] == "other"
    with heartbeat.phase("data"):
        clock.pass_seconds(0.25)
        row = heartbeat.snapshot()
    assert (row["expected_phase_seconds"], row["stall_limit_seconds"]) == (1.0, 10.0)
    assert (row["phase_seconds"], row["total_seconds"]["data"]) == (0.25, 3.75)


def test_no_limit_before_a_phase_has_ended_once_nor_at_start_or_compile(tmp_path):
    with Heartbeat(tmp_path, interval_seconds=60) as heartbeat:
        with heartbeat.phase("forward"):
            assert heartbeat.snapshot()["stall_limit_seconds"] is None
        for _ in range(2):
            with heartbeat.phase("compile"):
                assert heartbeat.snapshot()["stall_limit_seconds"] is None
        with heartbeat.phase("forward"):
            assert heartbeat.snapshot()["stall_limit_seconds"] == 120


def look_here():
    """What another thread sees of this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(heartbeat_module.where, threading.get_ident(), 20).result()


def test_a_compiler_is_seen_on_the_stack():
    made = {}
    exec(compile("def convert(look): return look()", "/x/torch/_dynamo/convert_frame.py", "exec"), made)
    place, compiling = look_here()
    assert not compiling and "look_here (test_heartbeat.py:" in place
    place, compiling = made["convert"](look_here)
    assert compiling and " < convert (convert_frame.py:1) < " in place


class Collector:
    """Stands in for `gc`."""

    def __init__(self, enabled):
        self.enabled = enabled

    def isenabled(self):
        return self.enabled

    def enable(self):
        self.enabled = True

    def disable(self):
        self.enabled = False


@pytest.mark.parametrize(("version", "enabled"), [((3, 11), True), ((3, 11), False), ((3, 12), True)])
def test_no_garbage_is_collected_while_frames_of_other_threads_are_read(monkeypatch, version, enabled):
    """Python 3.11 would do so while it makes the object of a frame; later versions between instructions only."""
    collector = Collector(enabled)
    seen = []

    class Frame:
        f_code, f_lineno = look_here.__code__, 7

        @property
        def f_back(self):
            seen.append(collector.enabled)

    def current_frames():
        seen.append(collector.enabled)
        return {threading.get_ident(): None, 1: Frame()}

    monkeypatch.setattr(heartbeat_module, "gc", collector, raising=False)
    monkeypatch.setattr(heartbeat_module, "sys", SimpleNamespace(_current_frames=current_frames, version_info=version))
    assert heartbeat_module.where(1) == ("look_here (test_heartbeat.py:7)", False)
    assert heartbeat_module.running_threads() == {threading.get_ident(), 1}
    assert seen == [version >= (3, 12)] * 3
    assert collector.enabled == enabled


def test_a_compilers_time_is_not_the_phases(tmp_path, monkeypatch):
    answers = iter([False, True, True, False, False, False])
    monkeypatch.setattr(heartbeat_module, "where", lambda thread, others: ("", next(answers)))
    clock = Clock()
    heartbeat = Heartbeat(tmp_path, clock=clock)
    rows = []
    with heartbeat.phase("forward"):
        for _ in range(5):
            clock.pass_seconds(1.0)
            rows.append(heartbeat.snapshot())
    with heartbeat.phase("forward"):
        rows.append(heartbeat.snapshot())
    assert [row["compiling"] for row in rows] == [False, True, True, False, False, False]
    assert [row["stall_limit_seconds"] for row in rows] == [None, None, None, None, None, 120.0]
    assert [row["phase_seconds"] for row in rows] == [1.0, 2.0, 1.0, 1.0, 2.0, 0.0]
    assert rows[-1]["total_seconds"]["forward"] == 5.0


def test_nested_phases_return_to_the_outer_one_and_totals_add_up(tmp_path):
    clock = Clock()
    heartbeat = Heartbeat(tmp_path, clock=clock)
    with heartbeat.phase("evaluate"):
        clock.pass_seconds(1.0)
        with heartbeat.phase("data"):
            clock.pass_seconds(5.0)
        assert heartbeat.snapshot()["phase"] == "evaluate"
        clock.pass_seconds(3.0)
        assert heartbeat.snapshot()["phase_seconds"] == 3.0
    assert heartbeat.snapshot()["total_seconds"] == {"start": 0.0, "evaluate": 4.0, "data": 5.0, "other": 0.0}


def test_progress_keeps_what_is_not_given(tmp_path):
    with Heartbeat(tmp_path, interval_seconds=60) as heartbeat:
        heartbeat.update(step=4, loss=2.0, tokens_per_second=100.0)
        heartbeat.update(step=5)
    row = rows_of(tmp_path)[-1]
    assert (row["step"], row["loss"], row["tokens_per_second"]) == (5, 2.0, 100.0)
    assert row["status"] == "finished"
    assert row["memory_allocated_bytes"] > 1e6


def test_the_last_row_says_whether_it_failed(tmp_path):
    with pytest.raises(KeyError), Heartbeat(tmp_path):
        raise KeyError("boom")
    assert rows_of(tmp_path)[-1]["status"] == "failed"


def test_a_signal_while_the_thread_starts_leaves_no_thread(tmp_path):
    heartbeat = Heartbeat(tmp_path, interval_seconds=60)
    start = heartbeat._thread.start

    def interrupted():
        start()
        raise KeyboardInterrupt

    heartbeat._thread.start = interrupted
    with pytest.raises(KeyboardInterrupt):
        heartbeat.__enter__()
    assert not heartbeat._thread.is_alive()
    assert read_lines(tmp_path / "rank0.jsonl")[-1]["status"] == "failed"


def test_a_full_disk_never_reaches_training(tmp_path, caplog):
    (tmp_path / "rank0.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING), Heartbeat(tmp_path, interval_seconds=0.01) as heartbeat:
        for _ in range(5):
            with heartbeat.phase("forward"):
                time.sleep(0.02)
    thread_warnings = [record for record in caplog.records if record.threadName == "trifocal-heartbeat"]
    assert len(thread_warnings) == 1


def test_an_observer_that_fails_is_warned_about_once(tmp_path, caplog):
    heartbeat = Heartbeat(tmp_path, interval_seconds=0.01)
    heartbeat.observers.append(lambda row: row["no such field"])
    with caplog.at_level(logging.WARNING), heartbeat:
        wait_for(lambda: heartbeat.path.exists() and len(rows_of(tmp_path)) > 2)
    assert len(caplog.records) == 1
