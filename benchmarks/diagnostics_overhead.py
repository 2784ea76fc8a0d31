"""The cost of the diagnostics at their defaults: neighbouring turns of a run with and without them, thousands of times.

    python benchmarks/diagnostics_overhead.py                                  # the showcase on a CPU
    python benchmarks/diagnostics_overhead.py --config m7c_125m.toml --device cuda --pairs 160 --steps 20

A turn is a step, or `--steps` of them. Turns come in pairs of neighbours, one with the diagnostics and one without, in
random order: other programs disturb both alike, and if the diagnostics cost nothing, the difference of a pair is as
often too large as too small. So the mean of the middle half of all differences is unbiased, and outliers do not count.

That mean would miss rare work. So each kind of turn has pairs of its own, as many as its measurement needs: `step`
(phases, progress), `row` (a row of metrics as well), `beat` (a row of the heartbeat as well). The time of row and beat
beyond `step` is spread over the steps between two of them. In the pairs `null` both turns are without diagnostics, and
their difference is the error of the method. Telemetry and the attention picture are timed by themselves.

On a CPU, glibc gives freed memory back to the system and asks for it again, some 2,000 to 10,000 pages in a step of the
showcase, as it happens to lie. That is a tenth of a step's time and most of its scatter, so here it keeps its memory.

The clock is the processor's time on a CPU, so that other programs do not count, and the wall clock on a GPU.
"""

import argparse
import contextlib
import ctypes
import random
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

import torch

from lib.results import ResultFile, cpu_name
from trifocal.distributed import DistributedContext
from trifocal.runlog import Heartbeat, MetricsWriter, Progress, Watchdog
from trifocal.train import load_config, loop
from trifocal.train.config.check import choose_device, preflight
from trifocal.train.config.sections import RunConfig
from trifocal.train.run_folder import RunLock, create_run_directory
from trifocal.train.setup import TrainSetup

ROOT = Path(__file__).parent.parent
NEVER = 10**9
REPEATS = 5
WARM_UP = 20
KINDS = ("step", "row", "beat", "null")
MIX = ("step",) * 5 + ("row", "beat", "null")
"""Kinds of pairs in equal parts of the run: the work of every step counts in full, and so has the most pairs."""


class Quiet:
    """A heartbeat that has no thread and writes nothing."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def update(self, **news: Any) -> None:
        pass


class Ticker(threading.Event):
    """In place of the heartbeat's clock: the thread beats after `beat`, and sets `beaten`."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.beaten = threading.Event(), threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.beaten.set()
        self.go.wait()
        self.go.clear()
        return self.is_set()

    def beat(self) -> None:
        self.beaten.clear()
        self.go.set()

    def set(self) -> None:
        super().set()
        self.go.set()


class Turn(NamedTuple):
    """One turn: its kind, or "" without diagnostics, and its times."""

    kind: str
    wall_seconds: float
    processor_seconds: float


def schedule(pairs: int) -> list[tuple[str, str, str]]:
    """The kind of every pair, and the kinds of its two turns in order; "" is a turn without diagnostics."""
    generator = random.Random(0)
    order: list[tuple[str, str, str]] = []
    while len(order) < pairs:
        for kind in generator.sample(MIX, len(MIX)):
            on = "" if kind == "null" else kind
            order.append((kind, on, "") if generator.random() < 0.5 else (kind, "", on))
    return order[:pairs]


