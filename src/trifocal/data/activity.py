"""The state of the data thread."""

from __future__ import annotations

import threading


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
