"""Optimizer steps of sparse models and of their dense baselines, with the trainer's own code.

    python benchmarks/training.py --sizes 16x2048 production

Every row has its own process (`lib.training_worker`). It builds and compiles the model, warms up, and
waits for its turn; so preparations can go side by side while timed steps have the device to themselves.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal

from lib.parity import check_model_parity
from lib.recorder import OK, Recorder, Refused, child_environment, failure
from lib.script import MODEL_NOTE, Benchmark, ModelOptions, parse_size
from lib.shapes import DTYPES
from lib.training_worker import TrainCase
from trifocal.errors import UserError

PRODUCTION = "production"
SIZES = ("16x2048", "4x8192", "1x32768", "1x65536", PRODUCTION)

NOTES = (
    "data: random is random bytes, every sequence whole; text is random bytes in packed documents whose lengths are "
    "log-normal with a median of 1,000 tokens; attention crosses no document boundary. MFU: only whole sequences.",
    "One optimizer step is the trainer's: forward, backward, clipping, fused AdamW, fp32 "
    "weights. Medians over the timed steps; p20 and p80 are the spread.",
    "executed_mfu counts the products that the model needs, dense_equivalent_mfu those of the dense baseline, both "
    "over the data sheet's dense bf16 peak; operations that checkpointing repeats are not counted.",
    "cuda_graphs: forward and backward are replayed as a CUDA graph, recorded before the timed steps; where this is "
    "False, Python starts every kernel, and where kernels are short a step takes as long as that does.",
    "peak_gib is the most that was allocated during the timed steps, weights and optimizer included, and with CUDA "
    "graphs the memory that they hold.",
    "first_step_seconds includes the compilation, with the present caches, while other rows may prepare. "
    "The second step is recorded.",
    "kernels: of --profiled-steps, as means of a step. gpu_busy_share is the share of those steps in which a "
    "kernel ran.",
    MODEL_NOTE,
    "A model whose chooser is an index takes the loss of the choice as well, of one query in 64.",
    "production: 4x2048, as in configs/m7c_125m.toml.",
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ModelOptions):
    """Time training steps of sparse models and their dense baselines, under the same settings, in one run."""

    sizes: tuple[str, ...] = SIZES
    """Sequences x tokens, like 4x8192; or production: 4x2048, as in configs/m7c_125m.toml."""
    data: tuple[Literal["random", "text"], ...] = ("random", "text")
    """random: whole sequences of random bytes; text: packed documents, as long as texts are."""
    compile: bool = True
    """Compile both with torch.compile."""
    cuda_graphs: tuple[Literal["no", "yes"], ...] = ()
    """yes: rows that replay forward and backward as CUDA graphs, which come first; no: rows whose kernels Python starts
    one by one. By default both on a GPU, and no on a CPU. production is recorded unless only no is given."""
    warmup_steps: int = 3
    """Steps before the timed ones, the compiling one included."""
    timed_steps: int = 10
    """Steps that are timed."""
    profiled_steps: int = 0
    """Steps to profile after the timed ones, on a GPU: a table of their kernels."""
    workers: int = 1
    """Rows that are prepared at a time; each needs its memory."""
    seconds: float = 900.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("warmup_steps", "timed_steps", "workers")
        if self.profiled_steps < 0:
            raise UserError(f"--profiled-steps must be at least 0, got {self.profiled_steps}")

    def cases(self) -> list[TrainCase]:
        """The rows asked for. Recorded rows come first; the two models of a size are neighbours."""
        device = str(self.torch_device)
        settings = [
            (size, recorded, data)
            for recorded in self._recorded(device)
            for size in self.sizes
            for data in dict.fromkeys(self.data)
        ]
        cases = []
        for size, recorded, data in settings:
            if size == PRODUCTION and not recorded and (PRODUCTION, True, data) in settings:
                continue
            if size == PRODUCTION:
                batch = {"sequences": 4, "micro_batch": 4, "tokens": 2048, "checkpointing": "none"}
            else:
                sequences, tokens = parse_size(size, PRODUCTION)
                batch = {"sequences": sequences, "micro_batch": sequences, "tokens": tokens, "checkpointing": "none"}
            for attention in self.attention:
                case = TrainCase(
                    size=size,
                    attention=attention,
                    model=self.model_of(attention).to_dict(),
                    compile=self.compile,
                    cuda_graphs=recorded,
                    data=data,
                    precision=self.precision,
                    warmup_steps=self.warmup_steps,
                    timed_steps=self.timed_steps,
                    profiled_steps=self.profiled_steps,
                    device=device,
                    **batch,  # type: ignore[arg-type]
                )
                cases.append(case)
        return cases

    def _recorded(self, device: str) -> list[bool]:
        """Whether rows are recorded: both ways or one."""
        wanted = self.cuda_graphs or (("no",) if device == "cpu" else ("no", "yes"))
        if "yes" in wanted and device == "cpu":
            raise UserError("--cuda-graphs yes needs a GPU; on a CPU there is only --cuda-graphs no")
        return [name == "yes" for name in ("yes", "no") if name in wanted]


def bench_train(options: TrainOptions, recorder: Recorder) -> None:
    """Measure every row; they are in `recorder.rows`."""
    cases = options.cases()
    if options.profiled_steps and cases[0].device == "cpu":
        raise UserError("--profiled-steps needs a GPU: it lists kernels")
    refusal = _refusal(options, recorder) if "nsa" in options.attention else ""
    runnable = []
    for case in cases:
        if refusal and case.attention == "nsa":
            recorder.keep({**case.labels(), "status": f"refused: {refusal}"})
        else:
            runnable.append(case)
    for first in range(0, len(runnable), options.workers):
        _measure_together(runnable[first : first + options.workers], options.workers, recorder)


def speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens a second and memory of each model over those with dense layers, by size, data and recording."""
    keys = ("size", "cuda_graphs", "data")
    measured = {(*(row[key] for key in keys), row["attention"]): row for row in rows if row["status"] == OK}
    found = []
    for (*setting, attention), row in measured.items():
        if attention == "dense":
            continue
        others = {name: measured.get((*setting, name), {}) for name in ("dense", "mix-dense") if name != attention}
        ratios = {
            f"{key}_over_{name}": row[key] / other[key]
            for name, other in others.items()
            for key in ("tokens_per_second", "peak_gib")
            if row[key] and other.get(key)
        }
        if ratios:
            found.append({**dict(zip(keys, setting, strict=True)), "attention": attention, **ratios})
    return found


