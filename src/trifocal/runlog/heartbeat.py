"""The state of every rank, written by a thread that runs while the training thread is busy.

`heartbeat/rank{rank}.jsonl` has one JSON object a line, one line every `interval_seconds`; docs/diagnostics.md has its
fields. On a GPU the phases are host times: the host may wait in `optimizer` for work that it queued in `forward`.
"""

import gc
import math
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Protocol, Self

import torch

from trifocal.runlog.jsonl import JsonLinesWriter, Row, logger
from trifocal.runlog.memory_statistics import MemoryStatistics, memory_statistics
from trifocal.runlog.proc import process_start
from trifocal.runlog.progress import duration

PHASES = (
    *("start", "data", "wait", "forward", "backward", "optimizer"),
    *("checkpoint", "evaluate", "telemetry", "sample", "compile", "other"),
)
# A phase without a limit; a process that waits for another is not the one that is stuck.
_UNLIMITED = ("start", "compile", "wait")
STALL_FACTOR = 10.0
_TYPICAL_TIMES = 200
# A beat that is this much late could not be made: nothing ran.
PAUSE_SECONDS = 10.0
_one_look_at_a_time = threading.Lock()
_COMPILER_FILES = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py", "/triton/compiler/")
HEARTBEAT_FIELDS = frozenset(
    (
        *("unix_time_seconds", "host", "pid", "process_start", "interval_seconds", "status", "phase", "phase_seconds"),
        *("expected_phase_seconds", "stall_limit_seconds", "total_seconds", "compiling", "where", "step"),
        "memory_allocated_bytes",
    )
)


class Phases(Protocol):
    """The receiver of a step's phases: the heartbeat, or a tracer in front of it."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Mark the block as this phase of the training thread."""


