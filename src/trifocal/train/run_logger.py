"""Output of a run while it trains: metrics, heartbeat, progress, events."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import Any

import torch

from trifocal.models import flops_per_token, parameter_count
from trifocal.paths import shell_path
from trifocal.runlog.environment import usable_cores, write_environment
from trifocal.runlog.hardware import peak_bf16_flops
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.runlog.memory_statistics import memory_statistics
from trifocal.runlog.metrics import MetricsWriter
from trifocal.runlog.progress import Progress, try_print
from trifocal.runlog.sinks import make_sinks
from trifocal.runlog.stalls.watchdog import Watchdog
from trifocal.train.config.toml import to_toml
from trifocal.train.run_folder import read_mark
from trifocal.train.setup import TrainSetup
from trifocal.train.step.step import StepResult
from trifocal.train.validation_loss import Evaluation


class RunLogger:
    """Writes metrics and events of a run, from `open_logger`, and prints those for the user."""

    def __init__(self, setup: TrainSetup, metrics: MetricsWriter, heartbeat: Heartbeat, progress: Progress) -> None:
        self._state, self._rank = setup.state, setup.processes.rank
        self._loader, self._graphs = setup.loader, setup.graphs
        self._directory, self._mark = setup.directory, read_mark(setup.directory)
        self.metrics, self.heartbeat, self.progress = metrics, heartbeat, progress
        on_stall = functools.partial(self.log_event, "stalled", severity="warning")
        self.watchdog = Watchdog(heartbeat, setup.directory, on_stall=on_stall)
        config = setup.config
        self._device = setup.device
        self._row_tokens = config.train.sequence_length
        self._tokens_per_step = config.train.global_batch_size * self._row_tokens
        self._model_config, self._trains_all = config.model, config.train.only == "all"
        peak = peak_bf16_flops(torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else "")
        self._peak_flops = None if peak is None else peak * setup.processes.size
        # Since the last row.
        self._since, self._last_step, self._paused_seconds = heartbeat.seconds_run(), setup.state.step, 0.0
        self._skipped_reported = False

    def event(self, name: str, message: str, severity: str = "info", **values: float) -> None:
        """Write an event of the step, named in docs/diagnostics.md; its severity is "info", "warning" or "error"."""
        self.metrics.event(self._state.step, name, message, severity=severity, **values)

    def log_event(self, name: str, message: str, severity: str = "info", **values: float) -> None:
        """Write an event, and print it: in rank 0, and, unless it is a note, on standard error of any rank."""
        self.event(name, message, severity, **values)
        self.progress.message(f"{'note' if severity == 'info' else severity.upper()}: {message}")
        if severity != "info" and self._rank != 0:
            try_print(f"rank {self._rank}: {severity.upper()}: {message}", sys.stderr)

    def introduce(self, setup: TrainSetup) -> None:
        """Print five lines before the first step: device, model, data, folder, and how to watch."""
        config, processes = setup.config, setup.processes.size
        if setup.device.type == "cuda":
            device = torch.cuda.get_device_name(setup.device) + (f", {processes} processes" if processes > 1 else "")
        else:
            device = f"CPU, {usable_cores()} cores"
        model, rows, folder = config.model, config.train.global_batch_size, shell_path(setup.directory)
        millions = parameter_count(model) / 1e6
        layers = f"{model.num_layers} layer{'s'[: model.num_layers != 1]} of width {model.dim}"
        kinds = ", ".join(dict.fromkeys(model.attention_of_layers))
        for name, text in {
            "device": f"{device}, {config.train.precision}",
            "model": f"{layers}, {millions:.1f} M parameters, {kinds} attention",
            "data": f"{config.data.name}, {config.train.sequence_length:,} tokens a row, {rows:,} rows a step",
            "folder": f"{folder}, {config.train.steps:,} steps",
            "watch": f"trifocal watch {folder}",
        }.items():
            self.progress.message(f"{name:8}{text}")

    @contextmanager
    def pause(self, phase: str) -> Iterator[None]:
        """Name the block's phase for the heartbeat, and leave its time out of the rates: it is not training."""
        begin = self.heartbeat.seconds_run()
        with self.heartbeat.phase(phase):
            yield
        self._paused_seconds += self.heartbeat.seconds_run() - begin

    def log_first_batch(self) -> None:
        """Log how long the first batch took, and print it where somebody waited."""
        seconds = self._loader.first_wait
        log = self.log_event if seconds >= 1 else self.event
        log("first_batch", f"the first batch came after {seconds:.1f} s")

    def log_step(self, result: StepResult) -> None:
        """Write the train row of the last step, which is known to be finite; waits for the device."""
        step, bad = self._state.step, self._loader.bad_documents
        loss = self._state.loss = result.loss.item()
        now, (wait_p50, wait_p95) = self.heartbeat.seconds_run(), self._loader.latency()
        step_seconds = (now - self._since - self._paused_seconds) / (step - self._last_step)
        self._since, self._last_step, self._paused_seconds = now, step, 0.0
        tokens_per_second = self._tokens_per_step / step_seconds
        memory = memory_statistics(self._device)
        # The allocator does not count recorded graphs.
        graph_bytes = 0 if self._graphs is None else self._graphs.memory_bytes
        row: dict[str, Any] = {
            "loss": loss,
            "skipped_documents": len(bad.skipped),
            "learning_rate": result.learning_rate,
            "gradient_norm": result.gradient_norm.item(),
            "tokens_per_second": tokens_per_second,
            "step_seconds": step_seconds,
            "data_wait_seconds_p50": wait_p50,
            "data_wait_seconds_p95": wait_p95,
            # Not from the step: the batch may have changed at a resume.
            "tokens_seen": self._state.data_position["sample_index"] * self._row_tokens,
            **self._epochs(result.batches[-1].epochs),
            "memory_allocated_bytes": memory.allocated_bytes + graph_bytes,
            "memory_reserved_bytes": memory.reserved_bytes,
            "memory_peak_bytes": memory.peak_allocated_bytes + graph_bytes,
        }
        if result.choice is not None:
            # A layer without eligible queries has neither loss nor recall.
            losses, recalls = result.choice.T.tolist()
            row["choice_loss"] = sum(losses)
            row["choice_recall"] = [round(recall, 5) if recall else None for recall in recalls]
        if result.divergence is not None:
            row["divergence"] = result.divergence.item()
        if self._peak_flops is not None:
            # Attention crosses no border of a document, and nothing goes back through what is frozen.
            flops = flops_per_token(
                self._model_config, [length for batch in result.batches for length in batch.document_lengths]
            )
            executed, dense = flops.executed_training, flops.dense_equivalent_training
            if not self._trains_all:
                executed, dense = flops.executed_forward, flops.dense_equivalent_forward
            row["executed_mfu"] = tokens_per_second * executed / self._peak_flops
            row["dense_equivalent_mfu"] = tokens_per_second * dense / self._peak_flops
        self.metrics.write("train", step, **row)
        if bad.first and not self._skipped_reported:
            self._skipped_reported = True
            self.log_event("documents_skipped", f"bad documents are skipped; the first: {bad.first}", "warning")
        self.heartbeat.update(step=step, loss=loss, tokens_per_second=tokens_per_second)
        self.progress.update(step, loss=loss, tokens_per_second=tokens_per_second, divergence=row.get("divergence"))

    def _epochs(self, epochs: tuple[int, ...]) -> dict[str, int]:
        """The fields of a train row for the complete passes over each source."""
        if len(epochs) == 1:
            return {"epoch": epochs[0]}
        return {f"epoch/{source}": passes for source, passes in zip(self._loader.config.sources, epochs, strict=True)}

    def log_evaluation(self, evaluation: Evaluation) -> None:
        """Write the evaluation row of the last step, and print it."""
        step, bits = self._state.step, evaluation.bits_per_byte
        row = asdict(evaluation)
        for source, own in row.pop("of_sources").items():
            row |= {f"{name}/{source}": own[name] for name in ("validation_loss", "bits_per_byte")}
        self.metrics.write("evaluation", step, **row)
        parts = [f"{source} {own.validation_loss:.4f}" for source, own in evaluation.of_sources.items()]
        self.progress.message(
            f"step {step}: validation loss {evaluation.validation_loss:.4f}"
            + (f" ({', '.join(parts)})" if parts else "")
            + (f", {bits:.4f} bits per byte" if bits is not None else "")
        )

    def write_optional(self, what: str, write: Callable[[], None]) -> None:
        """Write, in rank 0, a file that the run can do without: a full disk gives a warning that names it."""
        if self._rank != 0 or not self.folder_is_there():
            return
        try:
            write()
        except OSError as error:
            message = f"the {what} of step {self._state.step} could not be written: {error}"
            self.log_event("write_failed", message, "warning")

    def report_data_stall(self, seconds: float, activity: str) -> None:
        """Log that no batch has come for this long, and the data thread's activity."""
        message = f"data stall: no batch for {seconds:.0f} s; the data thread is {activity}"
        self.log_event("data_stall", message, "warning", stall_seconds=seconds)

    def folder_is_there(self) -> bool:
        """Whether the folder at the run's path is the one in which it began."""
        try:
            return read_mark(self._directory) == self._mark
        except OSError:
            # A file system that does not answer may still have the folder.
            return True


