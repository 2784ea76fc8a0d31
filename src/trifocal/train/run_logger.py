"""Output of a run while it trains: metrics, heartbeat, progress, events."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch

from trifocal.data import Latency
from trifocal.models import flops_per_token, parameter_count
from trifocal.paths import shell_path
from trifocal.runlog import (
    Heartbeat,
    MetricsWriter,
    Progress,
    Watchdog,
    earlier_variables,
    make_sinks,
    memory_statistics,
    peak_bf16_flops,
    write_environment,
)
from trifocal.runlog.standard_streams import FaultTolerantStreams
from trifocal.train.config.sections import RunConfig
from trifocal.train.config.toml import to_toml
from trifocal.train.run_folder import OpenDirectory
from trifocal.train.setup import TrainSetup
from trifocal.train.step.step import StepResult
from trifocal.train.validation_loss import Evaluation


class ThroughputMeter:
    """Counts steps and time since the last row.

    Args:
        config: The run.
        device: Of the training; a known GPU gives utilisations.
        num_processes: Processes of the run, each with one device.
        start_step: Optimizer steps done before this process.
    """

    def __init__(self, config: RunConfig, device: torch.device, num_processes: int, start_step: int = 0) -> None:
        self._tokens_per_step = config.train.global_batch_size * config.train.sequence_length
        self._flops = flops_per_token(config.model, config.train.sequence_length)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        peak = peak_bf16_flops(name)
        self._peak_flops = None if peak is None else peak * num_processes
        self._device = device
        self._since = time.perf_counter()
        self._last_step = start_step
        self._paused_seconds = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block's time (evaluation, a checkpoint) out of the rates."""
        begin = time.perf_counter()
        yield
        self._paused_seconds += time.perf_counter() - begin

    def row(self, step: int, result: StepResult, latency: Latency, graph_bytes: int = 0) -> dict[str, Any]:
        """The fields of a train row besides the loss; the clock starts again.

        Args:
            step: Optimizer steps done.
            result: Of the last step, already waited for.
            latency: Waits for data.
            graph_bytes: Memory of recorded graphs, which the allocator does not count.
        """
        now = time.perf_counter()
        step_seconds = (now - self._since - self._paused_seconds) / (step - self._last_step)
        self._since, self._last_step, self._paused_seconds = now, step, 0.0
        tokens_per_second = self._tokens_per_step / step_seconds
        memory = memory_statistics(self._device)
        row: dict[str, Any] = {
            "learning_rate": result.learning_rate,
            "gradient_norm": result.gradient_norm.item(),
            "tokens_per_second": tokens_per_second,
            "step_seconds": step_seconds,
            "data_wait_seconds_p50": latency.p50,
            "data_wait_seconds_p95": latency.p95,
            "tokens_seen": step * self._tokens_per_step,
            "epoch": result.batches[-1].epoch,
            "memory_allocated_bytes": memory.allocated_bytes + graph_bytes,
            "memory_reserved_bytes": memory.reserved_bytes,
            "memory_peak_bytes": memory.peak_allocated_bytes + graph_bytes,
        }
        if result.choice is not None:
            # A layer without eligible queries has neither loss nor recall.
            losses, recalls = result.choice.T.tolist()
            row["choice_loss"] = sum(losses)
            row["choice_recall"] = [round(recall, 5) if recall else None for recall in recalls]
        if self._peak_flops is not None:
            row["executed_mfu"] = tokens_per_second * self._flops.executed_training / self._peak_flops
            row["dense_equivalent_mfu"] = tokens_per_second * self._flops.dense_equivalent_training / self._peak_flops
        return row


