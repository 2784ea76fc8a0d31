"""A trainer's dealings with the other processes of its run: meeting before each step, and noticing who is lost."""

import contextlib
import faulthandler
import json
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


def _is_of_collective(error: RuntimeError) -> bool:
    if isinstance(error, NonFiniteError | PeerLost | UserError | torch.OutOfMemoryError):
        return False
    if isinstance(error, torch.distributed.DistError):
        return True
    return any(word in str(error).lower() for word in _COLLECTIVE_WORDS)
