"""What every rank is doing right now, written by a thread that goes on while the training thread is busy.

One JSON object a line in `heartbeat/rank{rank}.jsonl`, one line every `interval_seconds`:

| field | meaning |
|---|---|
| unix_time_seconds | when the row was written |
| rank, host, pid | which process wrote it |
| process_start | when that process started, in clock ticks since its machine did; null where /proc does not say |
| parallel_mode | `none`, `ddp`, `fsdp` or `hsdp`: how this process shares the model with others |
| interval_seconds | time between two rows; much longer silence means that the process is gone or frozen |
| status | `running`; the last row says `finished`, `stopped` (before the last step, as it was asked to) or `failed` |
| step | optimizer steps done |
| phase | one of PHASES; `wait` for the other processes, `other` between two of them |
| phase_seconds | how long the phase has lasted so far |
| expected_phase_seconds | median of the phase's recent times; null before it has ended once |
| stall_limit_seconds | longer than this, without compilers, the phase is stalled; null where no limit is known yet |
| typical_seconds | for each phase, the median of its last 200 times |
| recent_seconds | for each phase, the median of its last 5 times |
| total_seconds | for each phase, all of its time in this process |
| compiling | a compiler of PyTorch or Triton is on the training thread's stack |
| compile_seconds | how much of phase_seconds has passed until a compiler was last there; no limit counts it |
| where | the training thread's innermost Python frames |
| memory_allocated_bytes, memory_reserved_bytes | CUDA: at the last phase change; CPU: resident now, null |
| loss | nats per token, the last one known |
| tokens_per_second | the last rate known |

On a GPU the phases are host times: work that was queued in `forward` may be waited for in `optimizer`.
"""

import math
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from trifocal.runlog.jsonl import JsonLinesWriter, Row, logger
from trifocal.runlog.memory_statistics import MemoryStatistics, memory_statistics
from trifocal.runlog.proc import process_start
from trifocal.runlog.stacks import running_threads, where

PHASES = (
    "start",
    "data",
    "wait",
    "forward",
    "backward",
    "optimizer",
    "checkpoint",
    "evaluate",
    "telemetry",
    "sample",
    "compile",
    "other",
)
# Who waits for another process is not the one that is stuck.
_UNLIMITED = ("start", "compile", "wait")
_TYPICAL_TIMES = 200
_RECENT_TIMES = 5


class Phases(Protocol):
    """Whoever is told in which phase a step is: the heartbeat, or what stands before it."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Say that the training thread is in this phase until the block ends."""


