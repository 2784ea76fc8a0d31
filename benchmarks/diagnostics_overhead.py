"""What the diagnostics cost at their defaults: blocks of steps with and without them, by turns, in one run.

    python benchmarks/diagnostics_overhead.py                                  # the showcase on a CPU
    python benchmarks/diagnostics_overhead.py --config m7c_125m.toml --device cuda --pairs 30 --steps 40

With: heartbeat, watchdog, rows of metrics, progress, memory figures, each as often as the configuration says. Without:
none of them, no thread either. Blocks go with, without, without, with, so that drift cancels. What is rarer than a
block (telemetry, the attention picture) is timed by itself and spread over the steps between two of them. `counted` is
the processor's time inside the diagnostics' own code, as a share of the step's (on a GPU of its wall clock, though most
of it is hidden behind the device): the precise figure where other programs disturb the clock.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from trifocal.bench.results import ResultFile, cpu_name
from trifocal.diagnostics import Heartbeat, MetricsWriter, Progress, Watchdog
from trifocal.distributed import Processes
from trifocal.train import load_config
from trifocal.train.config import RunConfig
from trifocal.train.evaluate import read_validation_batches
from trifocal.train.loop import Trainer
from trifocal.train.preflight import choose_device, preflight
from trifocal.train.run_directory import create_run_directory

ROOT = Path(__file__).parent.parent
NEVER = 10**9
REPEATS = 5


class Quiet:
    """A heartbeat that has no thread and writes nothing."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def update(self, **news: Any) -> None:
        pass


