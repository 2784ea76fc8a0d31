"""Output and end of commands: text on the terminal, files, and signals."""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from trifocal.errors import UserError
from trifocal.paths import user_path

# Control characters, with which a text could move the cursor, rename the window or type, and marks that turn the
# direction of writing. Line ends and tabs stay.
_CONTROL = dict.fromkeys(
    {*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
    - {0x09, 0x0A}
)


def printable(text: str) -> str:
    """A text without the characters that a terminal obeys: for text that comes from files."""
    return text.translate(_CONTROL)


def write_what_can_be_encoded() -> None:
    """Let standard output write characters that it cannot encode as escapes, such as \\u2192, as standard error does.

    A terminal or a locale may be older than UTF-8; a name may hold bytes that are no text.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def drop_lost_output() -> None:
    """Write to nowhere where standard output was closed before the start."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115


def check_output(path: str) -> None:
    """See before any work that `write_file` can write there; its folder is made where it is missing.

    Args:
        path: The file; empty for none.

    Raises:
        UserError: If it cannot be written.
    """
    if not path:
        return
    try:
        file = user_path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        there = file.exists()
        with file.open("a"):
            pass
        if not there:
            file.unlink()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def write_file(path: str, text: str) -> None:
    """Write a file that the user named, whole or not at all.

    Raises:
        UserError: If it cannot be written; an earlier file stays.
    """
    # Its package imports PyTorch, for which `trifocal --help` does not wait.
    from trifocal.runlog.whole_files import write_output

    try:
        write_output(user_path(path), text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def unwinding_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command as Ctrl-C does: by an exception, so that it leaves nothing behind.

    A SIGHUP that is ignored stays so: `nohup` asks for that.
    """
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