class Heartbeat:
    """Writes the state of one rank into the run's `heartbeat` folder; a context manager around the whole of training.

    Phases nest: after an inner phase the clock of the outer one starts anew. No phase counts as stalled before
    `minimum_stall_seconds`, STALL_FACTOR times its median, or twice its longest recent time, nor for the time in which
    the process was stopped. Nothing here raises into training: a full disk gives one warning.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int = 0,
        interval_seconds: float = 5.0,
        *,
        device: torch.device | str = "cpu",
        parallel_mode: str = "none",
        minimum_stall_seconds: float = 120.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.path = Path(path) / f"rank{rank}.jsonl"
        self.rank = rank
        self.interval_seconds = interval_seconds
        self.minimum_stall_seconds = minimum_stall_seconds
        self.observers: list[Callable[[Row], None]] = []
        """Functions called with every row in the heartbeat's thread, such as the watchdog's."""
        self._parallel_mode = parallel_mode
        self._clock = clock
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._phases = [("start", self._clock())]
        self._times: dict[str, deque[float]] = {}
        self._totals: dict[str, float] = {}
        self._last_beat: float | None = None
        self._resumed, self._paused_seconds, self._untold_seconds = -math.inf, 0.0, 0.0
        self._progress: Row = {"step": 0, "loss": None, "tokens_per_second": None}
        self._memory: MemoryStatistics | None = None
        self._memory_is_old = True
        self._stop = threading.Event()
        self._process_start = process_start(os.getpid())
        self._last_status = "finished"
        self._main_thread = threading.get_ident()
        self._older_threads = running_threads()
        self._thread = threading.Thread(target=self._run, name="trifocal-heartbeat", daemon=True)
        self._warned = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark the block as this phase of the training thread, one of PHASES."""
        if name not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {name!r}")
        entered = self._clock()
        with self._lock:
            self._notice_pause(entered)
            self._add_total(entered)
            self._phases.append((name, entered))
        try:
            yield
        finally:
            left = self._clock()
            if self._memory_is_old and self._device.type != "cpu":
                # In the training thread, once an interval: a thread that hangs in the driver may hold the CUDA
                # allocator's lock, and a heartbeat that waits for it would fall silent when it is needed.
                self._memory, self._memory_is_old = memory_statistics(self._device), False
            with self._lock:
                self._notice_pause(left)
                self._add_total(left)
                self._phases.pop()
                outer = self._phases[-1][0]
                # `start` ends with the first phase.
                self._phases[-1] = ("other" if outer == "start" else outer, left)
                if entered >= self._resumed:
                    self._times.setdefault(name, deque(maxlen=_TYPICAL_TIMES)).append(left - entered)

    def update(
        self, *, step: int | None = None, loss: float | None = None, tokens_per_second: float | None = None
    ) -> None:
        """Report progress, the rate that of all ranks together; an argument that is None keeps its last value."""
        given = {"step": step, "loss": loss, "tokens_per_second": tokens_per_second}
        with self._lock:
            self._progress |= {name: value for name, value in given.items() if value is not None}

    def close(self, status: str = "finished") -> None:
        """Stop the thread and write a last row with a status: `finished`, `stopped` or `failed`."""
        if self._stop.is_set():
            return
        self._last_status = status
        self._stop.set()
        if self._thread.ident is None:
            self._run()
        else:
            self._thread.join()

    def current_phase(self) -> tuple[str, float]:
        """The phase and its beginning by the clock: together they identify one entry into the phase."""
        with self._lock:
            return self._phases[-1]

    def seconds_run(self) -> float:
        """The clock without the times in which nothing ran."""
        with self._lock:
            now = self._clock()
            self._notice_pause(now)
            return now - self._paused_seconds

    def snapshot(self, status: str = "running") -> Row:
        """The row of this moment."""
        with self._lock:
            # First, and while no phase can change: the rest may take a while on a busy machine.
            now, unix_time = self._clock(), time.time()
            phase, since = entry = self._phases[-1]
            times = {name: list(values) for name, values in self._times.items()}
            totals = dict(self._totals)
            progress = dict(self._progress)
        totals[phase] = totals.get(phase, 0.0) + now - since
        own_times = times.get(phase)
        place, compiling = where(self._main_thread, others=self._older_threads)
        with self._lock:
            if compiling and self._phases[-1] == entry:
                # The time of a compiler is not the phase's: its clock starts anew.
                self._add_total(now)
                self._phases[-1] = phase, now
        if self._device.type == "cpu":
            self._memory = memory_statistics(self._device)
        memory = self._memory
        return {
            "unix_time_seconds": round(unix_time, 3),
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_start": self._process_start,
            "parallel_mode": self._parallel_mode,
            "interval_seconds": self.interval_seconds,
            "status": status,
            "phase": phase,
            "phase_seconds": round(now - since, 4),
            "expected_phase_seconds": round(statistics.median(own_times), 4) if own_times else None,
            "stall_limit_seconds": None if compiling else self._stall_limit(phase, own_times),
            "total_seconds": {name: round(value, 4) for name, value in totals.items()},
            "compiling": compiling,
            "where": place,
            "memory_allocated_bytes": memory.allocated_bytes if memory else None,
            "memory_reserved_bytes": memory.reserved_bytes if memory else None,
            **progress,
        }

    def _stall_limit(self, phase: str, own_times: list[float] | None) -> float | None:
        if phase in _UNLIMITED or not own_times:
            return None
        # The longest time may be one compilation among many short steps, so its factor is 2, not STALL_FACTOR.
        learned = max(STALL_FACTOR * statistics.median(own_times), 2 * max(own_times))
        return round(max(self.minimum_stall_seconds, learned), 4)

    def _add_total(self, now: float) -> None:
        phase, since = self._phases[-1]
        self._totals[phase] = self._totals.get(phase, 0.0) + now - since

    def _notice_pause(self, now: float) -> None:
        """Where no thread ran, as while the process is stopped, the time is not the phase's: its clock starts anew."""
        if self._last_beat is None:
            return
        seconds = now - max(self._last_beat, self._phases[-1][1])
        if seconds < self.interval_seconds + PAUSE_SECONDS:
            return
        self._untold_seconds += seconds
        self._paused_seconds += seconds
        self._add_total(now - seconds)
        self._phases[-1] = self._phases[-1][0], now
        self._resumed = now

    def _run(self) -> None:
        # The file stays open: if the run's folder is moved, the last row must not create it again.
        with JsonLinesWriter(self.path) as writer:
            while not self._stop.is_set():
                self._beat(writer, "running")
                self._memory_is_old = True
                self._stop.wait(self.interval_seconds)
            self._beat(writer, self._last_status)

    def _beat(self, writer: JsonLinesWriter, status: str) -> None:
        try:
            with self._lock:
                self._notice_pause(self._clock())
                # A disk that lets this thread wait is no pause of the others.
                self._last_beat = None
                paused, self._untold_seconds = self._untold_seconds, 0.0
            if paused:
                # Not with the lock: whatever shows the line may ask for the seconds that were run.
                logger.warning(
                    "rank %d: nothing ran for %s; the process was stopped (Ctrl-Z, a suspended job or container), or C "
                    "code kept the interpreter's lock",
                    self.rank,
                    duration(paused),
                )
            row = self.snapshot(status)
            writer.append(row)
            for observe in self.observers:
                observe(row)
        except Exception:
            if not self._warned:
                self._warned = True
                logger.warning("the heartbeat of rank %d misses beats", self.rank, exc_info=True)
        finally:
            self._last_beat = self._clock()

    def __enter__(self) -> Self:
        try:
            self._thread.start()
        except BaseException:
            # A signal may raise here while the thread runs already, and would write into a folder that is deleted.
            self.close("failed")
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close("finished" if error is None else "failed")