class Measured(loop.Trainer):
    """A run whose diagnostics are switched on and off between turns."""

    steps_in_turn = 1
    order: Sequence[tuple[str, str, str]] = ()

    def prepare(self) -> None:
        """Before the run."""
        # A checkpoint in the middle of a turn would take far longer than the diagnostics.
        self.saver.save = lambda **_: None
        self.turns: list[Turn] = []
        self.whole_config = self.config
        self.quiet = Quiet(), MetricsWriter(None), Progress(self.config.train.steps, enabled=False)

    def open_diagnostics(self, stack: ExitStack) -> None:
        """Start all of them as the run does; they stay, and are used in some turns."""
        log = self.whole_config.log
        # Threads that the run itself began, as far as they would disturb.
        self.log.heartbeat.close()
        directory, device = self.setup.directory, self.setup.device
        heartbeat = Heartbeat(directory / "heartbeat", 0, log.heartbeat_seconds, device=device)
        self.ticker = heartbeat._stop = Ticker()
        metrics = stack.enter_context(MetricsWriter(directory / "metrics.jsonl"))
        stack.enter_context(heartbeat)
        stack.enter_context(Watchdog(heartbeat, directory, device=device))
        progress = stack.enter_context(Progress(self.config.train.steps, start_step=self.state.step))
        self.whole = heartbeat, metrics, progress
        self.ticker.beaten.wait()

    def switch(self, kind: str, *, last_step: bool) -> None:
        """Use the diagnostics in the next step, or do not."""
        log = self.log
        log.heartbeat, log.metrics, log.progress = self.whole if kind else self.quiet
        self.tracer._phases = log.heartbeat
        interval = 1 if kind == "row" and last_step else NEVER
        self.config = replace(self.whole_config, log=replace(self.whole_config.log, interval_steps=interval))

    def _take_step(self) -> bool:
        turn, position = divmod(self.state.step - WARM_UP, self.steps_in_turn)
        if not 0 <= turn < 2 * len(self.order):
            return super()._take_step()
        if turn == 0 and position == 0:
            self.stack = ExitStack()
            self.open_diagnostics(self.stack)
        kind = self.order[turn // 2][1 + turn % 2]
        # Switching is no part of a step.
        self.switch(kind, last_step=position == self.steps_in_turn - 1)
        if position == 0:
            self.wait()
            self.began = time.perf_counter(), time.process_time()
            if kind == "beat":
                self.ticker.beat()
        more = super()._take_step()
        if position == self.steps_in_turn - 1:
            self.wait()
            self.ticker.beaten.wait()
            wall, processor = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
            self.turns.append(Turn(kind, wall / self.steps_in_turn, processor / self.steps_in_turn))
            if len(self.turns) == 2 * len(self.order):
                self.switch("step", last_step=False)
                self.time_the_rare()
                self.stack.close()
        return more

    def time_the_rare(self) -> None:
        """Telemetry and the attention picture, by themselves."""
        self.rare = {}
        batch = next(self.setup.loader)
        looks = {
            "telemetry": lambda: self.evaluator.measure_attention(self.state.step, batch),
            "picture": lambda: self.evaluator.picture_attention(self.state.step),
        }
        clock = time.process_time if self.setup.device.type == "cpu" else time.perf_counter
        for name, look in looks.items():
            times = []
            for _ in range(REPEATS + 1):
                self.wait()
                begin = clock()
                look()
                self.wait()
                times.append(clock() - begin)
            # The first one compiles and allocates.
            self.rare[name] = times[1:]

    def wait(self) -> None:
        """For the device."""
        if self.setup.device.type == "cuda":
            torch.cuda.synchronize()


def keep_memory() -> None:
    """Let glibc keep freed memory; elsewhere nothing happens."""
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        # The most that it takes: larger blocks are mapped and unmapped each time.
        libc.mallopt(mmap_threshold, 2**25)
        libc.mallopt(trim_threshold, 2**31 - 1)


def measure(config: RunConfig, steps: int, order: Sequence[tuple[str, str, str]]) -> Measured:
    """Run it."""
    device = choose_device(config.run.device)
    processes = DistributedContext(device=device)
    tokenizer, _ = preflight(config, device)
    setup = TrainSetup(config, Path(config.run.directory), processes, tokenizer)
    made: list[Measured] = []

    def make_trainer(*parts: Any) -> Measured:
        trainer = Measured(*parts)
        trainer.steps_in_turn, trainer.order = steps, order
        trainer.prepare()
        made.append(trainer)
        return trainer

    loop.Trainer = make_trainer
    with RunLock() as lock:
        create_run_directory(config, lock, overwrite=True)
        loop.run_training(setup, [], None)
    return made[0]


def middle_mean(values: Sequence[float]) -> float:
    """Mean of the middle half."""
    quarter = len(values) // 4
    return fmean(sorted(values)[quarter : len(values) - quarter])


class Differences:
    """The extra time of turns with diagnostics over their neighbours without, for each step; seconds of one clock.

    Args:
        turns: In order, two a pair.
        order: Order of the pairs.
        clock: Field of a turn.
        steps: In a turn.
        per_step: Number of rows, and of beats, for each step.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        order: Sequence[tuple[str, str, str]],
        clock: str,
        steps: int,
        per_step: Mapping[str, float],
    ) -> None:
        self.steps, self.per_step = steps, per_step
        self.of_kind: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.without: list[float] = []
        for (kind, first, _), earlier, later in zip(order, turns[::2], turns[1::2], strict=True):
            with_, without = (earlier, later) if first else (later, earlier)
            self.of_kind[kind].append(getattr(with_, clock) - getattr(without, clock))
            self.without.append(getattr(without, clock))

    def estimate(self) -> dict[str, float]:
        """The cost of each kind for a step, in percent; and of all together."""
        return self._estimate(self.of_kind)

    def intervals(self, resamples: int = 1000) -> dict[str, tuple[float, float]]:
        """95 % intervals of the same, from as many samples of the pairs drawn with replacement."""
        generator = random.Random(0)
        drawn = [
            self._estimate({kind: generator.choices(values, k=len(values)) for kind, values in self.of_kind.items()})
            for _ in range(resamples)
        ]
        found = {}
        for name in drawn[0]:
            parts = quantiles([estimate[name] for estimate in drawn], n=40)
            found[name] = parts[0], parts[-1]
        return found

    def _estimate(self, of_kind: Mapping[str, Sequence[float]]) -> dict[str, float]:
        percent = 100 / median(self.without)
        costs = {kind: percent * middle_mean(values) for kind, values in of_kind.items()}
        for kind, share in self.per_step.items():
            # A turn has one of them, and its difference is divided by its steps.
            costs[kind] = (costs[kind] - costs["step"]) * self.steps * share
        return {**costs, "all but the rare": costs["step"] + sum(costs[kind] for kind in self.per_step)}


def rows_of(trainer: Measured, per_step: Mapping[str, float], intervals: Mapping[str, int]) -> list[dict[str, Any]]:
    """The table."""
    steps, order = trainer.steps_in_turn, trainer.order
    on_cpu = trainer.setup.device.type == "cpu"
    by, clock = ("processor time", "processor_seconds") if on_cpu else ("wall clock", "wall_seconds")
    found = Differences(trainer.turns, order, clock, steps, per_step)
    step, bounds, percents = median(found.without), found.intervals(), found.estimate()
    rows: list[dict[str, Any]] = []
    for what, percent in percents.items():
        low, high = bounds[what]
        pairs = len(found.of_kind.get(what, order))
        row = {"what": what, "by": by, "pairs": pairs, "step_ms": 1e3 * step, "percent": percent}
        rows.append({**row, "low_95": low, "high_95": high})
    rare = rows_of_the_rare(trainer.rare, intervals, by, step)
    whole, (low, high) = "all but the rare", bounds["all but the rare"]
    more = sum(row["percent"] for row in rare)
    row = {"what": "everything", "by": by, "step_ms": 1e3 * step, "percent": percents[whole] + more}
    return [*rows, *rare, {**row, "low_95": low + more, "high_95": high + more}]


def rows_of_the_rare(
    rare: Mapping[str, Sequence[float]], intervals: Mapping[str, int], by: str, step_seconds: float
) -> list[dict[str, Any]]:
    """The cost of rare work, spread over the steps between."""
    rows = []
    for what, times in rare.items():
        every = intervals[what]
        if every:
            each = median(times)
            percent = 100 * each / (every * step_seconds)
            rows.append({"what": what, "by": by, "each_ms": 1e3 * each, "every_steps": every, "percent": percent})
    return rows


def main() -> int:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="showcase.toml")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--pairs", type=int, default=1600, help=f"pairs of neighbouring turns; at least {len(MIX)}")
    parser.add_argument("--steps", type=int, default=1, help="in a turn")
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options, extra = parser.parse_known_args()
    if options.device == "cpu":
        keep_memory()
    total = WARM_UP + 2 * options.steps * options.pairs
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "run.directory": f"{folder}/run", "run.device": options.device, "data.source": "builtin",
            "train.steps": total + 1, "schedule.warmup_steps": 1, "checkpoint.interval_steps": total,
            "evaluate.interval_steps": 0, "log.sample_interval_steps": 0, "log.telemetry_interval_steps": 0,
        }  # fmt: skip
        preset = load_config(ROOT / "configs" / options.config)
        given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        config = load_config(ROOT / "configs" / options.config, [*given, *extra])
        trainer = measure(config, options.steps, schedule(options.pairs))
        if len(trainer.turns) < 2 * options.pairs:
            print(f"stopped at step {trainer.state.step} of {total}: nothing is written", file=sys.stderr)
            return 1
        step = median(turn.wall_seconds for turn in trainer.turns if not turn.kind)
        per_step = {"row": 1 / config.log.interval_steps, "beat": step / config.log.heartbeat_seconds}
        intervals = {"telemetry": preset.log.telemetry_interval_steps, "picture": preset.evaluate.interval_steps}
        rows = rows_of(trainer, per_step, intervals)
    file = ResultFile(
        f"diagnostics_overhead_{Path(options.config).stem}",
        f"Cost of the diagnostics at their defaults: {options.config}",
        folder=options.output, commit=options.commit, device=cpu_name() if options.device == "cpu" else "",
    )  # fmt: skip
    notes = [
        f"{options.pairs} pairs of neighbouring turns of {options.steps} steps, one with the diagnostics and one "
        "without, in random order. Means of the middle half of the differences, and 95 % intervals of these, by "
        "resampling pairs.",
        f"A row of metrics every {config.log.interval_steps} steps, of the heartbeat every "
        f"{config.log.heartbeat_seconds:g} s: `row` and `beat` are spread over these. `null`: both turns without. "
        f"Rare: telemetry and the attention picture of the evaluations, medians of {REPEATS}, spread over the steps "
        "between two of them.",
    ]
    print(file.write(rows, notes=notes).read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