class Heartbeat:
    """Writes what one rank is doing; a context manager around the whole of training.

    >>> with Heartbeat(run_directory / "heartbeat", rank=0) as heartbeat:
    ...     with heartbeat.phase("forward"):
    ...         loss = model(tokens, targets)
    ...     heartbeat.update(step=1, loss=loss.item())

    Phases nest: leaving one returns to the one around it, whose clock starts afresh. Nothing here raises into
    training: a full disk is warned about once.

    Args:
        path: The run's `heartbeat` folder.
        rank: Rank of this process.
        interval_seconds: Time between two rows.
        device: Where the model is, for the memory figures.
        parallel_mode: `parallel.mode` as it was resolved.
        minimum_stall_seconds: No phase counts as stalled before this age.
        stall_factor: Nor before this many times its median, nor before twice its longest recent time.
        clock: Seconds since any moment; tests have one of their own.

    Raises:
        ValueError: If interval_seconds, minimum_stall_seconds or stall_factor is not positive.
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
        stall_factor: float = 10.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        for name, value in (
            ("interval_seconds", interval_seconds),
            ("minimum_stall_seconds", minimum_stall_seconds),
            ("stall_factor", stall_factor),
        ):
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive number, got {value}")
        self.path = Path(path) / f"rank{rank}.jsonl"
        self.rank = rank
        self.interval_seconds = interval_seconds
        self.minimum_stall_seconds = minimum_stall_seconds
        self.stall_factor = stall_factor
        self.parallel_mode = parallel_mode
        self.observers: list[Callable[[Row], None]] = []
        """Called with every row in the heartbeat's thread; the watchdog is one."""
        self._clock = clock
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._phases = [("start", self._clock())]
        self._times: dict[str, deque[float]] = {}
        self._totals: dict[str, float] = {}
        self._progress: Row = {"step": 0, "loss": None, "tokens_per_second": None}
        self._compiling_in: tuple[str, float] | None = None
        self._compiled_until = 0.0
        self._compiled_entry: tuple[str, float] | None = None
        self._memory: MemoryStatistics | None = None
        self._memory_is_old = True
        self._stop = threading.Event()
        self._process_start = process_start(os.getpid())
        self._last_status = "finished"
        self._main_thread = threading.get_ident()
        self._older_threads = running_threads()
        self._thread = threading.Thread(target=self._run, name="trifocal-heartbeat", daemon=True)
        self._warned = False

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Say that the training thread is in this phase until the block ends.

        Args:
            name: One of PHASES.

        Raises:
            ValueError: If the name is not one of PHASES.
        """
        if name not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {name!r}")
        return _Phase(self, name)

    def _enter(self, name: str) -> float:
        entered = self._clock()
        with self._lock:
            self._add_total(entered)
            self._phases.append((name, entered))
        if self._memory_is_old:
            self._sample_memory()
        return entered

    def _leave(self, name: str, entered: float) -> None:
        left = self._clock()
        if self._memory_is_old:
            self._sample_memory()
        with self._lock:
            self._add_total(left)
            self._phases.pop()
            outer = self._phases[-1][0]
            # After its first phase the process has started.
            self._phases[-1] = ("other" if outer == "start" else outer, left)
            times = self._times.get(name)
            if times is None:
                times = self._times[name] = deque(maxlen=_TYPICAL_TIMES)
            times.append(left - entered)

    def update(
        self, *, step: int | None = None, loss: float | None = None, tokens_per_second: float | None = None
    ) -> None:
        """Report progress; what is not given keeps its last value.

        Args:
            step: Optimizer steps done.
            loss: Nats per token, a number on the host.
            tokens_per_second: Of the whole run, all ranks together.
        """
        with self._lock:
            if step is not None:
                self._progress["step"] = step
            if loss is not None:
                self._progress["loss"] = loss
            if tokens_per_second is not None:
                self._progress["tokens_per_second"] = tokens_per_second

    def close(self, status: str = "finished") -> None:
        """Stop the thread and write a last row.

        Args:
            status: What the last row says: `finished`, `stopped` or `failed`.
        """
        if self._stop.is_set():
            return
        self._last_status = status
        self._stop.set()
        if self._thread.ident is None:
            self._run()
        else:
            self._thread.join()

    def current_phase(self) -> tuple[str, float]:
        """The phase and the moment of the clock at which it began: together they name one entry into it."""
        with self._lock:
            return self._phases[-1]

    def snapshot(self, status: str = "running") -> Row:
        """The row that describes this moment; see the module for its fields."""
        with self._lock:
            # Before anything else, and while no phase can change: what follows may take a while on a busy machine.
            now, unix_time = self._clock(), time.time()
            phase, since = entry = self._phases[-1]
            times = {name: list(values) for name, values in self._times.items()}
            totals = dict(self._totals)
            progress = dict(self._progress)
        totals[phase] = totals.get(phase, 0.0) + now - since
        own_times = times.get(phase)
        place, compiling = where(self._main_thread, others=self._older_threads)
        compile_seconds = self._note_compiler(entry, now, compiling)
        if self._device.type == "cpu":
            self._memory = memory_statistics(self._device)
        memory = self._memory
        return {
            "unix_time_seconds": round(unix_time, 3),
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_start": self._process_start,
            "parallel_mode": self.parallel_mode,
            "interval_seconds": self.interval_seconds,
            "status": status,
            "phase": phase,
            "phase_seconds": _rounded(now - since),
            "expected_phase_seconds": _rounded(statistics.median(own_times)) if own_times else None,
            "stall_limit_seconds": None if compiling else self._stall_limit(phase, own_times),
            "typical_seconds": {name: _rounded(statistics.median(values)) for name, values in times.items()},
            "recent_seconds": {
                name: _rounded(statistics.median(values[-_RECENT_TIMES:])) for name, values in times.items()
            },
            "total_seconds": {name: _rounded(value) for name, value in totals.items()},
            "compiling": compiling,
            "compile_seconds": _rounded(compile_seconds),
            "where": place,
            "memory_allocated_bytes": memory.allocated_bytes if memory else None,
            "memory_reserved_bytes": memory.reserved_bytes if memory else None,
            **progress,
        }

    def _note_compiler(self, entry: tuple[str, float], now: float, compiling: bool) -> float:
        """How much of this entry into a phase has passed until a compiler was last on the stack.

        It was there until now also if the last look saw it and this one does not: nobody looked in between.
        """
        with self._lock:
            if compiling or self._compiling_in == entry:
                self._compiled_entry, self._compiled_until = entry, now
            self._compiling_in = entry if compiling else None
            return self._compiled_until - entry[1] if self._compiled_entry == entry else 0.0

    def _stall_limit(self, phase: str, own_times: list[float] | None) -> float | None:
        if phase in _UNLIMITED or not own_times:
            return None
        # The longest time may be one compilation among many short steps: it counts twice, not stall_factor times.
        learned = max(self.stall_factor * statistics.median(own_times), 2 * max(own_times))
        return _rounded(max(self.minimum_stall_seconds, learned))

    def _add_total(self, now: float) -> None:
        phase, since = self._phases[-1]
        self._totals[phase] = self._totals.get(phase, 0.0) + now - since

    def _sample_memory(self) -> None:
        # In the training thread, once an interval: the CUDA allocator's lock may be held by a thread that
        # hangs in the driver, and waiting for it would silence the heartbeat exactly when it is needed.
        self._memory_is_old = False
        if self._device.type != "cpu":
            self._memory = memory_statistics(self._device)

    def _run(self) -> None:
        # One open file to the end: the run's folder may be moved, and is not made anew for the last row.
        with JsonLinesWriter(self.path) as writer:
            while not self._stop.is_set():
                self._beat(writer, "running")
                self._memory_is_old = True
                self._stop.wait(self.interval_seconds)
            self._beat(writer, self._last_status)

    def _beat(self, writer: JsonLinesWriter, status: str) -> None:
        try:
            row = self.snapshot(status)
            writer.append(row)
            for observe in self.observers:
                observe(row)
        except Exception:
            if not self._warned:
                self._warned = True
                logger.warning("the heartbeat of rank %d misses beats", self.rank, exc_info=True)

    def __enter__(self) -> Self:
        self._main_thread = threading.get_ident()
        self._older_threads = running_threads()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("finished" if error is None else "failed")


class _Phase(AbstractContextManager[None]):
    """One stay in a phase. Not a generator: after a step's arithmetic each line of Python comes from cold memory."""

    __slots__ = ("_entered", "_heartbeat", "_name")

    def __init__(self, heartbeat: Heartbeat, name: str) -> None:
        self._heartbeat, self._name, self._entered = heartbeat, name, 0.0

    def __enter__(self) -> None:
        self._entered = self._heartbeat._enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeat._leave(self._name, self._entered)


def _rounded(seconds: float) -> float:
    return round(seconds, 4)
