"""Where the threads of this process are: one line for a heartbeat, everything for a dump."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path
from types import CodeType, TracebackType
from typing import Self, TextIO

from trifocal.runlog.jsonl import logger

_COMPILER_FILES = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py", "/triton/compiler/")


class StackDump:
    """On SIGUSR1, writes the Python stack of every thread into the run's dumps, without stopping the run.

    faulthandler does it from the signal itself, so it works while the main thread is busy in C code or holds
    the interpreter's lock: `kill -USR1 PID`. Needs the main thread's process to have the signal (not on
    Windows, where this does nothing).

    Args:
        directory: The run's `dumps` folder; stacks are appended to `stacks_rank{rank}.txt` there. If that cannot be
            opened, which is warned about, they go to the standard error.
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
        self._registered = hasattr(faulthandler, "register")
        if self._registered:
            faulthandler.register(signal.SIGUSR1, file=self.file, all_threads=True)

    def dump(self) -> None:
        """Write the stacks now."""
        faulthandler.dump_traceback(file=self.file, all_threads=True)

    def size(self) -> int:
        """Bytes in the file; 0 if there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def close(self) -> None:
        """Give the signal back and close the file; an empty one is removed."""
        if self.file.closed:
            return
        if self._registered:
            faulthandler.unregister(signal.SIGUSR1)
        self.file.close()
        if self.path.is_file() and self.size() == 0:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def running_threads() -> frozenset[int]:
    """Every thread that runs Python code now, also those that `threading` does not know."""
    return frozenset(sys._current_frames())


def where(main_thread: int, depth: int = 3, *, others: frozenset[int] = frozenset()) -> tuple[str, bool]:
    """The innermost frames of the training thread, and whether it is compiling.

    Python code that the autograd engine runs in its own threads (hooks, on CUDA) is looked at first: while
    such a thread has a frame, the training thread only waits for it. They are told by being unknown to `threading`
    and younger than the training: another library's threads of that kind were there before.

    Args:
        main_thread: `threading.get_ident()` of the thread that trains.
        depth: How many frames to name.
        others: `running_threads()` from before the training; none of them is the engine's.

    Returns:
        `function (file.py:line) < caller (file.py:line) < …`, empty if the thread is gone or asks itself; and whether a
        compiler of PyTorch or Triton is on its stack.
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
    """Code and line of every frame of the threads that are not known, and then of the training's.

    A frame holds what its function names, tensors too, for as long as anybody holds the frame. So none leaves this
    function; and not its own either, which would hold all others in a circle until the garbage collector finds it.
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
