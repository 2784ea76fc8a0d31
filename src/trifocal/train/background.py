"""Checkpoints that are written while training goes on."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trifocal.distributed import Processes
from trifocal.models import ModelConfig
from trifocal.train.checkpoint import collect_state, write_checkpoint


@dataclass(frozen=True)
class Written:
    """The end of writing a checkpoint.

    Attributes:
        step: Its step.
        path: Its folder; None if it could not be written.
        error: The reason, if not.
        seconds: Duration of the writing.
        blocked_seconds: The part of it in which training waited.
    """

    step: int
    path: Path | None
    error: OSError | None
    seconds: float
    blocked_seconds: float


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread, from a copy in the host's memory.

    The thread has a process group of its own, so that its collectives do not mix with those of training.

    Args:
        processes: This process among those of the run; all make their writer at the same time.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes.new_group()
        self._thread: threading.Thread | None = None
        self._written: Written | None = None
        self._failure: BaseException | None = None

    def start(
        self,
        root: Path,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        model_config: ModelConfig,
        process_state: dict[str, Any],
    ) -> None:
        """Copy everything and begin to write; arguments as `save_checkpoint`. The one before must have been taken."""
        begin = time.perf_counter()
        state = collect_state(model, optimizer, copy=True)
        blocked_seconds = time.perf_counter() - begin

        def write() -> None:
            path, error = None, None
            try:
                path = write_checkpoint(
                    root,
                    step,
                    state=state,
                    model_config=model_config,
                    process_state=process_state,
                    processes=self._processes,
                )
            except OSError as caught:
                error = caught
            except BaseException as caught:  # Raised by `take`.
                self._failure = caught
                return
            self._written = Written(step, path, error, time.perf_counter() - begin, blocked_seconds)

        self._thread = threading.Thread(target=write, name="trifocal-checkpoint", daemon=True)
        self._thread.start()

    def take(self, *, wait: bool) -> Written | None:
        """Return how the last writing ended, once.

        Args:
            wait: Wait until it has ended; if False, the result is None while it has not.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        self._thread = None
        written, self._written = self._written, None
        if self._failure is not None:
            raise self._failure
        return written
