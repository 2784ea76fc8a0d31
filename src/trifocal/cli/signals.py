"""Signals that end a command which has started processes and made temporary folders."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn


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
