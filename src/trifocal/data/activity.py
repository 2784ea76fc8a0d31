"""What the data thread is doing, the order to stop, and the error that ends a run when data do not come."""

from __future__ import annotations

import threading

from trifocal.errors import UserError


class DataError(UserError):
    """The data could not be had: a server gave no answer after all attempts, or no batch came for too long."""


class Stopped(Exception):
    """The loader is being closed; raised in its thread."""


class Activity:
    """What the data thread is doing right now, for messages; and the order to stop."""

    def __init__(self) -> None:
        self.text = "starting"
        self.stop = threading.Event()

    def check(self) -> None:
        """Leave if the loader is being closed.

        Raises:
            Stopped: If it is.
        """
        if self.stop.is_set():
            raise Stopped

    def pause(self, seconds: float) -> None:
        """Sleep, but not past the order to stop.

        Raises:
            Stopped: If the loader is being closed.
        """
        if self.stop.wait(seconds):
            raise Stopped
