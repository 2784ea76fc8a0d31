"""Output and end of commands: text on the terminal, files, and signals."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from trifocal.errors import UserError
from trifocal.paths import user_path
from trifocal.runlog.whole_files import write_output

# Control characters, with which a text could move the cursor, rename the window or type, and marks that turn the
# direction of writing. Line ends and tabs stay.
_CONTROL = dict.fromkeys(
    {*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
    - {0x09, 0x0A}
)


def printable(text: str) -> str:
    """A text without the characters that a terminal obeys: for text that comes from files."""
    return text.translate(_CONTROL)


def try_next(advice: Mapping[str, str]) -> str:
    """The last lines of a command: what to do next, and the command that does it."""
    return "\n".join(["", "try next:", *(f"  {what}:\n    {command}" for what, command in advice.items())])


def replace_closed_streams() -> None:
    """Write to nowhere where standard output or standard error was closed before the start.

    The next open file would take its descriptor, and libraries write their messages there.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115


def discard_lost_output() -> None:
    """Give up what a lost standard stream has not taken: Python would try again at its end, and end with status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def check_output(path: str) -> None:
    """See before any work that `write_file` can write there, and make its folder; an empty path is no file."""
    if not path:
        return
    with writing(path):
        file = user_path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        there = file.exists()
        with file.open("a"):
            pass
        if not there:
            file.unlink()


def write_file(path: str, text: str) -> None:
    """Write a file that the user named, whole or not at all."""
    with writing(path):
        write_output(user_path(path), text)


@contextmanager
def writing(path: str | Path, advice: str = "") -> Iterator[None]:
    """Make a UserError, with the path, of what the system says against writing there."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}{advice}") from error


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def unwinding_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP, unless `nohup` has it ignored, end the command as Ctrl-C does: by an exception."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
