"""One row of `benchmarks/training.py`: `python -m lib.training_worker` with a `TrainCase` as JSON.

It prints a line when it is ready, waits for a line on standard input, and prints the figures.
"""

import gc
import itertools
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lib.kernel_trace import busy_share, kernel_table, record_kernels
from lib.recorder import OK, failure
from lib.timing import Timing, synchronized_seconds
from trifocal.data import Batch
from trifocal.models import DecoderLM, ModelConfig, flops_per_token, parameter_count
from trifocal.runlog.hardware import peak_bf16_flops
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.runlog.memory_statistics import memory_statistics
from trifocal.train.choice_teacher import ChoiceTeacher
from trifocal.train.config.sections import OptimizerSection, TrainSection
from trifocal.train.step.cuda_graphs import MicroBatchGraphs
from trifocal.train.step.micro_batch import LossFunction
from trifocal.train.step.optimizer import make_optimizer
from trifocal.train.step.step import StepResult, TrainStep

GIB = 2**30
# fp32 weight and gradient, and AdamW's two moments.
_BYTES_PER_PARAMETER = 16
_KERNEL_ROWS = 40


@dataclass(frozen=True, kw_only=True)
class TrainCase:
    """The training of one row: `model` is `ModelConfig.to_dict()`, `checkpointing` is `train.activation_checkpointing`.

    `data` is "random", or "text" for packed documents of the lengths that `document_boundaries` draws.
    """

    size: str
    attention: str
    model: dict[str, Any]
    sequences: int
    micro_batch: int
    tokens: int
    checkpointing: str
    compile: bool
    cuda_graphs: bool
    precision: str
    warmup_steps: int
    timed_steps: int
    device: str
    profiled_steps: int = 0
    data: str = "random"

    def labels(self) -> dict[str, Any]:
        """The columns that identify the row."""
        return {
            "size": self.size,
            "attention": self.attention,
            "data": self.data,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "checkpointing": self.checkpointing,
            "compile": self.compile,
            "cuda_graphs": self.cuda_graphs,
            "precision": self.precision,
        }


