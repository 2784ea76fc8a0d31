"""Stacks with the frames of C and C++ code, from py-spy, if it is installed."""

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
    """Where py-spy is: on the path, or beside this interpreter."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def native_stacks(seconds: float = 10.0) -> str:
    """The stacks of this process's threads with native frames, or a sentence that says why there are none.

    py-spy stops the process while it looks, for a second or a few. That is bounded from outside the process, by
    `timeout`: a thread of this process could not end a py-spy that has stopped it.

    Args:
        seconds: The longest that it may take.
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
    """Let another process of this user look into this one, where Linux allows that to ancestors alone."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        yield
        return
    prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_PTRACER, 0, 0, 0, 0)
