"""Running, slow, stalled, finished, dead: each from the rows that it writes."""

import os
import signal

import pytest

from tests.written_runs import beat, wait_for
from trifocal.runlog.proc import process_start, process_state
from trifocal.runlog.stalls.verdict import judge


def verdict(after_seconds=1.0, **fields):
    row = beat(**fields)
    answer = judge(row, row["unix_time_seconds"] + after_seconds)
    return answer.state, answer.reason


def test_a_healthy_rank_is_running():
    assert verdict() == ("running", "in forward, usually 0.2 s")
    assert verdict(phase="other", expected_phase_seconds=None) == ("running", "between two phases")


def test_finished_and_failed_stay_so_for_ever():
    assert verdict(1e6, status="finished")[0] == "finished"
    assert verdict(1e6, status="failed", step=7) == ("failed", "at step 7")
    assert verdict(1e6, status="stopped", step=371) == ("stopped", "it was asked to stop, and saved step 371")


def test_three_times_the_median_is_slow_and_names_phase_and_factor():
    state, reason = verdict(phase="data", phase_seconds=11.0, expected_phase_seconds=0.5, where="get (queue.py:1)")
    assert state == "slow"
    assert "in data for 0:11, 22.0 times its median of 0.5 s, at get (queue.py:1)" in reason


@pytest.mark.parametrize("after_seconds", [0.0, 3.0, 9.9])
def test_short_steps_between_two_rows_are_not_one_long_phase(after_seconds):
    fields = {"interval_seconds": 5.0, "phase_seconds": 0.05, "expected_phase_seconds": 0.05}
    assert verdict(after_seconds, **fields) == ("running", "in forward, usually 0.05 s")
    # Rows that are overdue come from a process that writes nothing, and so goes nowhere.
    state, reason = verdict(10.1, **fields)
    assert state == "slow" and "in forward for 0:10" in reason


def test_a_short_phase_may_jitter():
    assert verdict(0.0, phase="data", phase_seconds=0.5, expected_phase_seconds=0.001)[0] == "running"


def test_past_the_limit_is_stalled_and_says_where():
    state, reason = verdict(phase="backward", phase_seconds=130.0, where="hook (model.py:7)")
    assert state == "stalled" and "hook (model.py:7)" in reason and "2:10" in reason


def test_no_expectation_or_compiling_is_never_stalled():
    fields = {"phase_seconds": 9000.0, "expected_phase_seconds": None, "stall_limit_seconds": None}
    state, reason = verdict(**fields)
    assert state == "running" and reason.startswith("first forward for 2:30:00")
    assert verdict(phase_seconds=9000.0, compiling=True) == (
        "running",
        "compiling in forward, at forward (attention.py:190)",
    )


def test_silence_of_a_process_that_is_gone_is_death(sleeper):
    assert verdict(11.0, pid=sleeper.pid)[0] != "dead"
    sleeper.kill()
    # Ended, but its parent has not asked for its status: it still has its number.
    wait_for(lambda: process_state(sleeper.pid) == "Z")
    assert verdict(9.0, pid=sleeper.pid)[0] == "running", "rows are not late yet"
    assert verdict(11.0, pid=sleeper.pid)[0] == "dead"
    sleeper.wait()
    state, reason = verdict(11.0, pid=sleeper.pid, where="hook (model.py:7)")
    assert (
        state == "dead" and f"process {sleeper.pid} has been gone for 0:11; last seen in forward at step 100" in reason
    )
    assert reason.endswith("at hook (model.py:7)")
    # On another machine nobody can look.
    assert verdict(11.0, host="another-host", phase_seconds=0.0, expected_phase_seconds=30.0)[0] == "running"
    assert verdict(60.0, host="another-host")[0] == "dead"


def test_a_process_whose_number_another_one_has_by_now_is_dead(sleeper):
    began = process_start(sleeper.pid)
    assert began >= (process_start(os.getpid()) or 0)
    assert verdict(60.0, pid=sleeper.pid)[0] == "stalled"
    state, reason = verdict(60.0, pid=sleeper.pid, process_start=began - 1)
    assert state == "dead" and f"process {sleeper.pid} has been gone for 1:00" in reason
    state, _ = verdict(60.0, pid=sleeper.pid, process_start=None)
    assert state == "stalled", "without /proc"


def test_a_stopped_process_is_stalled_and_told_how_to_continue(sleeper):
    sleeper.send_signal(signal.SIGSTOP)
    wait_for(lambda: process_state(sleeper.pid) == "T")
    state, reason = verdict(11.0, pid=sleeper.pid)
    assert state == "stalled" and "has been stopped for 0:11" in reason and f"kill -CONT {sleeper.pid}" in reason
    sleeper.send_signal(signal.SIGCONT)
    wait_for(lambda: process_state(sleeper.pid) == "S")
    assert "been stopped" not in verdict(11.0, pid=sleeper.pid)[1]


def test_a_stopped_process_may_be_stopped_where_the_system_does_not_tell(sleeper, monkeypatch):
    # As on macOS, which has no /proc.
    monkeypatch.setattr("trifocal.runlog.proc._fields", lambda pid: [])
    sleeper.send_signal(signal.SIGSTOP)
    state, reason = verdict(60.0, pid=sleeper.pid)
    assert state == "stalled" and f"it is stopped (kill -CONT {sleeper.pid} lets it continue), or in C code" in reason
    sleeper.kill()
    sleeper.wait()
    assert verdict(60.0, pid=sleeper.pid)[0] == "dead"


def test_silence_of_a_process_that_exists_is_a_stall():
    state, reason = verdict(60.0, pid=os.getpid())
    assert state == "stalled" and "interpreter's lock" in reason and "forward (attention.py:190)" in reason
