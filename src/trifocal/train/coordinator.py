"""A trainer's dealings with the other processes of its run: meeting before each step, and noticing who is lost."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trifocal.data import Batch, Loader
from trifocal.distributed import PeerLost, Peers, Processes
from trifocal.errors import UserError
from trifocal.runlog import Heartbeat
from trifocal.runlog.dump import read_answers, write_details, write_stacks
from trifocal.runlog.stall_summary import stall_summary
from trifocal.train.micro_batch import packed_documents
from trifocal.train.nonfinite import NonFiniteError
from trifocal.train.step import valid_targets
from trifocal.train.stop import StopSignals

SLOW_FACTOR = 2.0
SLOW_SECONDS = 0.05
SLOW_LOOKS = 3
"""A process is slow if it takes so many times as long as the others, and so much longer, over its last five steps; and
at so many looks in a row."""
SLOW_AFTER_STEPS = 3
"""The first steps of a process are no measure: libraries warm up, caches fill."""
_OWN_PHASES = ("data", "forward")

# How PyTorch's errors say that a collective failed; it has no one type for them.
_COLLECTIVE_WORDS = ("gloo", "nccl", "connection", "process group", "timed out", "timeout", "socket", "watchdog")


class StepData(NamedTuple):
    """What a step is taken on: its micro-batches, the position in the data after them, and what the processes agree on
    (None for a single process, which knows): the valid targets of the whole global batch, and the most packed documents
    that any process has in each micro-batch."""

    batches: list[Batch]
    position: dict[str, Any]
    total_targets: int | None
    documents: list[int] | None


class _Ahead(NamedTuple):
    batches: list[Batch]
    position: dict[str, Any]
    error: Exception | None
    answer: Callable[[], list[float]]
    documents: Callable[[], list[float]]


class StepCoordinator:
    """Keeps the processes of a run in step; with a single process everything is immediate.

    Args:
        processes: This process among those of the run.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._ahead: _Ahead | None = None
        self._begun = False
        self._first_step = 0
        self._peers: Peers | None = None
        self._slow: set[int] = set()
        self._changing: dict[int, int] = {}

    def next_step(
        self, loader: Loader, count: int, signals: StopSignals, heartbeat: Heartbeat, *, last: bool
    ) -> StepData | None:
        """The next step's micro-batches, agreed on with the other processes: the number of targets, a stop, a failure.

        Exchanges of a few numbers between the hosts. They are begun a step ahead, as soon as the batches are there, so
        that they are over when they are asked for: a step waits neither for the other hosts nor for any device. What is
        read ahead when all stop is read again when the run goes on.

        Args:
            loader: Of this process.
            count: Micro-batches of a step.
            signals: Whether this process was asked to stop.
            heartbeat: Told the phases.
            last: No step follows this one.

        Returns:
            The step's data; None if all processes are to stop before it. One step is taken in any case.

        Raises:
            UserError: If the data failed anywhere; names the rank.
        """
        if self._processes.size == 1:
            if signals.received is not None and self._begun:
                return None
            self._begun = True
            with heartbeat.phase("data"):
                return StepData([next(loader) for _ in range(count)], loader.state_dict(), None, None)
        if not self._begun:
            self._first_step = heartbeat.snapshot()["step"]
        current = self._ahead or self._read_ahead(loader, count, signals, heartbeat)
        with heartbeat.phase("wait"):
            targets, stop, failed = current.answer()
            documents = current.documents()
            if failed:
                self._processes.agree(current.error)
        if stop and self._begun:
            return None
        self._begun = True
        self._ahead = None if last else self._read_ahead(loader, count, signals, heartbeat)
        return StepData(current.batches, current.position, int(targets), [int(number) for number in documents])

    def _read_ahead(self, loader: Loader, count: int, signals: StopSignals, heartbeat: Heartbeat) -> _Ahead:
        batches: list[Batch] = []
        error: Exception | None = None
        with heartbeat.phase("data"):
            try:
                batches = [next(loader) for _ in range(count)]
            except Exception as caught:  # Raised where all processes meet, so that none waits for this one.
                error = caught
        targets = sum(map(valid_targets, batches))
        answer = self._processes.sum_later([targets, signals.received is not None, error is not None])
        # As many numbers from each process, also from one whose data failed.
        documents = [0] * count if error else [packed_documents(batch) for batch in batches]
        return _Ahead(batches, loader.state_dict(), error, answer, self._processes.max_later(documents))

    @contextlib.contextmanager
    def watched(
        self, heartbeat: Heartbeat, directory: Path, silence_seconds: float, event: Callable[[str, str, str], None]
    ) -> Iterator[None]:
        """Watch the other processes, and say whose fault it is when an exchange with them fails.

        Args:
            heartbeat: Of this process.
            directory: The run.
            silence_seconds: After which another process is lost.
            event: Told name, sentence and severity when one is, in any thread.

        Raises:
            PeerLost: Instead of what the exchange raised.
        """

        def leave_traces(sentence: str) -> None:
            event("rank_lost", sentence, "error")
            row = heartbeat.snapshot()
            folder = directory / "dumps" / f"lost_step_{row['step']:08}"
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
            rank = self._processes.rank
            write_stacks(folder, rank)
            page = stall_summary(directory, folder, rank, f"stops: {sentence}", row, read_answers(folder))
            partial = folder / f".summary_rank{rank}.partial"
            partial.write_text(page, encoding="utf-8")
            # Whoever writes last: all tell of the same process.
            partial.replace(folder / "summary.md")
            # A process that is lost leaves no stacks: the others keep the place in the code where it was last seen.
            others = {f"rank{other}": note for other, note in peers.notes().items()}
            summary = {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "what": sentence, **row, "others": others}
            # Before this process is ended: not as long as a dump of a stall may take.
            write_details(folder, rank, summary, self._processes.device, native_seconds=3.0)

        peers = Peers(self._processes, heartbeat.snapshot, silence_seconds=silence_seconds, on_lost=leave_traces)
        self._peers = peers
        with peers:
            try:
                yield
            except RuntimeError as error:
                if self._processes.size == 1 or not _is_of_collective(error):
                    raise
                lost = peers.explain(error) or PeerLost(
                    f"an exchange with the other processes failed: {' '.join(str(error).split())[:300]}; "
                    f"the others: {peers.table()}"
                )
                with contextlib.suppress(OSError):
                    leave_traces(str(lost))
                raise lost from error

    def slow_news(self, heartbeat: Heartbeat) -> list[str]:
        """A sentence for each process that has become slow since the last call, or is so no longer.

        Judged by the phases in which no process waits for another: reading data, and the forward pass. (Under fsdp
        and hsdp the forward pass waits for others too, so that only slow data show.)
        """
        if self._processes.size == 1 or self._peers is None:
            return []
        notes = {**self._peers.notes(), self._processes.rank: heartbeat.snapshot()}
        if min(note["step"] for note in notes.values()) < self._first_step + SLOW_AFTER_STEPS:
            return []
        recent = {rank: note["recent_seconds"] for rank, note in notes.items()}
        busy = {rank: sum(times.get(phase, 0.0) for phase in _OWN_PHASES) for rank, times in sorted(recent.items())}
        news = []
        for rank, seconds in busy.items():
            others = statistics.median_low(busy[other] for other in busy if other != rank)
            slow = seconds > SLOW_FACTOR * others and seconds > others + SLOW_SECONDS
            self._changing[rank] = self._changing.get(rank, 0) + 1 if slow != (rank in self._slow) else 0
            # The notes are of different moments: what is seen once may be one of them.
            if self._changing[rank] >= SLOW_LOOKS:
                self._slow ^= {rank}
                if slow:
                    times = ", ".join(f"{phase} {recent[rank].get(phase, 0.0):.2g} s" for phase in _OWN_PHASES)
                    news.append(f"rank {rank} is slow: {times}, where the others take {others:.2g} s together")
                else:
                    news.append(f"rank {rank} is no longer slow")
        return news


def _is_of_collective(error: RuntimeError) -> bool:
    if isinstance(error, NonFiniteError | PeerLost | UserError | torch.OutOfMemoryError):
        return False
    if isinstance(error, torch.distributed.DistError):
        return True
    return any(word in str(error).lower() for word in _COLLECTIVE_WORDS)
