"""Is a rank running, slow, stalled, finished or dead: judged from its heartbeat alone.

| state | when |
|---|---|
| finished, failed | the last row says so |
| dead | no row for 3 intervals and 10 s, and the process is gone (or is on a host where nobody can look) |
| stalled | the phase is older than the limit learned from the run, or the process exists but is silent |
| slow | the phase is 1 s and 3 times older than its median, or its last 5 times are (by 2 times, a tenth of a step) |
| running | otherwise; a phase without a past has no expectation: it is running, and the reason says since when |
"""

import os
import socket
import time
from dataclasses import dataclass
from typing import Literal

from trifocal.diagnostics.jsonl import Row
from trifocal.diagnostics.progress import duration

State = Literal["running", "slow", "stalled", "finished", "failed", "dead"]

SILENT_INTERVALS = 3.0
SILENT_SECONDS = 10.0
SLOW_FACTOR = 3.0
SLOW_SECONDS = 1.0
RECENT_SLOW_FACTOR = 2.0
RECENT_SLOW_SHARE_OF_STEP = 0.1
_STEP_PHASES = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Verdict:
    """What to think of a rank."""

    state: State
    reason: str
    """One line for a person: which phase, how long, how many times its median, where."""


def judge(row: Row, now: float | None = None) -> Verdict:
    """Judge a rank by the last row of its heartbeat.

    Args:
        row: The last row; see diagnostics/heartbeat.py for its fields.
        now: Seconds since the epoch; the present by default.

    Returns:
        The verdict.
    """
    now = time.time() if now is None else now
    if row["status"] in ("finished", "failed"):
        return Verdict(row["status"], f"at step {row['step']:,}")
    silence = max(0.0, now - row["unix_time_seconds"])
    if silence > SILENT_INTERVALS * row["interval_seconds"] + SILENT_SECONDS:
        return _silent(row, silence)
    return _present(row, row["phase_seconds"] + silence)


def _silent(row: Row, silence: float) -> Verdict:
    last = f"last seen in {row['phase']} at step {row['step']:,}"
    if row["host"] != socket.gethostname():
        return Verdict("dead", f"no heartbeat from {row['host']} for {duration(silence)}; {last}")
    if not _exists(row["pid"]):
        return Verdict("dead", f"process {row['pid']} is gone since {duration(silence)}; {last}")
    reason = "stopped, or in C code that keeps the interpreter's lock"
    return Verdict("stalled", f"process {row['pid']} exists but is silent for {duration(silence)}: {reason}; {last}")


def _present(row: Row, age: float) -> Verdict:
    phase, expected, limit = row["phase"], row["expected_phase_seconds"], row["stall_limit_seconds"]
    place = f", at {row['where']}" if row["where"] else ""
    if row["compiling"]:
        return Verdict("running", f"compiling in {phase} for {duration(age)}")
    if limit is not None and age > limit:
        since = time.strftime("%H:%M:%S", time.localtime(row["unix_time_seconds"] - row["phase_seconds"]))
        reason = f"in {phase} for {duration(age)}, since {since}, usually {expected:.2g} s{place}"
        return Verdict("stalled", reason)
    if expected is not None and age > SLOW_FACTOR * expected and age > expected + SLOW_SECONDS:
        times = age / max(expected, 1e-3)
        return Verdict(
            "slow", f"in {phase} for {duration(age)}, {times:.1f} times its median of {expected:.2g} s{place}"
        )
    slow = _slow_lately(row)
    if slow is not None:
        return slow
    if expected is None and phase != "other":
        return Verdict("running", f"first {phase} for {duration(age)}, no expectation yet{place}")
    return Verdict("running", f"in {phase}")


def _slow_lately(row: Row) -> Verdict | None:
    typical, recent = row["typical_seconds"], row["recent_seconds"]
    step_seconds = sum(typical.get(phase, 0.0) for phase in _STEP_PHASES)
    excess = {phase: recent[phase] - typical[phase] for phase in _STEP_PHASES if phase in typical}
    if not excess:
        return None
    phase = max(excess, key=lambda name: excess[name])
    if recent[phase] < RECENT_SLOW_FACTOR * typical[phase] or excess[phase] < RECENT_SLOW_SHARE_OF_STEP * step_seconds:
        return None
    times = recent[phase] / max(typical[phase], 1e-4)
    reason = (
        f"{phase} takes {times:.1f} times its median lately: {recent[phase]:.2g} s instead of {typical[phase]:.2g} s"
    )
    return Verdict("slow", reason)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