def open_logger(setup: TrainSetup, stack: ExitStack) -> RunLogger:
    """Open the files of a run, and start the heartbeat and its watchdog, until the stack is closed."""
    config, directory, processes = setup.config, setup.directory, setup.processes
    metrics, resume_step = MetricsWriter(None), setup.state.resume_step
    if processes.is_rank0:
        write_environment(directory / "env.json", to_toml(config))
        log, values = config.log, asdict(config)
        sinks = make_sinks(log.sink_names(), directory, project=log.project, config=values, resume_step=resume_step)
        metrics = MetricsWriter(directory / "metrics.jsonl", resume_step=resume_step, sinks=sinks)
    stack.enter_context(metrics)
    # A resumed run may have fewer processes: the others' last rows would count as lost ones.
    names = {f"rank{rank}.jsonl" for rank in range(processes.size)}
    for path in (directory / "heartbeat").glob("rank*.jsonl") if processes.is_rank0 else ():
        if path.name not in names:
            with suppress(OSError):
                path.unlink()
    heartbeat = Heartbeat(
        directory / "heartbeat",
        processes.rank,
        config.log.heartbeat_seconds,
        device=setup.device,
        parallel_mode=setup.parallel.mode,
    )
    progress = Progress(
        config.train.steps,
        start_step=setup.state.step,
        enabled=processes.is_rank0,
        clock=heartbeat.seconds_run,
    )
    logger = RunLogger(setup, metrics, heartbeat, progress)
    stack.enter_context(heartbeat)
    stack.enter_context(logger.watchdog)
    stack.enter_context(progress)
    setup.loader.on_stall = logger.report_data_stall
    return logger
