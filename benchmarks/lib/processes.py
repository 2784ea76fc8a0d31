"""Start `trifocal train` in several processes of this machine, and end them all."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.recorder import child_environment
from trifocal.distributed.rendezvous import places_here

# Time to save after SIGTERM.
STOP_SECONDS = 25.0


def train(config: Path, run: Path, flags: Mapping[str, Any], processes: int, seconds: float) -> str:
    """Train in a new folder, in n processes, one for each GPU; their output.

    A run that does not end in its time is stopped by SIGTERM, as by a scheduler.
    """
    # Not by torchrun: its workers would outlive it if it is killed.
    _store, places = places_here(processes)
    overrides = [f"--{name}={value}" for name, value in flags.items()]
    command = [sys.executable, "-m", "trifocal", "train", str(config), f"--run.directory={run}", *overrides]
    log = run.with_suffix(".log")
    with log.open("wb") as output:
        # A group for each, so that the compilers that it starts end with it.
        children = [
            subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **child_environment(**place)},
            )
            for place in places
        ]  # fmt: skip
    try:
        if not _ended(children, seconds):
            for child in children:
                child.send_signal(signal.SIGTERM)
            _ended(children, STOP_SECONDS)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return log.read_text(errors="replace")


def _ended(children: Sequence[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Wait until all processes have ended, or the time is up."""
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
