"""Speed of a run between two rows of the metrics; evaluations and checkpoints do not count."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from trifocal.data import Latency
from trifocal.models import flops_per_token
from trifocal.runlog import memory_statistics, peak_bf16_flops
from trifocal.train.run_config import RunConfig
from trifocal.train.step import StepResult


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
        row = {
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
        if self._peak_flops is not None:
            row["executed_mfu"] = tokens_per_second * self._flops.executed_training / self._peak_flops
            row["dense_equivalent_mfu"] = tokens_per_second * self._flops.dense_equivalent_training / self._peak_flops
        return row
