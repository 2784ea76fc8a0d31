"""A thread between the run and a sink: the run never waits for a sink, and never fails with it."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from trifocal.errors import one_line
from trifocal.runlog.jsonl import Row

MAX_WAITING_ROWS = 10_000
CLOSE_SECONDS = 60.0


class Sink(Protocol):
    """Another consumer of the metric rows (TensorBoard, for example)."""

    def write(self, row: Row) -> None:
        """Write one row."""

    def close(self) -> None:
        """Flush and close."""


class SinkThread:
    """Feeds one sink in a thread of its own. After the first failure, which is reported, the sink gets no more rows.

    Args:
        sink: The sink; only that thread uses it.
        on_failure: Called once, with a sentence: in that thread if the sink raised, in the thread of `write` or `close`
            if the sink is too slow.
        close_seconds: The longest time that `close` waits for the sink.
    """

    def __init__(self, sink: Sink, on_failure: Callable[[str], None], *, close_seconds: float = CLOSE_SECONDS) -> None:
        self._sink = sink
        self._on_failure = on_failure
        self._close_seconds = close_seconds
        self._rows: queue.Queue[Row | None] = queue.Queue(MAX_WAITING_ROWS)
        self._failed = threading.Event()
        self._reported = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"trifocal-{type(sink).__name__}", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Hand over one row, without waiting."""
        if self._failed.is_set():
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._fail(f"does not keep up, {MAX_WAITING_ROWS:,} rows wait for it")

    def close(self) -> None:
        """Wait a bounded time until the sink has every row and is closed."""
        deadline = time.monotonic() + self._close_seconds
        while not self._failed.is_set() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Full):
                self._rows.put(None, timeout=0.1)
                break
        # A failed sink may still be in its last call: do not wait for that.
        while not self._failed.is_set() and self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.1)
        if self._failed.is_set():
            # The thread may still be writing its report, into a file that the caller is about to close.
            self._reported.wait(max(0.0, deadline - time.monotonic()))
        elif self._thread.is_alive():
            self._fail(f"did not take the last rows within {self._close_seconds:.0f} s")

    def _run(self) -> None:
        try:
            while (row := self._rows.get()) is not None:
                if self._failed.is_set():
                    return
                self._sink.write(row)
            self._sink.close()
        except Exception as error:
            self._fail(f"fails ({type(error).__name__}: {one_line(error)})")

    def _fail(self, reason: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            self._on_failure(f"{type(self._sink).__name__} {reason} and is left out from here on; training goes on")
            self._reported.set()
