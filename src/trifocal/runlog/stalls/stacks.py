"""The place in the code where the training thread is, for a heartbeat."""

import sys
import threading
from pathlib import Path
from types import CodeType

_COMPILER_FILES = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py", "/triton/compiler/")


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
