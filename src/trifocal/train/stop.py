"""Stopping a run by signals: the first one saves and stops, the second ends the process."""

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_REQUEST_SECONDS = 2.0
"""One request may come twice: a scheduler signals every process, and torchrun forwards its own signal too."""


class StopSignals:
    """While active, SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) ask the run to stop at the end of its step;
    another one, at least two seconds later, ends the process at once.

    Handlers can be set in the main thread only; elsewhere this does nothing. At the end the earlier handlers return.
    A SIGHUP that is ignored stays so: `nohup` asks for that.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal that asked to stop; None before."""
        self._received_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() - self._received_at >= SAME_REQUEST_SECONDS:
                os._exit(128 + number)
            return
        self.received, self._received_at = signal.Signals(number).name, time.monotonic()
        # Not print: the handler may have interrupted one.
        again = f"again after {SAME_REQUEST_SECONDS:.0f} s to quit at once"
        with contextlib.suppress(OSError):  # The terminal may be gone.
            os.write(2, f"\n{self.received}: saving at the end of this step; {again}\n".encode())

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
