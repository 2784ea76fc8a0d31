"""Trying again, with pauses, and knowing when to stop."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from trifocal.errors import UserError

Item = TypeVar("Item")
Place = TypeVar("Place")

_log = logging.getLogger("trifocal.data")


class DataError(UserError):
    """The data could not be had: a source gave up after its retries, or no batch came for too long."""


class TransientError(OSError):
    """A failure that may pass: too many requests, a server's error, a cut or silent connection.

    Args:
        message: What failed, and how.
        retry_after: Seconds that the server asks to be left alone, if it says so.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Stopped(Exception):
    """The loader is being closed; raised in its thread to leave whatever it is waiting for."""


class Activity:
    """What the data thread is doing right now, for whoever waits for it; and the order to stop."""

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


class Retry:
    """Exponential back-off with jitter around what may fail for a while.

    Pause `i` (from 0) is `base * 2**i` seconds, at most `longest`, less a random part of up to half: processes that
    failed together do not come back together. A server's Retry-After is waited for in full where it is longer, up
    to `longest`. Only `TransientError` is tried again; anything else is raised at once.

    Args:
        attempts: Failures in a row, without any progress between, that end it.
        base_seconds: The first pause.
        longest_seconds: The longest pause.
        activity: Told what is waited for, and asked whether to go on.
    """

    def __init__(self, attempts: int, base_seconds: float, longest_seconds: float, activity: Activity) -> None:
        self.attempts = attempts
        self.base_seconds = base_seconds
        self.longest_seconds = longest_seconds
        self.activity = activity
        # Own generator: the jitter must neither disturb the run's random state nor agree between processes.
        self._random = random.Random()

    def call(self, name: str, action: Callable[[], Item]) -> Item:
        """Do something until it succeeds.

        Args:
            name: What is read, for messages.
            action: Done again after each `TransientError`.

        Raises:
            DataError: After `attempts` failures; names what was read, how often and the last error.
            Stopped: If the loader is being closed.
        """
        failures = _Failures(self, name)
        while True:
            self.activity.check()
            try:
                return action()
            except TransientError as error:
                failures.add(error)

    def iterate(
        self, name: str, read: Callable[[Place | None], Iterator[tuple[Item, Place]]], start: Place | None
    ) -> Iterator[tuple[Item, Place]]:
        """Read a sequence to its end, going on after a failure where it broke off.

        Args:
            name: What is read, for messages.
            read: Opens the sequence at a place; gives each item with the place after it.
            start: Where to begin.

        Yields:
            What an undisturbed `read(start)` yields, each item once.

        Raises:
            DataError: After `attempts` failures in a row without an item between.
            Stopped: If the loader is being closed.
        """
        failures = _Failures(self, name)
        place = start
        while True:
            self.activity.check()
            self.activity.text = f"reading {name}"
            try:
                for item, after in read(place):
                    failures.clear()
                    place = after
                    yield item, after
                return
            except TransientError as error:
                failures.add(error)


class _Failures:
    """Counts failures in a row and pauses after each."""

    def __init__(self, retry: Retry, name: str) -> None:
        self._retry = retry
        self._name = name
        self.clear()

    def clear(self) -> None:
        self._count = 0
        self._since = time.monotonic()

    def add(self, error: TransientError) -> None:
        retry = self._retry
        self._count += 1
        if self._count >= retry.attempts:
            raise DataError(
                f"{self._name}: gave up after {self._count} attempts in {time.monotonic() - self._since:.0f} s; "
                f"the last error: {error}"
            ) from error
        pause = min(retry.base_seconds * 2.0 ** (self._count - 1), retry.longest_seconds)
        pause *= 1 - retry._random.random() / 2
        if error.retry_after is not None:
            pause = max(pause, min(error.retry_after, retry.longest_seconds))
        retry.activity.text = (
            f"pausing {pause:.1f} s before attempt {self._count + 1} of {retry.attempts} at {self._name}: {error}"
        )
        _log.warning("data: %s", retry.activity.text)
        retry.activity.pause(pause)
