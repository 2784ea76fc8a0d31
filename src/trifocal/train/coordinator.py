"""Keeping the processes of a run in step: they agree on each step before it begins, and notice when one is lost."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from trifocal.data import Batch, Loader
from trifocal.data.prefetch import Stopped
from trifocal.distributed.peers import PeerLost, PeerMonitor
from trifocal.distributed.processes import DistributedContext
from trifocal.errors import UserError, first_sentence
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.runlog.proc import process_state
from trifocal.train.choice_teacher import ChoiceTeacher
from trifocal.train.nonfinite import NonFiniteError
from trifocal.train.stop import StopSignals

# PyTorch has no one type for the error of a failed collective: one of these words is in its text.
_COLLECTIVE_WORDS = ("gloo", "nccl", "connection", "process group", "timed out", "timeout", "socket", "watchdog")


class StepData(NamedTuple):
    """The data of one step: micro-batches, and the loader's state after them; and of all processes valid targets, for
    each micro-batch the most packed documents, and queries that teach each layer's choice, if it is taught.
    """

    batches: list[Batch]
    position: dict[str, Any]
    total_targets: int
    documents: list[int]
    eligible: list[float] | None = None


class _NextStep(NamedTuple):
    batches: list[Batch]
    position: dict[str, Any]
    error: Exception | None
    answer: Callable[[], list[float]]
    documents: Callable[[], list[float]]


class StepCoordinator:
    """Keeps the processes of a run in step; with a single process everything is immediate.

    `signals` holds the signal that asks this process to stop; `teacher` counts the queries that teach the choice, if it
    is taught. The `context` processes that share each sequence have, and count, the same rows.
    """

    def __init__(
        self,
        processes: DistributedContext,
        signals: StopSignals,
        teacher: ChoiceTeacher | None = None,
        context: int = 1,
    ) -> None:
        self._processes, self._signals, self._teacher, self._context = processes, signals, teacher, context
        self._ahead: _NextStep | None = None
        self._begun = self._stop_elsewhere = self._stop_agreed = False

    def stop_requested(self) -> bool:
        """Whether a process is asked to stop and there is a step to save: this one, or another one seconds ago."""
        return self._signals.something_to_save and (self._signals.received is not None or self._stop_elsewhere)

    def agree_to_stop(self) -> bool:
        """Whether any process is asked to stop; all call this at the same place, and then take no further step."""
        self._stop_agreed = self._stop_agreed or self._processes.sum([self.stop_requested()])[0] > 0
        return self._stop_agreed

    def next_step(
        self, loader: Loader, count: int, heartbeat: Heartbeat, *, step: int = 0, last: bool
    ) -> StepData | None:
        """The next step's `count` micro-batches, agreed on by the hosts a step ahead, unless it is the `last`, or there
        is one process: a step waits neither for other hosts nor for a device. None if all processes are to stop, but
        never before the first step.
        """
        current = self._ahead or self._read_ahead(loader, count, heartbeat, step)
        with heartbeat.phase("wait"):
            summed, stop, failed, *counts = current.answer()
            documents = current.documents()
            if self._begun and (stop or self._stop_agreed):
                return None
            if failed:
                self._processes.raise_on_all(current.error)
        self._begun = True
        ahead = self._processes.size > 1 and not last
        self._ahead = self._read_ahead(loader, count, heartbeat, step + 1) if ahead else None
        most = [int(number) for number in documents]
        eligible = [count / self._context for count in counts]
        return StepData(current.batches, current.position, int(summed) // self._context, most, eligible or None)

    def _read_ahead(self, loader: Loader, count: int, heartbeat: Heartbeat, step: int) -> _NextStep:
        batches: list[Batch] = []
        error: Exception | None = None
        with heartbeat.phase("data"):
            try:
                batches = [next(loader) for _ in range(count)]
            except Stopped:  # The step is not taken: all learn of the request below.
                pass
            except Exception as caught:  # Raised by `next_step` in all processes, so that none waits for this one.
                error = caught
        targets = sum(batch.valid_targets for batch in batches)
        # Every process sends as many numbers, even if it has no data.
        eligible = [] if self._teacher is None else self._teacher.eligible(batches, step)
        stop = self._signals.received is not None or self._stop_elsewhere
        answer = self._processes.async_all_reduce([targets, stop, error is not None, *eligible])
        documents = [batch.packed_documents for batch in batches] or [0] * count
        largest = self._processes.async_all_reduce(documents, "max")
        return _NextStep(batches, loader.state_dict(), error, answer, largest)

    @contextlib.contextmanager
    def watched(
        self, heartbeat: Heartbeat, silence_seconds: float, event: Callable[[str, str, str], None]
    ) -> Iterator[None]:
        """Watch the other processes, and raise PeerLost, with the one at fault, where an exchange with them fails. One
        that is silent for `silence_seconds` is lost; `event` gets name, sentence and severity, in any thread.
        """

        def end(sentence: str) -> None:
            try:
                event("rank_lost", sentence, "error")
            finally:
                # This process is ended now: it has failed, and is not dead without a word.
                heartbeat.close("failed")

        def note_stop() -> None:
            self._stop_elsewhere = True

        peers = PeerMonitor(
            self._processes,
            lambda: heartbeat.snapshot() | {"stop": self.stop_requested()},
            _exists,
            silence_seconds=silence_seconds,
            on_lost=end,
            on_stop=note_stop,
        )
        with peers:
            try:
                yield
            except RuntimeError as error:
                if self._processes.size == 1 or not _is_collective_error(error):
                    raise
                what = f"an exchange with the other processes failed: {first_sentence(error)}"
                lost = peers.explain() or PeerLost(f"{what}; the others: {peers.table()}")
                event("rank_lost", str(lost), "error")
                raise lost from error


def _exists(process: int) -> bool:
    # A killed process stays a zombie (Z) until its parent waits for it.
    return process_state(process) not in ("X", "x", "Z")


def _is_collective_error(error: RuntimeError) -> bool:
    if isinstance(error, NonFiniteError | PeerLost | UserError | torch.OutOfMemoryError):
        return False
    if isinstance(error, torch.distributed.DistError):
        return True
    return any(word in str(error).lower() for word in _COLLECTIVE_WORDS)
