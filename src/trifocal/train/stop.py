"""Stopping a run from outside: the first signal asks, the second insists."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While active, SIGINT (Ctrl-C) and SIGTERM ask the run to stop at the end of its step; another one ends the
    process at once.

    Handlers can be set in the main thread only; elsewhere this does nothing. The earlier handlers come back at the end.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal that asked to stop; None while nobody has."""
        self._before: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number).name
        # Not print: the handler may have interrupted one.
        os.write(2, f"\n{self.received}: saving at the end of this step; again to quit at once\n".encode())

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
