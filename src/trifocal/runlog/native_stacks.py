"""Stacks with the frames of C and C++ code, by py-spy if it is installed."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def find_py_spy() -> str | None:
    """Path of py-spy, on PATH or beside this interpreter; None without it."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def native_stacks(seconds: float = 10.0) -> str:
    """The stacks of this process's threads with native frames, or the reason why there are none.

    py-spy stops the process for a second or a few. `timeout` bounds that from outside: a thread of the stopped process
    could not.

    Args:
        seconds: The longest time for py-spy.
    """
    py_spy, timeout = find_py_spy(), shutil.which("timeout")
    if py_spy is None:
        return "py-spy is not installed (pip install py-spy): no native frames\n"
    if timeout is None:
        return "there is no `timeout` on this machine to bound py-spy: no native frames\n"
    command = [timeout, "-s", "KILL", str(seconds), py_spy, "dump", "--native", "--pid", str(os.getpid())]
    try:
        with _traceable():
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=2 * seconds)
    except (OSError, subprocess.SubprocessError) as error:
        return f"py-spy failed: {error}\n"
    if done.returncode in (-9, 137):
        return f"py-spy was ended after {seconds:g} s\n{done.stdout}"
    if done.returncode:
        return f"py-spy failed with status {done.returncode}: {done.stderr.strip()[-500:]}\n{done.stdout}"
    return done.stdout


@contextlib.contextmanager
def _traceable() -> Iterator[None]:
    """Let other processes of this user trace this one, which some Linux settings allow to ancestors only."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        yield
        return
    prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_PTRACER, 0, 0, 0, 0)
