"""A thread that works ahead of its consumer, up to a bound."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from trifocal.errors import UserError

Item = TypeVar("Item")

LOOK_SECONDS = 0.5
"""A wait looks this often whether it is to stop."""
STALL_SECONDS = 30.0
"""Waiting this long for a batch is reported, and again each time as much has passed."""
STALL_LIMIT_SECONDS = 1800.0
"""Waiting this long for a batch stops the run."""


class Stopped(Exception):
    """The loader is being closed; raised in its thread. Or a wait for a batch is to stop; raised in the consumer."""


class Activity:
    """A sentence about the present work of the data thread, for messages; and the signal to stop."""

    def __init__(self) -> None:
        self.text = "starting"
        self.stop = threading.Event()

    def check(self) -> None:
        """End the thread, by raising Stopped, if the loader is being closed."""
        if self.stop.is_set():
            raise Stopped


class Prefetcher(Generic[Item]):
    """Calls a function again and again in a thread and hands out its results in order; at most `depth` are ready."""

    def __init__(
        self,
        produce: Callable[[], Item],
        *,
        depth: int,
        activity: Activity,
        on_stall: Callable[[float, str], None],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._produce = produce
        self._activity = activity
        self._on_stall = on_stall
        self._interrupted = interrupted
        self._queue: queue.Queue[Item | BaseException] = queue.Queue(maxsize=depth)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="trifocal-data", daemon=True)
        self._thread.start()

    def get(self) -> Item:
        """The next item, or the thread's error; Stopped if the wait was interrupted."""
        if self._failure is None:
            item = self._wait()
            if not isinstance(item, BaseException):
                return item
            self._failure = item
        error = self._failure
        if isinstance(error, UserError):
            raise type(error)(*error.args) from error
        raise RuntimeError(f"the data thread failed: {type(error).__name__}: {error}") from error

    def close(self, timeout_seconds: float = math.inf) -> None:
        """End the thread; after `timeout_seconds` one that waits for a silent server is left to end by itself."""
        self._activity.stop.set()
        begin = time.monotonic()
        while self._thread.is_alive() and time.monotonic() - begin < timeout_seconds:
            # Make room, as the thread may be waiting to put an item.
            while not self._queue.empty():
                self._queue.get_nowait()
            self._thread.join(timeout=0.05)

    def _wait(self) -> Item | BaseException:
        # The sum of the waits, not the clock's: while the process is stopped, nobody waits.
        age = 0.0
        report_at = STALL_SECONDS
        while True:
            if age >= STALL_LIMIT_SECONDS:
                raise UserError(f"data stall: no batch for {age:.0f} s; the data thread is {self._activity.text}")
            if age >= report_at:
                self._on_stall(age, self._activity.text)
                report_at += STALL_SECONDS
            wait = min(report_at - age, STALL_LIMIT_SECONDS - age, LOOK_SECONDS)
            try:
                return self._queue.get(timeout=wait)
            except queue.Empty:
                age += wait
                if self._interrupted():
                    raise Stopped from None

    def _run(self) -> None:
        item: Item | BaseException
        while not self._activity.stop.is_set():
            try:
                item = self._produce()
            except Stopped:
                return
            except BaseException as error:  # `get` raises it in the consumer.
                item = error
            working, self._activity.text = self._activity.text, "waiting for the trainer"
            while not self._activity.stop.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
            # It continues in the middle of this.
            self._activity.text = working