def document_boundaries(sequences: int, tokens: int) -> torch.Tensor:
    """First tokens of documents that fill sequences one after the other, as the loader packs them, and the end.

    Lengths are log-normal: a median of 1,000 tokens, a mean of 1,650, one in six above 2,700. The loader cuts a
    document at the end of a sequence: the start of every sequence is among the [documents + 1], int32.
    """
    total = sequences * tokens
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(2 + total // 100, generator=generator, dtype=torch.float64).exp() * 1000).clamp(min=100)
    ends = drawn.long().cumsum(0)
    starts = torch.arange(0, total + 1, tokens)
    return torch.cat((ends[ends < total], starts)).unique().to(torch.int32)


def _of_rows(boundaries: torch.Tensor, first: int, rows: int, tokens: int) -> torch.Tensor:
    """The boundaries within some rows, counted from the first of them."""
    inside = (boundaries >= first * tokens) & (boundaries <= (first + rows) * tokens)
    return boundaries[inside] - first * tokens


class TrainBench:
    """A model in training on random tokens."""

    def __init__(self, case: TrainCase) -> None:
        self.case = case
        self.device = torch.device(case.device)
        self.config = ModelConfig.from_dict(case.model)
        self.section = TrainSection(
            steps=case.warmup_steps + case.timed_steps,
            sequence_length=case.tokens,
            global_batch_size=case.sequences,
            micro_batch_size=case.micro_batch,
            precision=case.precision,  # type: ignore[arg-type]
            activation_checkpointing=case.checkpointing,
            compile=case.compile,
            cuda_graphs=case.cuda_graphs,
        )
        model = DecoderLM(self.config)
        model.init_weights(0)
        model.to(self.device)
        model.set_activation_checkpointing(*self.section.checkpointed_layers(self.config.num_layers))
        self.optimizer = make_optimizer(model, OptimizerSection())
        if case.compile:
            model.compile_training()
        self.model = model
        teacher = ChoiceTeacher(model, self.section, self.device) if self.config.has_index else None
        loss_function: LossFunction = model if teacher is None else partial(model, teaching=teacher.teaching)
        self.graphs: MicroBatchGraphs | None = None
        if case.cuda_graphs and self.device.type == "cuda":
            self.graphs = MicroBatchGraphs(loss_function, model, self.device, case.precision)
        self.train_step = TrainStep(
            loss_function,
            self.optimizer,
            self.device,
            self.section,
            before_backward=self._wait_for_step,
            graphs=self.graphs,
            teacher=teacher,
        )
        # Never entered: its phases are kept, its thread and file are not made.
        self.heartbeat = Heartbeat(tempfile.gettempdir(), device=self.device)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(
            self.config.vocab_size, (case.sequences, case.tokens + 1), generator=generator, dtype=torch.int64
        )
        text = document_boundaries(case.sequences, case.tokens) if case.data == "text" else None
        self.batches = []
        for first in range(0, case.sequences, case.micro_batch):
            rows = tokens[first : first + case.micro_batch]
            boundaries = None if text is None else _of_rows(text, first, *rows[:, 1:].shape)
            self.batches.append(
                Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), boundaries, (), 0, 0, rows[:, 1:].numel())
            )
        self.result: StepResult | None = None
        self.first_step_seconds = 0.0
        self.first: dict[str, float] = {}

    def warm_up(self) -> None:
        """Take the steps that are not timed, then free the memory that they leave."""
        for index in range(self.case.warmup_steps):
            begin = time.perf_counter()
            self._step()
            seconds = synchronized_seconds(self.device) - begin
            if index == 0 and self.result is not None:
                self.first_step_seconds = seconds
                self.first = {
                    "first_loss": self.result.loss.item(),
                    "first_gradient_norm": self.result.gradient_norm.item(),
                }
        if self.device.type == "cuda":
            # Other rows may be preparing: leave them the memory that is idle here.
            if self.graphs is None:
                self.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()

    def figures(self) -> dict[str, Any]:
        """Time the steps."""
        case, device = self.case, self.device
        # One more, because memory must be found again. A graph is recorded for the second micro-batch: by this step at
        # the latest, since the first was in a step of warm-up.
        self._step()
        recordings = self.graphs.recordings if self.graphs is not None else 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        timing = Timing.of(self._step_times_ms())
        assert self.graphs is None or self.graphs.recordings == recordings > 0, "a timed step recorded"
        assert self.result is not None
        if not (torch.isfinite(self.result.loss) and torch.isfinite(self.result.gradient_norm)):
            raise ArithmeticError("a loss or gradient was not finite")
        tokens = case.sequences * case.tokens
        tokens_per_second = tokens / timing.median_ms * 1000
        # The formula is for whole sequences: documents within them need fewer products.
        flops = flops_per_token(self.config, case.tokens) if case.data == "random" else None
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        peak = peak_bf16_flops(name) if case.precision == "bf16" else None
        executed, dense = (None, None) if flops is None else (flops.executed_training, flops.dense_equivalent_training)
        memory = memory_statistics(device).peak_allocated_bytes if device.type == "cuda" else None
        if memory is not None and self.graphs is not None:
            memory += self.graphs.memory_bytes
        return {
            "tokens_per_second": tokens_per_second,
            "step_ms": timing.median_ms,
            "step_p20_ms": timing.p20_ms,
            "step_p80_ms": timing.p80_ms,
            "timed_steps": timing.calls,
            "peak_gib": None if memory is None else memory / GIB,
            "executed_mfu": None if peak is None or executed is None else tokens_per_second * executed / peak,
            "dense_equivalent_mfu": None if peak is None or dense is None else tokens_per_second * dense / peak,
            "executed_tflop_per_step": None if executed is None else tokens * executed / 1e12,
            "dense_equivalent_tflop_per_step": None if dense is None else tokens * dense / 1e12,
            "weights_and_optimizer_gib": parameter_count(self.config) * _BYTES_PER_PARAMETER / GIB,
            "first_step_seconds": self.first_step_seconds,
            **self.first,
            "loss": self.result.loss.item(),
            **self._kernels(),
        }

    def _kernels(self) -> dict[str, Any]:
        steps = self.case.profiled_steps
        if not steps or self.device.type != "cuda":
            return {}

        def work() -> None:
            for _ in range(steps):
                self._step()

        kernels = record_kernels(work, self.device)
        return {
            "gpu_busy_share": busy_share(kernels),
            "kernels_a_step": len(kernels) / steps,
            "kernel_ms_a_step": sum(kernel.end - kernel.begin for kernel in kernels) / steps / 1e6,
            "kernels": kernel_table(kernels, steps, _KERNEL_ROWS),
        }

    def _step(self) -> None:
        self.result = self.train_step.run(1, self.batches, phases=self.heartbeat)

    def _wait_for_step(self) -> None:
        # The trainer waits here too.
        if self.result is not None:
            self.result.finite.wait()

    def _step_times_ms(self) -> list[float]:
        if self.device.type != "cuda":
            times = []
            for _ in range(self.case.timed_steps):
                begin = time.perf_counter()
                self._step()
                times.append((time.perf_counter() - begin) * 1000)
            return times
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(self.case.timed_steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self._step()
            mark.record()
        synchronized_seconds(self.device)
        return [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]


def main(request: str) -> None:
    """Prepare, wait, measure; one line of JSON each for being ready and for the figures, or for a failure."""
    try:
        bench = TrainBench(TrainCase(**json.loads(request)))
        bench.warm_up()
        print(json.dumps({"status": OK}), flush=True)
        if sys.stdin.readline():
            print(json.dumps({"status": OK, **bench.figures()}), flush=True)
    except Exception as error:
        print(json.dumps({"status": failure(error)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
