"""Saving a run: checkpoints at once or in the background, and the exported weights at its end."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from trifocal.data.loader import merge_states
from trifocal.distributed.parallel import gather_full_model
from trifocal.errors import UserError
from trifocal.train.checkpoint.export import WEIGHTS, export_weights
from trifocal.train.checkpoint.folders import prune_checkpoints
from trifocal.train.checkpoint.random_state import random_state
from trifocal.train.checkpoint.save_load import collect_state, write_checkpoint
from trifocal.train.nonfinite import FiniteGuard, NonFiniteError
from trifocal.train.run_logger import RunLogger
from trifocal.train.setup import TrainSetup, in_thread
from trifocal.train.step.schedule import last_stable_step

_Written = tuple[Path, float, float]
"""A checkpoint, the seconds that writing it took, and those that training waited for."""


class Saver:
    """Writes the checkpoints of a run, and its weights when it ends; all processes call each method."""

    def __init__(self, setup: TrainSetup, log: RunLogger, guard: FiniteGuard) -> None:
        self._section, self._state = setup.config.checkpoint, setup.state
        self._directory, self._tokenizer = setup.directory, setup.tokenizer
        self._processes, self._model, self._optimizer = setup.processes, setup.model, setup.optimizer
        self._config = setup.config
        self._log, self._guard = log, guard
        # The writing thread has its own process group, so that its collectives do not mix with those of training.
        self._background = self._processes.new_group() if self._section.asynchronous else None
        # The step that is being written in the background.
        self._writing: tuple[int, Future[_Written]] | None = None
        self._saved_step = setup.state.resume_step or 0

    def save(self, *, must_succeed: bool) -> None:
        """Write a checkpoint of the last step; one that fails is logged, or raises UserError if it must succeed."""
        self._guard.check_step()
        self._processes.run_on_rank0(self.check_directory)
        with self._log.pause("checkpoint"):
            self._guard.check_weights()
            self._write(must_succeed=must_succeed)

    def report_written(self, *, wait: bool = False) -> None:
        """Log the end of a checkpoint that was written in the background; only `wait` waits for it."""
        if self._writing is not None and (wait or self._writing[1].done()):
            (step, writing), self._writing = self._writing, None
            self._report(step, writing.result, must_succeed=False)

    def end(self) -> None:
        """Save the last step, if it is not saved yet, and export its weights; UserError if either cannot be written."""
        self.report_written(wait=True)
        if self._saved_step != self._state.step:
            self.save(must_succeed=True)
        folder, whole = self._directory / WEIGHTS, gather_full_model(self._model, self._processes)

        def export() -> None:
            self.check_directory()
            if whole is not None:
                export_weights(
                    whole,
                    self._tokenizer,
                    folder,
                    step=self._state.step,
                    sequence_length=self._config.train.sequence_length,
                )

        try:
            self._processes.run_on_rank0(export)
        except OSError as error:
            raise UserError(
                f"step {self._state.step} is saved, but its weights could not be written to {folder}: {error}; "
                "files there are from an earlier step, or not whole"
            ) from error

    @contextmanager
    def written_on_error(self) -> Iterator[None]:
        """Around the steps: if all processes fail, a checkpoint that is being written is whole before the run ends."""
        try:
            yield
        except Exception as error:
            if self._fails_in_all(error):
                self.report_written(wait=True)
            raise

    def _fails_in_all(self, error: Exception) -> bool:
        return self._processes.size == 1 or isinstance(error, UserError | NonFiniteError)

    @contextmanager
    def ended_on_error(self) -> Iterator[None]:
        """Around work that is no step: if all processes fail, a finite last step is saved before the run ends."""
        try:
            yield
        except Exception as error:
            if isinstance(error, NonFiniteError) or not self._fails_in_all(error) or self._state.steps_here == 0:
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
        """Raise UserError, in rank 0, if the run's folder was moved, deleted or replaced: half a run would result."""
        if not self._log.folder_is_there():
            raise UserError(
                f"{self._directory} was moved, deleted or replaced while its run trained: the run stopped after step "
                f"{self._state.step}, and its last checkpoint is from step {self._saved_step}; if you moved it, "
                "continue with trifocal train --resume NEW_FOLDER"
            )

    def _write(self, *, must_succeed: bool) -> None:
        root, step = self._directory / "checkpoints", self._state.step
        process_state = {
            "step": step,
            "loss": self._state.loss,
            "data": merge_states(self._processes.gather(self._state.data_position)),
            "random": random_state(),
        }
        # One at a time.
        self.report_written(wait=True)
        group = None if must_succeed else self._background
        begin = time.perf_counter()
        state = collect_state(self._model, self._optimizer, copy=group is not None)
        copied = time.perf_counter()

        def write() -> _Written:
            path = write_checkpoint(
                root,
                step,
                state=state,
                model_config=self._config.model,
                process_state=process_state,
                processes=group or self._processes,
            )
            end = time.perf_counter()
            return path, end - begin, (copied if group else end) - begin

        if group is None:
            self._report(step, write, must_succeed=must_succeed)
        else:
            self._writing = step, in_thread(write, "checkpoint")

    def _report(self, step: int, written: Callable[[], _Written], *, must_succeed: bool) -> None:
        """Log what became of the checkpoint of a step."""
        try:
            path, seconds, blocked = written()
        except OSError as error:
            message = f"the checkpoint of step {step} could not be written: {error}"
            if must_succeed:
                self._log.event("checkpoint_failed", message, "error")
                raise UserError(f"{message}; checkpoints that were complete before still are") from error
            message += "; training continues, the last complete one stays"
            self._log.log_event("checkpoint_failed", message, "error")
            return
        self._saved_step = step
        saved = f"{path.name} saved in {seconds:.1f} s"
        self._log.event("checkpoint_saved", saved, save_seconds=seconds, blocked_seconds=blocked)
        if self._processes.is_rank0:
            section, stable = self._section, last_stable_step(self._config)
            try:
                prune_checkpoints(
                    path.parent,
                    keep_last=section.keep_last,
                    keep_every_steps=section.keep_every_steps,
                    keep_step=stable,
                )
            except OSError as error:
                self._log.log_event("not_deleted", f"an old checkpoint could not be deleted: {error}", "warning")
