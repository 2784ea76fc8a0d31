"""When a run is saved: at once or in the background, what is kept, and what is said when it fails."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from trifocal.distributed import Processes
from trifocal.errors import UserError
from trifocal.models import DecoderLM
from trifocal.train.background import BackgroundWriter, Written
from trifocal.train.checkpoint import load_checkpoint, save_checkpoint
from trifocal.train.checkpoint_folders import prune_checkpoints
from trifocal.train.run_config import RunConfig


class Say(Protocol):
    """Tells a person, and the metrics, of an event."""

    def __call__(self, name: str, message: str, severity: str = "info", **values: float) -> None:
        """Say it."""


class Saver:
    """Writes the checkpoints of a run.

    Args:
        config: The run.
        root: Folder of its checkpoints.
        processes: This process among those of the run.
        model: What is saved.
        optimizer: Of its parameters.
        event: Writes an event into the metrics.
        say: Tells a person too.
    """

    def __init__(
        self,
        config: RunConfig,
        root: Path,
        processes: Processes,
        model: DecoderLM,
        optimizer: torch.optim.Optimizer,
        *,
        event: Say,
        say: Say,
    ) -> None:
        self._section, self._last_step = config.checkpoint, config.train.steps
        self._root, self._processes = root, processes
        self._parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "model_config": config.model}
        self._event, self._log_event = event, say
        self._background = BackgroundWriter(processes) if config.checkpoint.asynchronous else None
        self.saved_step = 0
        """Step of the last complete checkpoint."""

    def save(self, step: int, state: Callable[[], dict[str, Any]], *, must_succeed: bool) -> None:
        """Write a checkpoint.

        Args:
            step: Of the run.
            state: Gives what this process remembers besides model and optimizer.
            must_succeed: The last one: not left to a thread. Any other may fail: that is loud, and training goes on.

        Raises:
            UserError: If one that must succeed could not be written.
        """
        process_state = state()
        # One at a time; and the last one is not left to a thread.
        self.take_written(wait=True)
        if self._background is not None and not must_succeed:
            self._background.start(self._root, step, process_state=process_state, **self._parts)
            return
        begin = time.perf_counter()
        written = Written(step, None, None, 0.0, 0.0)
        try:
            path = save_checkpoint(
                self._root, step, process_state=process_state, processes=self._processes, **self._parts
            )
            seconds = time.perf_counter() - begin
            written = replace(written, path=path, seconds=seconds, blocked_seconds=seconds)
        except OSError as error:
            written = replace(written, error=error)
        self._report(written, must_succeed=must_succeed)

    def take_written(self, *, wait: bool) -> None:
        """Report on what the background has written since.

        Args:
            wait: Until it has.
        """
        written = self._background.take(wait=wait) if self._background is not None else None
        if written is not None:
            self._report(written, must_succeed=False)

    def restore(self, path: Path) -> dict[str, Any]:
        """Load a checkpoint into model and optimizer.

        Returns:
            What this process remembered.

        Raises:
            UserError: If it is damaged, of another model, or past the run's last step.
        """
        state = load_checkpoint(path, processes=self._processes, **self._parts)
        self.saved_step = state["step"]
        if self.saved_step > self._last_step:
            raise UserError(f"{path} is of step {self.saved_step}, past train.steps {self._last_step}")
        return state

    def _report(self, written: Written, *, must_succeed: bool) -> None:
        if written.path is None:
            message = f"the checkpoint of step {written.step} could not be written: {written.error}"
            if must_succeed:
                self._event("checkpoint_failed", message, "error")
                raise UserError(f"{message}; checkpoints that were complete before still are") from written.error
            self._log_event("checkpoint_failed", f"{message}; training goes on, the last complete one stays", "error")
            return
        self.saved_step = written.step
        self._event(
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
                self._log_event("not_deleted", f"an old checkpoint could not be deleted: {error}", "warning")
