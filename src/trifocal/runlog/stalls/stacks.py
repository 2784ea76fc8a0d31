"""Stacks of this process's threads: one line for a heartbeat, all frames for a dump."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path
from types import CodeType
from typing import Self, TextIO

from trifocal.runlog.jsonl import logger

_COMPILER_FILES = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py", "/triton/compiler/")


class StackDump:
    """Writes the Python stack of every thread into the run's dumps: on SIGUSR1 (`kill -USR1 PID`), without stopping
    the run, and on the fatal signals SIGSEGV, SIGABRT, SIGBUS, SIGFPE and SIGILL.

    faulthandler writes in the signal handler itself, so it works while the main thread is busy in C code or holds the
    interpreter's lock.

    Args:
        directory: The run's `dumps` folder; stacks are appended to `stacks_rank{rank}.txt` there. If that cannot be
            opened, they go to standard error, with a warning.
        rank: The rank of this process.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int = 0) -> None:
        self.path = Path(directory) / f"stacks_rank{rank}.txt"
        self.file: TextIO
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("a")
        except OSError as error:
            logger.warning("cannot open %s (%s); training goes on, stacks go to the standard error", self.path, error)
            # A copy, which close() may close.
            self.file = os.fdopen(os.dup(2), "w")
        self._was_enabled = faulthandler.is_enabled()
        faulthandler.register(signal.SIGUSR1, file=self.file, all_threads=True)
        faulthandler.enable(file=self.file, all_threads=True)

    def size(self) -> int:
        """Bytes in the file; 0 if there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def close(self) -> None:
        """Restore the signals and close the file; an empty one is removed."""
        if self.file.closed:
            return
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
        if self._was_enabled and sys.__stderr__ is not None:
            faulthandler.enable(file=sys.__stderr__)
        self.file.close()
        if self.path.is_file() and self.size() == 0:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def running_threads() -> frozenset[int]:
    """Every thread that runs Python code now, including those unknown to `threading`."""
    return frozenset(sys._current_frames())


def where(main_thread: int, depth: int = 3, *, others: frozenset[int] = frozenset()) -> tuple[str, bool]:
    """The innermost frames of the training thread, and whether it is compiling.

    Frames of the autograd engine's own threads (hooks, on CUDA) come first: meanwhile the training thread only waits.
    The engine's threads are unknown to `threading` and younger than the training; such threads of other libraries are
    older.

    Args:
        main_thread: `threading.get_ident()` of the training thread.
        depth: Number of frames.
        others: `running_threads()` from before the training; none of them is the engine's.

    Returns:
        `function (file.py:line) < caller (file.py:line) < …`, empty if the thread is gone or is the calling one; and
        whether a compiler of PyTorch or Triton is on its stack.
    """
    known = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    known |= others | {main_thread}
    named: list[str] = []
    compiling = False
    for code, line in _stacks(main_thread, known):
        compiling = compiling or any(part in code.co_filename for part in _COMPILER_FILES)
        if len(named) < depth:
            named.append(f"{code.co_name} ({Path(code.co_filename).name}:{line})")
    return " < ".join(named), compiling


def _stacks(main_thread: int, known: set[int | None]) -> list[tuple[CodeType, int]]:
    """Code and line of every frame of the unknown threads, then of the training thread.

    A frame keeps its local variables alive, tensors too, so no frame leaves this function. The frame of this function
    is dropped as well: it would form a reference cycle with all the others.
    """
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    main = frames.get(main_thread)
    innermost = [*(frame for ident, frame in frames.items() if ident not in known), main]
    found = []
    for frame in innermost:
        while frame is not None:
            found.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
    return found
