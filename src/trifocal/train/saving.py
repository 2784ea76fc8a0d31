"""Saving a run: checkpoints at once or in the background, and the exported weights at its end."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trifocal.data import merge_states
from trifocal.distributed import DistributedContext, gather_full_model
from trifocal.errors import UserError
from trifocal.models import ModelConfig
from trifocal.train.checkpoint.export import WEIGHTS, export_weights
from trifocal.train.checkpoint.folders import prune_checkpoints
from trifocal.train.checkpoint.random_state import random_state
from trifocal.train.checkpoint.save_load import collect_state, save_checkpoint, write_checkpoint
from trifocal.train.nonfinite import FiniteGuard, NonFiniteError
from trifocal.train.run_logger import RunLogger
from trifocal.train.setup import TrainSetup


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

    def __init__(self, processes: DistributedContext) -> None:
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


class Saver:
    """Writes the checkpoints of a run, and its weights when it ends. All processes call each method.

    Args:
        setup: The run.
        log: Takes the events.
        guard: Checks before each save that step and weights are finite.
    """

    def __init__(self, setup: TrainSetup, log: RunLogger, guard: FiniteGuard) -> None:
        self._section, self._state = setup.config.checkpoint, setup.state
        self._directory, self._tokenizer = setup.directory, setup.tokenizer
        self._processes, self._model = setup.processes, setup.model
        self._sequence_length = setup.config.train.sequence_length
        self._parts: dict[str, Any] = {
            "model": setup.model,
            "optimizer": setup.optimizer,
            "model_config": setup.config.model,
        }
        self._log, self._guard = log, guard
        self._background = BackgroundWriter(self._processes) if self._section.asynchronous else None
        self._saved_step = setup.state.resume_step or 0

    def save(self, *, must_succeed: bool) -> None:
        """Write a checkpoint of the last step.

        Args:
            must_succeed: For the last checkpoint: it is written at once. If another one fails, an error is logged and
                training goes on.

        Raises:
            UserError: If the run's folder is gone, or a checkpoint that must succeed could not be written.
            NonFiniteError: If the last step, or a weight, is not finite.
        """
        self._guard.check_step()
        self._processes.run_on_rank0(self.check_directory)
        with self._log.pause("checkpoint"):
            self._guard.check_weights()
            self._write(must_succeed=must_succeed)

    def report_written(self, *, wait: bool = False) -> None:
        """Log the end of a checkpoint that was written in the background.

        Args:
            wait: Wait until it has ended; if False, nothing happens while it is being written.
        """
        written = self._background.take(wait=wait) if self._background is not None else None
        if written is not None:
            self._report(written, must_succeed=False)

    def end(self) -> None:
        """Save the last step, if it is not saved yet, and export its weights.

        Raises:
            UserError: If either cannot be written, or the run's folder is gone.
            NonFiniteError: As `save`.
        """
        self.report_written(wait=True)
        if self._saved_step != self._state.step:
            self.save(must_succeed=True)
        folder, whole = self._directory / WEIGHTS, gather_full_model(self._model, self._processes)

        def export() -> None:
            self.check_directory()
            if whole is not None:
                export_weights(
                    whole, self._tokenizer, folder, step=self._state.step, sequence_length=self._sequence_length
                )

        try:
            self._processes.run_on_rank0(export)
        except OSError as error:
            raise UserError(
                f"step {self._state.step} is saved, but its weights could not be written to {folder}: {error}; "
                "files there are of an earlier step, or not whole"
            ) from error

    @contextmanager
    def ended_on_error(self) -> Iterator[None]:
        """Around work that is no step: if it fails, the steps since the last checkpoint are saved before the run ends.

        Not where this process alone may have failed: the others would not save with it. Nor where the last step was
        not finite: its update was withheld.
        """
        try:
            yield
        except Exception as error:
            alone = self._processes.size == 1
            if isinstance(error, NonFiniteError) or not (alone or isinstance(error, UserError)):
                raise
            if self._state.steps_here == 0:
                raise
            try:
                self.end()
            except UserError as failed:
                raise UserError(f"{error}; and {failed}") from error
            if not isinstance(error, UserError):
                error.add_note(f"step {self._state.step} is saved")
                raise
            raise type(error)(f"{error}; step {self._state.step} is saved") from error

    def check_directory(self) -> None:
        """In rank 0, refuse to write into a folder that is not the run's any more; elsewhere nothing happens.

        Raises:
            UserError: If the folder was moved, deleted or replaced; names the present place.
        """
        if self._log.open_directory is not None:
            self._log.open_directory.check(self._state.step, self._saved_step)

    def _process_state(self) -> dict[str, Any]:
        """The part of a checkpoint beside model and optimizer."""
        position = merge_states(self._processes.gather(self._state.data_position))
        return {
            "step": self._state.step,
            "loss": self._state.loss,
            "data": position,
            "random": random_state(),
        }

    def _write(self, *, must_succeed: bool) -> None:
        root, step, process_state = self._directory / "checkpoints", self._state.step, self._process_state()
        # One at a time.
        self.report_written(wait=True)
        if self._background is not None and not must_succeed:
            self._background.start(root, step, process_state=process_state, **self._parts)
            return
        begin = time.perf_counter()
        written = Written(step, None, None, 0.0, 0.0)
        try:
            path = save_checkpoint(root, step, process_state=process_state, processes=self._processes, **self._parts)
            seconds = time.perf_counter() - begin
            written = replace(written, path=path, seconds=seconds, blocked_seconds=seconds)
        except OSError as error:
            written = replace(written, error=error)
        self._report(written, must_succeed=must_succeed)

    def _report(self, written: Written, *, must_succeed: bool) -> None:
        if written.path is None:
            message = f"the checkpoint of step {written.step} could not be written: {written.error}"
            if must_succeed:
                self._log.event("checkpoint_failed", message, "error")
                raise UserError(f"{message}; checkpoints that were complete before still are") from written.error
            message += "; training goes on, the last complete one stays"
            self._log.log_event("checkpoint_failed", message, "error")
            return
        self._saved_step = written.step
        self._log.event(
            "checkpoint_saved",
            f"{written.path.name} saved in {written.seconds:.1f} s",
            save_seconds=written.seconds,
            blocked_seconds=written.blocked_seconds,
        )
        if self._processes.is_rank0:
            keep_last, keep_every = self._section.keep_last, self._section.keep_every_steps
            try:
                prune_checkpoints(written.path.parent, keep_last=keep_last, keep_every_steps=keep_every)
            except OSError as error:
                self._log.log_event("not_deleted", f"an old checkpoint could not be deleted: {error}", "warning")
