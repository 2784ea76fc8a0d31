"""The state of the data thread, and the error that ends a run without data."""

from __future__ import annotations

import threading

from trifocal.errors import UserError


class DataError(UserError):
    """The data did not come: a server failed at every attempt, or no batch came for too long."""


class Stopped(Exception):
    """The loader is being closed; raised in its thread."""


class Activity:
    """A sentence about the present work of the data thread, for messages; and the signal to stop."""

    def __init__(self) -> None:
        self.text = "starting"
        self.stop = threading.Event()

    def check(self) -> None:
        """End the thread if the loader is being closed.

        Raises:
            Stopped: If the loader is being closed.
        """
        if self.stop.is_set():
            raise Stopped

    def pause(self, seconds: float) -> None:
        """Sleep, until the signal to stop at most.

        Raises:
            Stopped: If the loader is being closed.
        """
        if self.stop.wait(seconds):
            raise Stopped