def _refusal(options: TrainOptions, recorder: Recorder) -> str:
    """The reason why the sparse rows must not be timed; empty if there is none."""
    try:
        share = check_model_parity(options.model, options.torch_device, DTYPES[options.precision])
    except Refused as reason:
        return str(reason)
    except Exception as error:
        return f"the comparison with float64 {failure(error)}"
    recorder.say(f"parity: {share:.2f} of the allowed error")
    return ""


def _measure_together(cases: Sequence[TrainCase], workers: int, recorder: Recorder) -> None:
    """Prepare rows side by side, then time them one after another."""
    begun = []
    for case in cases:
        if recorder.remaining_seconds():
            begun.append(Worker(case, workers, recorder.remaining_seconds()))
        else:
            recorder.keep({**case.labels(), "status": "not run: the time limit has passed"})
    if not begun:
        return
    recorder.say("preparing " + ", ".join(worker.name for worker in begun))
    with ThreadPoolExecutor(len(begun)) as pool:
        ready = list(pool.map(Worker.answer, begun))
    for worker, prepared in zip(begun, ready, strict=True):
        answer = prepared
        if prepared["status"] == OK:
            worker.go()
            answer = worker.answer()
        worker.close()
        labels = {"row": worker.name}
        recorder.tables.setdefault("kernels", []).extend(labels | found for found in answer.pop("kernels", ()))
        row = recorder.keep({**worker.case.labels(), **answer})
        recorder.say(f"{worker.name}: " + _line(row))


def _line(row: dict[str, Any]) -> str:
    if row["status"] != OK:
        return str(row["status"])
    memory = "" if row["peak_gib"] is None else f", {row['peak_gib']:.2f} GiB"
    return f"{row['tokens_per_second']:,.0f} tokens/s{memory}, first step {row['first_step_seconds']:.1f} s"


class Worker:
    """A process that prepares a row, answers, and times it after `go`; `workers` share the cores while they prepare."""

    def __init__(self, case: TrainCase, workers: int, seconds: float) -> None:
        self.case = case
        self.name = f"{case.size} {case.attention}" + (" recorded" if case.cuda_graphs else "")
        self.name += " text" if case.data == "text" else ""
        environment = child_environment()
        if workers > 1:
            threads = max(1, (os.cpu_count() or 1) // workers)
            environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
        # A file, not a pipe: nobody reads it while the process runs.
        self._errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lib.training_worker", json.dumps(asdict(case))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self._out_of_time = False
        self._timer = threading.Timer(seconds, self._stop)
        self._timer.start()

    def answer(self) -> dict[str, Any]:
        """The next message of the process; one with its own status if it is gone."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # Libraries may print too.
            if line.startswith('{"status"'):
                return dict(json.loads(line))
        if self._out_of_time:
            return {"status": "not run: the time limit has passed"}
        code = self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or [""])[-1]
        return {"status": f"failed: exit status {code}: {last[:300]}"}

    def go(self) -> None:
        """Let it time its steps; if it is gone, `answer` has the reason."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End it, if it still runs."""
        self._timer.cancel()
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _stop(self) -> None:
        self._out_of_time = True
        self._process.kill()


TRAINING = Benchmark(
    "training",
    TrainOptions,
    bench_train,
    NOTES,
    {
        "size": "size", "attention": "attention", "data": "data", "cuda_graphs": "graphs",
        "tokens_per_second": "tokens/s", "step_ms": "step ms", "peak_gib": "peak GiB", "executed_mfu": "MFU",
        "dense_equivalent_mfu": "dense-eq. MFU", "status": "status",
    },
    tables={"over_dense": speedups},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(TRAINING.main())
