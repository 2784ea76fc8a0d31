"""A trainer's dealings with the other processes of its run: meeting before each step, and noticing who is lost."""

import contextlib
import faulthandler
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from trifocal.data import Batch, Loader
from trifocal.diagnostics import Heartbeat
from trifocal.distributed import PeerLost, Peers, Processes
from trifocal.errors import UserError
from trifocal.train.nonfinite import NonFiniteError
from trifocal.train.step import valid_targets
from trifocal.train.stop import StopSignals

SLOW_FACTOR = 2.0
SLOW_SECONDS = 0.05
SLOW_LOOKS = 3
"""A process is slow if it takes so many times as long as the others, and so much longer, over its last five steps; and
at so many looks in a row."""
_OWN_PHASES = ("data", "forward")

# How PyTorch's errors say that a collective failed; it has no one type for them.
_COLLECTIVE_WORDS = ("gloo", "nccl", "connection", "process group", "timed out", "timeout", "socket", "watchdog")


class Company:
    """Keeps the processes of a run in step; with a single process everything is immediate.

    Args:
        processes: This process among those of the run.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._stop_agreed = False
        self._peers: Peers | None = None
        self._slow: set[int] = set()
        self._changing: dict[int, int] = {}

    def read(self, loader: Loader, count: int) -> tuple[list[Batch], Exception | None]:
        """This process's micro-batches of a step; an error is handed to `meet`, so that no process waits for it."""
        if self._processes.size == 1:
            return [next(loader) for _ in range(count)], None
        try:
            return [next(loader) for _ in range(count)], None
        except Exception as error:
            return [], error

    def meet(
        self, batches: list[Batch], error: Exception | None, signals: StopSignals, heartbeat: Heartbeat
    ) -> int | None:
        """Meet the other processes before a step: agree on the number of targets, on a stop, on a failure.

        One exchange of three numbers between the hosts; devices are not waited for.

        Returns:
            Valid targets of the whole global batch; None for a single process, which knows.

        Raises:
            UserError: If the data failed anywhere; names the rank.
        """
        if self._processes.size == 1:
            return None
        with heartbeat.phase("wait"):
            targets = sum(map(valid_targets, batches))
            total, stop, failed = self._processes.sum([targets, signals.received is not None, error is not None])
            if failed:
                self._processes.agree(error)
        self._stop_agreed = stop > 0
        return int(total)

    def stopping(self, signals: StopSignals) -> bool:
        """Whether to stop after the step that was taken last: all processes answer alike."""
        return signals.received is not None if self._processes.size == 1 else self._stop_agreed

    @contextlib.contextmanager
    def watched(self, heartbeat: Heartbeat, directory: Path, silence_seconds: float) -> Iterator[None]:
        """Watch the other processes, and say whose fault it is when an exchange with them fails.

        Raises:
            PeerLost: Instead of what the exchange raised.
        """

        def leave_traces(sentence: str) -> None:
            row = heartbeat.snapshot()
            folder = directory / "dumps" / f"lost_step_{row['step']:08}"
            folder.mkdir(parents=True, exist_ok=True)
            rank = self._processes.rank
            with (folder / f"stacks_rank{rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
            summary = {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "what": sentence, "phase": row["phase"], **row}
            (folder / f"rank{rank}.json").write_text(json.dumps(summary, indent=1))

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
        recent = {rank: note["recent_seconds"] for rank, note in self._peers.notes().items()}
        recent[self._processes.rank] = heartbeat.snapshot()["recent_seconds"]
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