class RunLogger:
    """Writes metrics and events of a run, and prints those for the user. Made by `open_logger`.

    Args:
        setup: The run; its state gives the step of every row.
        open_directory: Of the run, in rank 0; None elsewhere.
        streams: Standard output and standard error.
        metrics: Takes the rows.
        heartbeat: Of this process.
        progress: The lines, or the bar, on the terminal.
    """

    def __init__(
        self,
        setup: TrainSetup,
        open_directory: OpenDirectory | None,
        streams: FaultTolerantStreams,
        metrics: MetricsWriter,
        heartbeat: Heartbeat,
        progress: Progress,
    ) -> None:
        self._state, self._rank = setup.state, setup.processes.rank
        self._loader, self._graphs = setup.loader, setup.graphs
        self.open_directory, self._streams = open_directory, streams
        self.metrics, self.heartbeat, self.progress = metrics, heartbeat, progress
        self.meter = ThroughputMeter(setup.config, setup.device, setup.processes.size, setup.state.step)
        self._skipped_reported = self._cut_reported = False

    def event(self, name: str, message: str, severity: str = "info", **values: float) -> None:
        """Write an event of the current step into the metrics.

        Args:
            name: One of the names in docs/diagnostics.md.
            message: A sentence.
            severity: "info", "warning" or "error".
            values: Further fields of the row.
        """
        self.metrics.event(self._state.step, name, message, severity=severity, **values)

    def log_event(self, name: str, message: str, severity: str = "info", **values: float) -> None:
        """Write an event, and print it: in rank 0, and, unless it is a note, on standard error of any rank."""
        self.event(name, message, severity, **values)
        self.progress.message(f"{'note' if severity == 'info' else severity.upper()}: {message}")
        if severity != "info" and self._rank != 0:
            print(f"rank {self._rank}: {severity.upper()}: {message}", file=sys.stderr, flush=True)

    def introduce(self, setup: TrainSetup) -> None:
        """Print five lines before the first step: device, model, data, folder, and how to watch."""
        config, processes = setup.config, setup.processes.size
        if setup.device.type == "cuda":
            device = torch.cuda.get_device_name(setup.device) + (f", {processes} processes" if processes > 1 else "")
        else:
            device = f"CPU, {os.cpu_count()} cores"
        model, rows, folder = config.model, config.train.global_batch_size, shell_path(setup.directory)
        millions = parameter_count(model) / 1e6
        layers = f"{model.num_layers} layer{'s'[: model.num_layers != 1]} of width {model.dim}"
        for name, text in {
            "device": f"{device}, {config.train.precision}",
            "model": f"{layers}, {millions:.1f} M parameters, {model.attention} attention",
            "data": f"{config.data.source}, {config.train.sequence_length:,} tokens a row, {rows:,} rows a step",
            "folder": f"{folder}, {config.train.steps:,} steps",
            "watch": f"trifocal watch {folder}",
        }.items():
            self.progress.message(f"{name:8}{text}")

    @contextmanager
    def pause(self, phase: str) -> Iterator[None]:
        """Name the block's phase for the heartbeat, and leave its time out of the rates: it is not training."""
        with self.meter.paused(), self.heartbeat.phase(phase):
            yield

    def log_step(self, result: StepResult) -> None:
        """Write the train row of the last step, which is known to be finite; waits for the device."""
        step, bad = self._state.step, self._loader.bad_documents
        loss = self._state.loss = result.loss.item()
        graph_bytes = 0 if self._graphs is None else self._graphs.memory_bytes
        row = self.meter.row(step, result, self._loader.latency(), graph_bytes)
        self.metrics.write("train", step, loss=loss, skipped_documents=len(bad.skipped), cut_chats=len(bad.cut), **row)
        if bad.first and not self._skipped_reported:
            self._skipped_reported = True
            self.log_event("documents_skipped", f"bad documents are skipped; the first: {bad.first}", "warning")
        if bad.cut and not self._cut_reported:
            self._cut_reported = True
            self.log_event(
                "chats_cut", "chats longer than train.sequence_length are cut; the metrics count them (cut_chats)"
            )
        self.heartbeat.update(step=step, loss=loss, tokens_per_second=row["tokens_per_second"])
        self.progress.update(step, loss=loss, tokens_per_second=row["tokens_per_second"])

    def log_evaluation(self, evaluation: Evaluation) -> None:
        """Write the evaluation row of the last step, and print it."""
        step, bits = self._state.step, evaluation.bits_per_byte
        self.metrics.write("evaluation", step, **asdict(evaluation))
        self.progress.message(
            f"step {step}: validation loss {evaluation.validation_loss:.4f}"
            + (f", {bits:.4f} bits per byte" if bits is not None else "")
        )

    def write_optional(self, what: str, write: Callable[[], None]) -> None:
        """Write a file that the run can do without, in rank 0: if the disk is full, the run goes on without it.

        Args:
            what: Name of the content, for the warning.
            write: Writes it.
        """
        if self.open_directory is None or not self.open_directory.is_there():
            return
        try:
            write()
        except OSError as error:
            message = f"the {what} of step {self._state.step} could not be written: {error}"
            self.log_event("write_failed", message, "warning")

    def report_lost_streams(self) -> None:
        """Write an event for each standard stream that was lost since the last call."""
        for sentence in self._streams.newly_lost():
            self.event("output_lost", sentence, "warning")

    def report_data_stall(self, seconds: float, activity: str) -> None:
        """Log that no batch has come for so many seconds, and the data thread's activity."""
        message = f"data stall: no batch for {seconds:.0f} s; the data thread is {activity}"
        self.log_event("data_stall", message, "warning", stall_seconds=seconds)

    def report_stall(self, message: str) -> None:
        """Log that a phase takes too long; the message names the watchdog's dump."""
        self.log_event("stalled", message, "warning")


@contextmanager
def open_logger(setup: TrainSetup) -> Iterator[RunLogger]:
    """Open the files of a run, write `env.json`, and start the heartbeat and its watchdog.

    Args:
        setup: The run, restored if it goes on from a checkpoint. Its folder exists.
    """
    config, directory, device = setup.config, setup.directory, setup.device
    processes, step = setup.processes, setup.state.step
    with ExitStack() as stack:
        is_rank0 = processes.is_rank0
        open_directory = stack.enter_context(OpenDirectory(directory)) if is_rank0 else None
        streams = stack.enter_context(FaultTolerantStreams())
        metrics = stack.enter_context(_open_metrics(setup) if is_rank0 else MetricsWriter(None))
        heartbeat = Heartbeat(
            directory / "heartbeat",
            processes.rank,
            config.log.heartbeat_seconds,
            device=device,
            parallel_mode=setup.parallel.mode,
        )
        progress = Progress(config.train.steps, start_step=step, enabled=is_rank0)
        logger = RunLogger(setup, open_directory, streams, metrics, heartbeat, progress)
        stack.callback(logger.report_lost_streams)
        stack.enter_context(heartbeat)
        stack.enter_context(Watchdog(heartbeat, directory, device=device, on_stall=logger.report_stall))
        stack.enter_context(progress)
        for name, advice in earlier_variables().items() if is_rank0 else ():
            logger.log_event("note", f"{name} belongs to an earlier system and is not read; here: {advice}", "warning")
        setup.on_data_stall = logger.report_data_stall
        yield logger


def _open_metrics(setup: TrainSetup) -> MetricsWriter:
    config, directory, log, resume_step = setup.config, setup.directory, setup.config.log, setup.state.resume_step
    write_environment(directory / "env.json", to_toml(config), device=setup.device, precision=config.train.precision)
    sinks = make_sinks(log.sink_names(), directory, project=log.project, config=asdict(config), resume_step=resume_step)
    return MetricsWriter(directory / "metrics.jsonl", resume_step=resume_step, sinks=sinks)
