"""Starting a few processes on this machine, as torchrun would, and waiting for them."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trifocal.distributed.rendezvous import places_here

_ERROR_CHARACTERS = 4000
"""Shown of a process's error output: enough for the stacks of a process that a signal ended."""
GRACE_SECONDS = 5.0
"""Time that the other processes have to end by themselves after one failed."""


class ProcessesFailed(RuntimeError):
    """A process failed, with the end of each error output, or, without `statuses`, they did not end in time."""

    def __init__(self, message: str, statuses: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.statuses = tuple(statuses)


def run_processes(
    arguments: Sequence[str],
    size: int,
    folder: Path,
    *,
    limit_seconds: float,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Run Python in `size` processes that find each other, with their error output in the folder; ProcessesFailed if
    one fails, or at the limit. None outlives the call, nor `until` once it is true.
    """
    _store, places = places_here(size)
    # Where this process finds the package, the others must find it too. Messages quote errors, which Python 3.13 writes
    # in colours where FORCE_COLOR is set.
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONFAULTHANDLER": "1", "PYTHON_COLORS": "0"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank, place in enumerate(places):
            with (folder / f"error{rank}").open("wb") as error:
                environment = os.environ | place | path
                command = [sys.executable, *arguments]
                started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=error, env=environment))
        # A process that fails leaves the others waiting: all are polled.
        _wait_for(started, folder, limit_seconds, until)
    finally:
        for process in started:
            process.kill()
            process.wait()


def _wait_for(started: list[subprocess.Popen[bytes]], folder: Path, limit: float, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + limit
    while not until():
        if any(process.poll() for process in started):
            raise _failure(started, folder)
        waiting = [process for process in started if process.poll() is None]
        if not waiting:
            return
        if time.monotonic() > deadline:
            raise ProcessesFailed(f"{len(started)} processes did not end in {limit:.0f} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            waiting[0].wait(0.2)


def _failure(started: list[subprocess.Popen[bytes]], folder: Path) -> ProcessesFailed:
    """The error output of every process that failed: one that lost its peer may end before the peer that failed."""
    lines, statuses = [], []
    for rank, process in enumerate(started):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        status = process.poll() or 0
        statuses.append(status)
        if status:
            text = (folder / f"error{rank}").read_text(errors="replace").strip()
            lines.append(f"process {rank} ended with status {status}: {text[-_ERROR_CHARACTERS:]}")
    return ProcessesFailed("\n".join(lines), statuses)
