"""The engine in its own thread: requests go in through a queue, updates come out on the event loop."""

import asyncio
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from trifocal.inference import CachedModel, Engine, Request, Update
from trifocal.ops.devices import is_out_of_memory
from trifocal.serve.errors import ApiError
from trifocal.serve.metrics import Metrics

_RETRY_SECONDS = 1
# Steps in a row that may find no memory, which a picture may have for a moment: a failed step loses nothing. As many
# failures of any kind make the server unhealthy.
_MAX_FAILURES = 3


class Updates:
    """The updates of one call, as they come."""

    def __init__(self) -> None:
        self._items: list[Update | ApiError] = []
        self._came = asyncio.Event()
        self._began = time.monotonic()
        self._last: dict[tuple[Request, int], float] = {}

    def put(self, item: Update | ApiError) -> None:
        """Add one."""
        self._items.append(item)
        self._came.set()

    async def get(self) -> list[Update]:
        """All that have come since the last call, at least one; ApiError if the engine failed."""
        await self._came.wait()
        self._came.clear()
        items, self._items = self._items, []
        for item in items:
            if isinstance(item, ApiError):
                raise item
        return [item for item in items if isinstance(item, Update)]

    def observe(self, update: Update, metrics: Metrics, now: float) -> None:
        """Count an update that comes now, a time of `time.monotonic`."""
        key = update.request, update.sample
        if key in self._last:
            metrics.between_tokens.observe(now - self._last[key])
        else:
            metrics.first_token.observe(now - self._began)
            metrics.prompt_tokens += len(update.request.prompt) if update.sample == 0 else 0
        self._last[key] = now
        metrics.new_tokens += update.token is not None
        if update.completion is not None:
            metrics.ended[update.completion.finish_reason] += 1


class Worker:
    """Runs an engine, for calls of an event loop, of which `max_open` sequences may run and wait; `before_step` is
    called by its thread before each step.
    """

    def __init__(
        self, engine: Engine, model: CachedModel, *, max_open: int, before_step: Callable[[], None] = lambda: None
    ) -> None:
        self._engine, self._model, self._most = engine, model, max_open
        self._before_step = before_step
        self._inbox: queue.SimpleQueue[tuple[str, Sequence[Request]]] = queue.SimpleQueue()
        self._calls: dict[Request, Updates] = {}
        self._sequences = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._failures = 0
        # Until then the event loop has no new updates, a time of `time.monotonic`.
        self._rest_until = 0.0
        self.metrics = Metrics()

    def start(self) -> None:
        """Begin to work for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the step that it is in."""
        self._inbox.put(("stop", ()))
        self._thread.join()

    @property
    def failed(self) -> bool:
        """Whether the engine has ended, or its last steps all failed."""
        return not self._thread.is_alive() or self._failures >= _MAX_FAILURES

    @property
    def gauges(self) -> dict[str, int]:
        """Requests and pages in use, as of the last step."""
        waiting = min(self._engine.num_waiting, len(self._calls))
        pages = self._model.pages
        return {
            "requests_waiting": waiting,
            "requests_running": len(self._calls) - waiting,
            "pages_free": pages.num_free,
            "pages": pages.num_pages,
        }

    @contextmanager
    def open(self, requests: Sequence[Request]) -> Iterator[Updates]:
        """Run requests; the end of the context cancels those that have not ended. ApiError if too many wait already."""
        if not self._thread.is_alive():
            raise ApiError(503, "the model failed for good; the server must be started anew")
        sequences = sum(request.samples for request in requests)
        if self._sequences + sequences > self._most:
            self.metrics.ended["refused"] += 1
            raise ApiError(
                429, "too many requests are waiting; try again later", headers={"Retry-After": str(_RETRY_SECONDS)}
            )
        updates = Updates()
        self._sequences += sequences
        self._calls |= dict.fromkeys(requests, updates)
        self._inbox.put(("submit", requests))
        try:
            yield updates
        finally:
            self._sequences -= sequences
            left = [request for request in requests if request in self._calls]
            for request in left:
                del self._calls[request]
            if left:
                self.metrics.ended["cancelled"] += len(left)
                self._inbox.put(("cancel", left))

    def _deliver(self, updates: Sequence[Update], ended: Sequence[Request]) -> None:
        """Hand updates to their calls, on the event loop; it has as much rest afterwards as their answers take.

        Python runs one thread at a time. Without rest the loop would send every token by itself and keep the engine
        from starting the next step; so tokens come together where there are many.
        """
        assert self._loop is not None
        begin = time.monotonic()
        for name in ("reused_tokens", "guessed_tokens", "right_tokens"):
            setattr(self.metrics, name, getattr(self._engine, name))
        for update in updates:
            if (call := self._calls.get(update.request)) is not None:
                call.observe(update, self.metrics, begin)
                call.put(update)
        for request in ended:
            self._calls.pop(request, None)
        # Behind the tasks that have been woken.
        self._loop.call_soon(self._rest, begin)

    def _rest(self, begin: float) -> None:
        now = time.monotonic()
        self._rest_until = now + (now - begin)

    def _fail(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if (call := self._calls.pop(request, None)) is not None:
                self.metrics.ended["error"] += 1
                call.put(ApiError(500, "the model failed; the server's log says why"))

    def _work(self) -> None:
        assert self._loop is not None
        # Sequences of each request that have not ended.
        left: dict[Request, int] = {}
        # Not delivered yet.
        updates: list[Update] = []
        ended: list[Request] = []
        while True:
            try:
                # Updates that are not delivered yet must not wait for a command.
                for command, requests in self._commands(wait=not updates):
                    if command == "stop":
                        return
                    if command == "submit":
                        left |= {request: request.samples for request in requests}
                        self._engine.submit(*requests)
                    else:
                        self._cancel(requests, left)
                self._before_step()
                for update in self._engine.step():
                    updates.append(update)
                    left[update.request] -= update.completion is not None
                    if not left[update.request]:
                        del left[update.request]
                        ended.append(update.request)
                self._failures = 0
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                self._failures += 1
                if is_out_of_memory(error) and self._failures < _MAX_FAILURES:
                    continue
                failed = list(left)
                # If this fails too, the thread ends.
                try:
                    self._cancel(failed, left)
                finally:
                    self._loop.call_soon_threadsafe(self._deliver, updates, ended)
                    self._loop.call_soon_threadsafe(self._fail, failed)
                    updates, ended = [], []
            if updates and (self._engine.idle or time.monotonic() >= self._rest_until):
                # No more until these are delivered.
                self._rest_until = math.inf
                self._loop.call_soon_threadsafe(self._deliver, updates, ended)
                updates, ended = [], []

    def _cancel(self, requests: Sequence[Request], left: dict[Request, int]) -> None:
        for request in requests:
            left.pop(request, None)
            self._engine.cancel(request)

    def _commands(self, *, wait: bool) -> Iterator[tuple[str, Sequence[Request]]]:
        """Commands that have come; may wait for one while the engine has nothing to do."""
        while True:
            try:
                yield self._inbox.get(block=wait and self._engine.idle)
            except queue.Empty:
                return