class Counter:
    """Adds up the processor's time inside functions, in whichever thread they run."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.thread_time() - begin

        return timed

    def around_context(self, make: Callable[[str], AbstractContextManager[None]]) -> Callable[[str], Any]:
        """Times entering and leaving, not what is inside."""

        @contextmanager
        def timed(name: str) -> Iterator[None]:
            begin = time.thread_time()
            context = make(name)
            context.__enter__()
            self.seconds += time.thread_time() - begin
            try:
                yield
            finally:
                begin = time.thread_time()
                context.__exit__(None, None, None)
                self.seconds += time.thread_time() - begin

        return timed


class Measured(Trainer):
    """A run whose diagnostics are switched on and off between blocks of steps."""

    steps_in_block = 20
    warm_up = 1

    def prepare(self) -> None:
        """Before the run."""
        self.blocks: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        self.counter = Counter()
        self.whole_config = self.config
        self.open: list[AbstractContextManager[Any]] = []

    def switch(self, on: bool) -> None:
        """Start all diagnostics as the run does, or stop them."""
        for context in reversed(self.open):
            context.__exit__(None, None, None)
        self.open = []
        log = self.whole_config.log
        if not on:
            self.config = replace(self.whole_config, log=replace(log, interval_steps=NEVER))
            self.heartbeat, self.metrics = Quiet(), MetricsWriter.silent()
            self.progress = Progress(self.config.train.steps, enabled=False)
        else:
            self.config = self.whole_config
            heartbeat = Heartbeat(self.directory / "heartbeat", 0, log.heartbeat_seconds, device=self.device)
            watchdog = Watchdog(heartbeat, self.directory, device=self.device)
            metrics = MetricsWriter(self.directory / "metrics.jsonl")
            progress = Progress(self.config.train.steps, start_step=self.step)
            heartbeat._beat = self.counter.around(heartbeat._beat)
            self.open = [metrics, heartbeat, watchdog, progress]
            for context in self.open:
                context.__enter__()
            heartbeat.phase = self.counter.around_context(heartbeat.phase)
            heartbeat.update = self.counter.around(heartbeat.update)
            metrics.write = self.counter.around(metrics.write)
            progress.update = self.counter.around(progress.update)
            self.heartbeat, self.metrics, self.progress = heartbeat, metrics, progress
        self.tracer._phases = self.heartbeat

    def _step(self) -> bool:
        block, position = divmod(self.step, self.steps_in_block)
        block -= self.warm_up
        on = block % 4 in (0, 3)
        if position == 0:
            if block == 0:
                # Those that the run itself began, as far as they would disturb.
                self.heartbeat.close()
                row = self.meter.row
                self.meter.row = self.counter.around(row)
            self.wait()
            if block >= 0:
                # Starting and stopping is not what a step costs.
                self.switch(on)
            self.wait()
            self.began = time.perf_counter(), time.process_time()
        more = super()._step()
        if position == self.steps_in_block - 1 and block >= 0:
            self.wait()
            wall, processor = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
            self.blocks[on].append((wall / self.steps_in_block, processor / self.steps_in_block))
            if self.step == self.config.train.steps:
                self.switch(True)
                self.time_the_rare()
        return more

    def _save(self, *, must_succeed: bool) -> None:
        """Nothing: a checkpoint in the middle of a block would drown what is measured."""

    def time_the_rare(self) -> None:
        """Telemetry and the attention picture, by themselves."""
        self.rare = {}
        batch = next(self.loader)
        self.validation_batches = read_validation_batches(self.config, self.tokenizer)
        looks = {"telemetry": lambda: self._measure_attention(batch), "picture": self._picture_attention}
        for name, look in looks.items():
            times = []
            for _ in range(REPEATS + 1):
                self.wait()
                begin = time.perf_counter()
                look()
                self.wait()
                times.append(time.perf_counter() - begin)
            # The first one compiles and allocates.
            self.rare[name] = times[1:]

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(config: RunConfig, steps: int) -> Measured:
    """Run it."""
    device = choose_device(config.run.device)
    processes = Processes(device=device)
    tokenizer, _ = preflight(config, device)
    trainer = Measured(config, Path(config.run.directory), processes, tokenizer)
    create_run_directory(config, overwrite=True)
    trainer.steps_in_block = steps
    trainer.prepare()
    trainer.run([], None)
    return trainer


def compared(values: dict[bool, list[float]]) -> dict[str, float]:
    """Times of blocks without and with, neighbour by neighbour, and by how much they differ."""
    ratios = [100 * (on / off - 1) for on, off in zip(values[True], values[False], strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    return {
        "without_ms": 1e3 * median(values[False]),
        "with_ms": 1e3 * median(values[True]),
        "difference_percent": middle,
        "quartile_low": low,
        "quartile_high": high,
        # Of a median, for a spread like this one's.
        "uncertainty_percent": 1.25 * (high - low) / 1.35 / len(ratios) ** 0.5,
    }


def rows_of(trainer: Measured, intervals: dict[str, int]) -> list[dict[str, Any]]:
    """The table."""
    rows = []
    clocks = {"wall clock": 0} if trainer.device.type == "cuda" else {"wall clock": 0, "processor time": 1}
    for clock, index in clocks.items():
        times = {on: [block[index] for block in blocks] for on, blocks in trainer.blocks.items()}
        rows.append({"what": "all but the rare", "by": clock, "blocks": len(times[True]), **compared(times)})
    step = median(block[0] for block in trainer.blocks[False])
    counted = trainer.counter.seconds / (len(trainer.blocks[True]) * trainer.steps_in_block)
    share = 100 * counted / median(block[clocks.get("processor time", 0)] for block in trainer.blocks[False])
    rows.append({"what": "all but the rare", "by": "counted", "each_ms": 1e3 * counted, "percent": share})
    for name, times in trainer.rare.items():
        every = intervals[name]
        if every:
            each = median(times)
            share = 100 * each / (every * step)
            rows.append(
                {"what": name, "by": "wall clock", "each_ms": 1e3 * each, "every_steps": every, "percent": share}
            )
    return rows


def main() -> int:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="showcase.toml")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--pairs", type=int, default=60, help="blocks with, and as many without; an even number")
    parser.add_argument("--steps", type=int, default=20, help="in a block; a multiple of log.interval_steps")
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options, extra = parser.parse_known_args()
    total = options.steps * (2 * options.pairs + Measured.warm_up)
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "run.directory": f"{folder}/run", "run.device": options.device, "data.source": "builtin",
            "train.steps": total, "schedule.warmup_steps": 1, "checkpoint.interval_steps": total - 1,
            "evaluate.interval_steps": 0, "log.sample_interval_steps": 0, "log.telemetry_interval_steps": 0,
        }  # fmt: skip
        preset = load_config(ROOT / "configs" / options.config)
        given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        config = load_config(ROOT / "configs" / options.config, [*given, *extra])
        trainer = measure(config, options.steps)
        if trainer.step < total:
            print(f"stopped at step {trainer.step} of {total}: nothing is written", file=sys.stderr)
            return 1
        intervals = {"telemetry": preset.log.telemetry_interval_steps, "picture": preset.evaluate.interval_steps}
        rows = rows_of(trainer, intervals)
    file = ResultFile(
        f"diagnostics_overhead_{Path(options.config).stem}",
        f"What the diagnostics cost at their defaults: {options.config}",
        folder=options.output, commit=options.commit, device=cpu_name() if options.device == "cpu" else "",
    )  # fmt: skip
    notes = [
        f"{options.pairs} blocks of {options.steps} steps with the diagnostics and as many without, by turns, in one "
        f"run; medians and quartiles of the differences between neighbours, and the uncertainty of their median.",
        f"A row of metrics every {preset.log.interval_steps} steps, of the heartbeat every "
        f"{preset.log.heartbeat_seconds:g} s. Rare: telemetry and the attention picture of the evaluations, medians of "
        f"{REPEATS}, spread over the steps between two of them.",
        "Counted: the processor's time inside the diagnostics' own code, in all threads.",
    ]
    print(file.write(rows, notes=notes).read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