def running_threads() -> frozenset[int]:
    """Every thread that runs Python code now, including those unknown to `threading`."""
    with _no_collection():
        return frozenset(sys._current_frames())


@contextmanager
def _no_collection() -> Iterator[None]:
    """For every look at frames of other threads.

    Python 3.11 may collect garbage while it makes the object of a frame, as `f_back` does. What that calls may let the
    other thread leave the frame. The object then points to memory of something else, and the process dies.
    """
    with _one_look_at_a_time:
        collects = sys.version_info < (3, 12) and gc.isenabled()
        try:
            if collects:
                gc.disable()
            yield
        finally:
            if collects:
                gc.enable()


def where(main_thread: int, depth: int = 3, *, others: frozenset[int] = frozenset()) -> tuple[str, bool]:
    """`function (file.py:line) < caller (file.py:line) < …`, the innermost frames of the training thread, and whether
    it compiles. The autograd engine's threads, for which it waits, come first: they are unknown to `threading`, and not
    in `others`.
    """
    known = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    known |= others | {main_thread}
    named: list[str] = []
    compiling = False
    threads = _threads()
    del threads[threading.get_ident()]
    unknown = [place for ident, stack in threads.items() if ident not in known for place in stack]
    for code, line in unknown + threads.get(main_thread, []):
        compiling = compiling or any(part in code.co_filename for part in _COMPILER_FILES)
        if len(named) < depth:
            named.append(f"{code.co_name} ({Path(code.co_filename).name}:{line})")
    return " < ".join(named), compiling


def all_stacks() -> str:
    """The Python stacks of all threads as text, each innermost frame first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, stack in _threads().items():
        lines.append(f"Thread {names.get(ident, ident)} (most recent call first):")
        lines += [f'  File "{code.co_filename}", line {line} in {code.co_name}' for code, line in stack]
        lines.append("")
    return "\n".join(lines)


def _threads() -> dict[int, list[tuple[CodeType, int]]]:
    """Code and line of every frame of each thread. No frame leaves this function, not even its own: it keeps its local
    variables alive, tensors too.
    """
    found: dict[int, list[tuple[CodeType, int]]] = {}
    frame: FrameType | None
    with _no_collection():
        for ident, frame in sys._current_frames().items():
            stack = found[ident] = []
            while frame is not None:
                stack.append((frame.f_code, frame.f_lineno))
                frame = frame.f_back
    return found
