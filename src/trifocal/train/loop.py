"""The training loop: one trainer, for every device and every run."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from trifocal.data import Loader, Tokenizer, make_loader, merge_states
from trifocal.distributed import Processes, whole_model
from trifocal.errors import UserError
from trifocal.models import DecoderLM
from trifocal.runlog import Heartbeat, Progress, Watchdog, write_backends
from trifocal.runlog.standard_streams import LastingStreams
from trifocal.train.checkpoint_folders import set_aside_later
from trifocal.train.compiling import CompileNotes
from trifocal.train.coordinator import StepCoordinator
from trifocal.train.determinism import deterministic_operations
from trifocal.train.evaluate import Evaluation
from trifocal.train.evaluator import Evaluator
from trifocal.train.export import WEIGHTS, export_weights
from trifocal.train.graphs import make_graphs
from trifocal.train.lock import RunLock
from trifocal.train.meter import Meter
from trifocal.train.micro_batch import packed_documents
from trifocal.train.nonfinite import NonFiniteError, stop_non_finite, weights_are_finite
from trifocal.train.optimizer import make_optimizer
from trifocal.train.parallelize import parallelize_model
from trifocal.train.random_state import random_state, restore_random_state, seed_everything
from trifocal.train.records import open_records
from trifocal.train.replaced_run import delete_replaced
from trifocal.train.result import TrainResult
from trifocal.train.run_config import RunConfig
from trifocal.train.run_directory import OpenDirectory, save_config
from trifocal.train.saving import Saver
from trifocal.train.schedule import is_due, learning_rate_of
from trifocal.train.step import StepResult, train_step
from trifocal.train.stop import StopSignals
from trifocal.train.tracing import make_tracer


class Trainer:
    """One run, in one process of it. Parallelism wraps `loss_function` around `model` from outside."""

    def __init__(self, config: RunConfig, directory: Path, processes: Processes, tokenizer: Tokenizer) -> None:
        self.config, self.directory, self.tokenizer = config, directory, tokenizer
        self.processes, self.device = processes, processes.device
        seed_everything(config.run.seed)
        # Without the weights that its parts would draw for themselves: a billion of them take many seconds.
        with torch.device("meta"):
            self.model = DecoderLM(config.model)
        self.model.to_empty(device=self.device)
        self.model.init_weights(config.run.seed)
        self.model.set_activation_checkpointing(*config.train.checkpointed_layers(config.model.num_layers))
        self.parallel, self.mode_note = parallelize_model(self.model, config, processes)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        if config.train.compile:
            self.model.compile_training()
        self.graphs, self.graphs_note = make_graphs(self.parallel, self.model, config.train, self.device)
        self.compile_notes = CompileNotes(config.train.compile or self.graphs is not None, self._log_event)
        self.accumulation = config.train.global_batch_size // (config.train.micro_batch_size * processes.size)
        # One process on a CPU: elsewhere every call must have the same shape, or launches cost more than work.
        self.split_rows = self.device.type == "cpu" and processes.size == 1 and not config.train.compile
        self.step = 0
        self.result: StepResult | None = None
        self.pending: StepResult | None = None
        self.loss: float | None = None
        self.evaluation: Evaluation | None = None
        self.sample: str | None = None
        self.said_skipped = False
        self.coordinator = StepCoordinator(processes)
        self.saver = Saver(
            config,
            directory / "checkpoints",
            processes,
            self.model,
            self.optimizer,
            event=self._event,
            say=self._log_event,
        )
        self.evaluator = Evaluator(
            config, directory, tokenizer, processes, model=self.model, parallel=self.parallel, keep=self._keep
        )
        self.loader: Loader = processes.run_on_all(self._make_loader)
        self.data_position = self.loader.state_dict()
        # With the hub's branch as the commit that it found: the saved config names it, so that a resumed run reads it.
        self.config = replace(config, data=self.loader.config)

    def run(self, notes: list[str], checkpoint: Path | None, lock: RunLock) -> TrainResult:
        """Train to the last step or the first signal.

        Args:
            notes: What is said when the run begins.
            checkpoint: Where it goes on from; None for a new run.
            lock: Of the run's folder, taken by rank 0.

        Raises:
            UserError: If the data fail, the last checkpoint cannot be written, or the run's folder is moved or deleted.
        """
        self.lock = lock
        config, directory, total = self.config, self.directory, self.config.train.steps
        self.came_from = checkpoint
        with ExitStack() as stack:
            stack.callback(self.loader.close)
            stack.enter_context(deterministic_operations(config.run.deterministic))
            if checkpoint is not None:
                self._restore(checkpoint)
            resume_step = self.step if checkpoint is not None else None
            rank, first = self.processes.rank, self.processes.is_rank0
            self.open_directory = stack.enter_context(OpenDirectory(directory)) if first else None
            self.streams = stack.enter_context(LastingStreams())
            self.metrics = stack.enter_context(
                open_records(config, directory, device=self.device, resume_step=resume_step, first=first)
            )
            stack.callback(self._say_lost_streams)
            self.heartbeat = stack.enter_context(
                Heartbeat(
                    directory / "heartbeat",
                    rank,
                    config.log.heartbeat_seconds,
                    device=self.device,
                    parallel_mode=self.parallel.mode,
                )
            )
            stack.enter_context(
                Watchdog(self.heartbeat, directory, device=self.device, on_stall=self._report_stalled_phase)
            )
            self.progress = stack.enter_context(Progress(total, start_step=self.step, enabled=first))
            self.meter = Meter(config, self.device, self.processes.size)
            self.signals = stack.enter_context(StopSignals())
            if self.graphs is not None:
                stack.callback(self.graphs.release)
            stack.enter_context(
                self.coordinator.watched(self.heartbeat, directory, config.parallel.silence_seconds, self._event)
            )
            self.tracer = make_tracer(
                config,
                directory,
                self.processes,
                model=self.model,
                parallel=self.parallel,
                optimizer=self.optimizer,
                phases=self.heartbeat,
                step=self.step,
                say=self._log_event,
            )
            for note in [*notes, *filter(None, [self.mode_note, self.graphs_note])]:
                self._log_event("note", note)
            stack.enter_context(self.tracer)
            self.heartbeat.update(step=self.step)
            # From here on the random generators are where the checkpoint left them.
            if checkpoint is not None:
                restore_random_state(self.restored_random_state)
            while self.step < total and self._step():
                pass
            if self.meter.steps == 0:
                self._started()
            self._end()
            skipped = set().union(*self.processes.gather(self.loader.bad_documents.skipped))
            finished = self.step >= total
            if not finished:
                self.heartbeat.close("stopped")
        return TrainResult(directory, self.step, finished, self.loss, self.evaluation, self.sample, first, len(skipped))

    def _step(self) -> bool:
        """Take a step, unless all processes are to stop before it."""
        config = self.config
        step = self.step + 1
        if self.open_directory is not None and not self.open_directory.is_there():
            # All stop together; `_check_directory` says why.
            self.signals.received = "the run's folder is gone"
        rate = learning_rate_of(config, step)
        with self._steps_kept():
            data = self.coordinator.next_step(
                self.loader, self.accumulation, self.signals, self.heartbeat, last=step == config.train.steps
            )
        if data is None:
            return False
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        documents = [packed_documents(batch) for batch in data.batches]
        if data.documents is not None and (config.train.compile or self.graphs is not None):
            # Code for a kind of micro-batch is made in all processes at once: each waits for the slowest anyway.
            documents = data.documents
        with self.compile_notes.step(step, documents) as forward_phase, self.tracer.step(step) as phases:
            self.result = self.pending = train_step(
                step,
                data.batches,
                loss_function=self.parallel.module,
                optimizer=self.optimizer,
                device=self.device,
                config=config.train,
                heartbeat=phases,
                before_backward=self._check_finite,
                forward_phase=forward_phase,
                split_rows=self.split_rows,
                parallel=self.parallel,
                total_targets=data.total_targets,
                documents=documents,
                graphs=self.graphs,
            )
        self.learning_rate = rate
        self.step, self.data_position = step, data.position
        self.meter.steps += 1
        self.heartbeat.update(step=step)
        self._after_step(self.pending)
        return True

    def _say_lost_streams(self) -> None:
        for sentence in self.streams.news():
            self._event("output_lost", sentence, "warning")

    def _after_step(self, result: StepResult) -> None:
        """Log, evaluate, sample and save where it is time to; each of them first makes sure that the step was sound."""
        self._say_lost_streams()
        config, step = self.config, self.step
        last = step == config.train.steps
        if self.meter.steps == 1:
            self._check_finite()
            self._started()
        if last or self.meter.steps == 1:
            self._keep("choice of backends", lambda: write_backends(self.directory / "backends.json"))
        if last or step == 1 or step % config.log.interval_steps == 0:
            self._check_finite()
            self._log(result)
        with self._steps_kept():
            self._look(result, last=last)
        self.saver.take_written(wait=False)
        if is_due(step, config.checkpoint.interval_steps, last):
            self._save(must_succeed=last)

    def _look(self, result: StepResult, *, last: bool) -> None:
        """Evaluate, look at the attention and sample, where it is time to."""
        config, step = self.config, self.step
        if is_due(step, config.evaluate.interval_steps, last):
            self._check_finite()
            with self.meter.paused(), self.heartbeat.phase("evaluate"):
                self._evaluate()
            if self.evaluator.has_telemetry and config.log.telemetry_interval_steps:
                with self.meter.paused(), self.heartbeat.phase("telemetry"):
                    self.evaluator.picture_attention(step)
        if self.evaluator.has_telemetry and is_due(step, config.log.telemetry_interval_steps, last):
            self._check_finite()
            with self.meter.paused(), self.heartbeat.phase("telemetry"):
                self.evaluator.measure_attention(step, result.batches[0], self.metrics)
        if is_due(step, config.log.sample_interval_steps, last):
            self._check_finite()
            with self.meter.paused(), self.heartbeat.phase("sample"):
                self.sample = self.evaluator.sample(step)

    def _started(self) -> None:
        """The first step has ended in all processes: what this start replaces is not needed any more.

        Not before: a start that fails leaves the run, its configuration and its checkpoints as they were.
        """

        def replace_what_was() -> str:
            self._check_directory()
            save_config(self.config, self.directory)
            if self.came_from is not None:
                set_aside_later(self.came_from)
            return delete_replaced(self.directory, self.lock)

        with self.heartbeat.phase("wait"):
            self.processes.agree(None)
        with self.meter.paused(), self.heartbeat.phase("checkpoint"):
            left = self.processes.run_on_rank0(replace_what_was)
        if left and self.processes.is_rank0:
            self._log_event("not_deleted", left, "warning")
        self.processes.begin()
        if self.came_from is not None and (self.directory / WEIGHTS).is_dir() and self.step < self.config.train.steps:
            self._log_event("note", f"{self.directory / WEIGHTS} is of an earlier step until this run ends")

    def _check_finite(self) -> None:
        """Stop if the last step was not finite. Its update was withheld on the device, its gradients are still there.

        Called between the next step's forward and backward: the device has work while the host waits for the flag.
        """
        result, self.pending = self.pending, None
        if result is not None and not result.finite.wait():
            self._stop_non_finite(result)

    def _check_weights(self) -> None:
        """Stop if the last update made weights that are not finite: no later step is there to show it."""
        if self.result is not None and not weights_are_finite(self.model, self.processes):
            self._stop_non_finite(self.result, of_weights=True)

    def _stop_non_finite(self, result: StepResult, *, of_weights: bool = False) -> NoReturn:
        error = stop_non_finite(
            result,
            self.model,
            self.learning_rate,
            self.directory / "dumps",
            self.processes,
            self.parallel,
            of_weights=of_weights,
        )
        self.metrics.event(result.step, "non_finite", str(error), severity="error")
        raise error

    def _log(self, result: StepResult) -> None:
        self.loss = result.loss.item()
        graph_bytes = 0 if self.graphs is None else self.graphs.memory_bytes
        row = self.meter.row(self.step, result, self.learning_rate, self.loader.latency(), graph_bytes)
        bad = self.loader.bad_documents
        self.metrics.write("train", self.step, loss=self.loss, skipped_documents=len(bad.skipped), **row)
        if bad.first and not self.said_skipped:
            self.said_skipped = True
            self._log_event("documents_skipped", f"bad documents are skipped; the first: {bad.first}", "warning")
        self.heartbeat.update(step=self.step, loss=self.loss, tokens_per_second=row["tokens_per_second"])
        self.progress.update(self.step, loss=self.loss, tokens_per_second=row["tokens_per_second"])
        if self.processes.is_rank0:
            for sentence in self.coordinator.slow_news(self.heartbeat):
                self._log_event("rank_slow", sentence, "warning")

    def _evaluate(self) -> None:
        self.evaluator.read_validation_text()
        self.evaluation = self.evaluator.evaluate()
        self.metrics.write("evaluation", self.step, **self.evaluation.row())
        bits = self.evaluation.bits_per_byte
        self.progress.message(
            f"step {self.step}: validation loss {self.evaluation.validation_loss:.4f}"
            + (f", {bits:.4f} bits per byte" if bits is not None else "")
        )

    def _keep(self, what: str, write: Callable[[], None]) -> None:
        """Write what is good to have, in rank 0: a full disk costs it, never the run."""
        if self.open_directory is None or not self.open_directory.is_there():
            return
        try:
            write()
        except OSError as error:
            self._log_event("write_failed", f"the {what} of step {self.step} could not be written: {error}", "warning")

    @contextmanager
    def _steps_kept(self) -> Iterator[None]:
        """Around what is not a step: if it fails, the steps since the last checkpoint are saved before the run ends.

        Not where this process alone may have failed: the others would not save with it. Nor where the step was not
        sound: its update was withheld.
        """
        try:
            yield
        except Exception as error:
            alone = self.processes.size == 1
            if isinstance(error, NonFiniteError) or not (alone or isinstance(error, UserError)):
                raise
            if self.meter.steps == 0:
                raise
            try:
                self._end()
            except UserError as failed:
                raise UserError(f"{error}; and {failed}") from error
            if not isinstance(error, UserError):
                error.add_note(f"step {self.step} is saved")
                raise
            raise type(error)(f"{error}; step {self.step} is saved") from error

    def _end(self) -> None:
        """Save the last step, if it is not saved yet, and export its weights."""
        self.saver.take_written(wait=True)
        if self.saver.saved_step != self.step:
            self._save(must_succeed=True)
        folder, whole = self.directory / WEIGHTS, whole_model(self.model, self.processes)

        def export() -> None:
            self._check_directory()
            if whole is not None:
                export_weights(whole, self.tokenizer, folder, step=self.step)

        try:
            self.processes.run_on_rank0(export)
        except OSError as error:
            raise UserError(
                f"step {self.step} is saved, but its weights could not be written to {folder}: {error}; what is there "
                "is of an earlier step, or not whole"
            ) from error

    def _check_directory(self) -> None:
        if self.open_directory is not None:
            self.open_directory.check(self.step, self.saver.saved_step)

    def _save(self, *, must_succeed: bool) -> None:
        self._check_finite()
        self.processes.run_on_rank0(self._check_directory)
        with self.meter.paused(), self.heartbeat.phase("checkpoint"):
            self._check_weights()
            self.saver.save(self.step, self._state, must_succeed=must_succeed)

    def _state(self) -> dict[str, Any]:
        """What this process remembers besides model and optimizer; all processes call this."""
        position = merge_states(self.processes.gather(self.data_position))
        return {"step": self.step, "loss": self.loss, "data": position, "random": random_state()}

    def _restore(self, path: Path) -> None:
        state = self.saver.restore(path)
        with _process_state_read(path):
            self.loader.load_state_dict(state["data"])
            self.data_position = state["data"]
            self.step, self.loss = state["step"], state["loss"]
            restore_random_state(state["random"])
        self.restored_random_state = state["random"]

    def _make_loader(self) -> Loader:
        config = self.config
        return make_loader(
            config.data,
            tokenizer=self.tokenizer,
            sequence_length=config.train.sequence_length,
            batch_size=config.train.micro_batch_size,
            vocab_size=config.model.vocab_size,
            rank=self.processes.rank,
            world_size=self.processes.size,
            on_stall=self._report_stall,
        )

    def _report_stall(self, seconds: float, activity: str) -> None:
        message = f"data stall: no batch for {seconds:.0f} s; the data thread is {activity}"
        self._log_event("data_stall", message, "warning", stall_seconds=seconds)

    def _report_stalled_phase(self, message: str, folder: Path) -> None:
        self._log_event("stalled", message, "warning")

    def _event(self, name: str, message: str, severity: str = "info", **values: float) -> None:
        self.metrics.event(self.step, name, message, severity=severity, **values)

    def _log_event(self, name: str, message: str, severity: str = "info", **values: float) -> None:
        self._event(name, message, severity, **values)
        self.progress.message(f"{'note' if severity == 'info' else severity.upper()}: {message}")
        if severity != "info" and not self.processes.is_rank0:
            print(f"rank {self.processes.rank}: {severity.upper()}: {message}", file=sys.stderr, flush=True)


@contextmanager
def _process_state_read(path: Path) -> Iterator[None]:
    """Around what takes a process state apart that JSON and the manifest call intact, whoever has written it."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"the position in {path} cannot be read ({what}): another version of Trifocal has written it, or it was "
            "edited; go on from another checkpoint with --checkpoint"
        ) from error
