"""The state of a rank (running, slow, stalled, finished, stopped, failed or dead) only from its heartbeat.

docs/diagnostics.md defines the states. The age of a phase is that in the last row: a short step may have
ended many times since. It grows with the time since then only if rows are late, by two intervals: a process that writes
no rows takes no steps either.
"""

import socket
import time
from dataclasses import dataclass
from typing import Literal

from trifocal.runlog.jsonl import Row
from trifocal.runlog.proc import process_start, process_state
from trifocal.runlog.progress import duration
from trifocal.runlog.run import Run

State = Literal["failed", "dead", "stalled", "slow", "stopped", "running", "finished"]
"""The worst first."""

LATE_INTERVALS = 2.0
SILENT_INTERVALS = 3.0
SILENT_SECONDS = 10.0
SLOW_FACTOR = 3.0
SLOW_SECONDS = 1.0
# Letters of /proc/PID/stat: gone, or ended and not yet waited for by its parent; stopped, or held by a debugger.
_OVER, _STOPPED = ("X", "x", "Z"), ("T", "t")


@dataclass(frozen=True)
class Verdict:
    """The state of a rank, with the reason."""

    state: State
    reason: str
    """One line: the phase, its age, the ratio to its median, the place in the code."""

    @property
    def mark(self) -> Literal["bad", "watch", "good"]:
        """Whether somebody must act, or look."""
        if self.state in ("failed", "dead", "stalled"):
            return "bad"
        return "watch" if self.state in ("slow", "stopped") else "good"


def verdicts(run: Run) -> dict[int, Verdict]:
    """The verdict on every rank that has written a heartbeat."""
    return {rank: judge(rows[-1]) for rank, rows in run.heartbeats.items()}


def judge(row: Row, now: float | None = None) -> Verdict:
    """Judge a rank by the last row of its heartbeat, at a time in seconds since the epoch, by default now."""
    now = time.time() if now is None else now
    if row["status"] == "stopped":
        return Verdict("stopped", f"it was asked to stop, and saved step {row['step']:,}")
    if row["status"] in ("finished", "failed"):
        return Verdict(row["status"], f"at step {row['step']:,}")
    silence = max(0.0, now - row["unix_time_seconds"])
    # A process in a container of the same host name is not seen here either, and one that ends may be gone before its
    # last row is read: rows must be late too.
    late = silence > LATE_INTERVALS * row["interval_seconds"]
    state = _state(row) if late and row["host"] == socket.gethostname() else "?"
    if state in _OVER:
        return Verdict("dead", f"process {row['pid']} has been gone for {duration(silence)}; {_last_seen(row)}")
    if state in _STOPPED:
        what = f"process {row['pid']} has been stopped for {duration(silence)} (Ctrl-Z, SIGSTOP or a debugger)"
        return Verdict("stalled", f"{what}; kill -CONT {row['pid']} lets it continue; {_last_seen(row)}")
    if silence > SILENT_INTERVALS * row["interval_seconds"] + SILENT_SECONDS:
        return _silent(row, silence, state)
    return _present(row, silence if late else 0.0)


def _state(row: Row) -> str:
    """Linux's letter for the state of the row's process; X also if another process has its id now."""
    began, now = row["process_start"], process_start(row["pid"])
    return "X" if None not in (began, now) and began != now else process_state(row["pid"])


def _silent(row: Row, silence: float, state: str) -> Verdict:
    if row["host"] != socket.gethostname():
        return Verdict("dead", f"no heartbeat from {row['host']} for {duration(silence)}; {_last_seen(row)}")
    kernel = "it waits for a disk or a device in the kernel"
    keeps = f"in C code that keeps the interpreter's lock (py-spy dump --pid {row['pid']} shows where)"
    if state == "?":
        keeps = f"it is stopped (kill -CONT {row['pid']} lets it continue), or {keeps}"
    reason = kernel if state == "D" else keeps
    what = f"process {row['pid']} exists but has been silent for {duration(silence)}: {reason}"
    return Verdict("stalled", f"{what}; {_last_seen(row)}")


def _last_seen(row: Row) -> str:
    return f"last seen in {row['phase']} at step {row['step']:,}{_place(row)}"


def _place(row: Row) -> str:
    return f", at {row['where']}" if row["where"] else ""


def _present(row: Row, silence: float) -> Verdict:
    phase, expected, limit = row["phase"], row["expected_phase_seconds"], row["stall_limit_seconds"]
    age = row["phase_seconds"] + silence
    if row["compiling"]:
        return Verdict("running", f"compiling in {phase}{_place(row)}")
    if limit is not None and age > limit:
        since = time.strftime("%H:%M:%S", time.localtime(row["unix_time_seconds"] - row["phase_seconds"]))
        reason = f"in {phase} for {duration(age)}, since {since}, usually {expected:.2g} s{_place(row)}"
        return Verdict("stalled", reason)
    if expected is not None and age > SLOW_FACTOR * expected and age > expected + SLOW_SECONDS:
        times = age / max(expected, 1e-3)
        reason = f"in {phase} for {duration(age)}, {times:.1f} times its median of {expected:.2g} s{_place(row)}"
        return Verdict("slow", reason)
    if phase == "other":
        return Verdict("running", "between two phases")
    if expected is None:
        return Verdict("running", f"first {phase} for {duration(age)}, no expectation yet{_place(row)}")
    return Verdict("running", f"in {phase}, usually {expected:.2g} s")
