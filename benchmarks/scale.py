"""Train the production model on one GPU and on several, under DDP and FSDP2, and compare the speeds.

    python benchmarks/scale.py                                   # every part on all of this machine's GPUs
    python benchmarks/scale.py --gpus 4 --parts one speed wide --checkpointing all --budget 330
    python benchmarks/scale.py --parts one speed --graphs false --set parallel.reshard_after_forward=false
    python benchmarks/scale.py --device cpu --gpus 2 --tiny      # does the script work? Small models, few steps

| part | what runs |
|---|---|
| `one` | one GPU, 8 sequences: the base of the comparison |
| `speed` | the shake run: 8 sequences a GPU, 500 steps on random tokens, two checkpoints on the way |
| `text` | the production run of its preset, 300 steps on real text |
| `wide` | the model of 1.3 billion parameters on 8,192 tokens, sharded, with checkpoints written in the background |

The most wanted rows come first: every part with the first of `--checkpointing`, then those with the others. One start
of the processes takes the rows up to the next change of their number, one after another (`scale_worker.py`). A row that
does not end in its time is stopped as a scheduler would stop it, and counts with the steps that it has; one that does
not stop either, or fails, says so, all its processes are ended, and the rest is started again. PyTorch keeps compiled
code in a folder that all rows share, GPU by GPU. Both files of results are written after every row.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from trifocal.bench.results import ResultFile
from trifocal.distributed.rendezvous import places_here

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "configs"
PARTS = ("one", "speed", "text", "wide")
COLUMNS = (
    "part", "mode", "gpus", "checkpointing", "graphs", "steps", "tokens_per_second", "times_one_gpu", "step_ms",
    "host_ms", "wait_ms", "peak_gib_a_gpu", "formula_gib", "executed_mfu", "checkpoint_blocked_seconds",
    "checkpoint_share", "first_loss", "last_loss", "warnings", "wall_seconds", "outcome",
)  # fmt: skip
# A row is not begun in less time, and gets so long to save once it was asked to stop.
LEAST_SECONDS, STOP_SECONDS = 30.0, 25.0
TINY = {"model.num_layers": 2, "model.dim": 64, "model.mlp_dim": 128, "train.sequence_length": 128,
        "train.precision": "fp32"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One run: a configuration and the flags that differ from it."""

    part: str
    mode: str
    gpus: int
    checkpointing: str
    graphs: str
    config: str
    flags: dict[str, Any]

    @property
    def label(self) -> str:
        """A name for files."""
        graphs = "_graphs" if self.graphs == "true" else ""
        return f"{self.part}_{self.mode}_{self.gpus}_checkpointing_{self.checkpointing}{graphs}"

    @property
    def checkpoint_config(self) -> str:
        """The configuration with the checkpoints: the shake run is the production model."""
        return self.config.replace("m7c_shake", "m7c_125m")


def rows(options: argparse.Namespace) -> list[Row]:
    """The rows, the most important first; rows with the same number of GPUs follow one another."""
    common = {
        "run.device": options.device,
        "log.sample_interval_steps": 0,
        "log.telemetry_interval_steps": 0,
        "log.heartbeat_seconds": 1.0,
        "train.compile": options.compile,
        **(TINY if options.tiny else {}),
        **dict(pair.split("=", 1) for pair in options.set),
    }
    found = []
    for kind, part in itertools.product(options.checkpointing, options.parts):
        if part == "wide" and kind != options.checkpointing[0]:
            continue
        size = 1 if part == "one" else options.gpus
        config, own = part_settings(part, size, options)
        modes = {"one": ["none"], "wide": ["fsdp"]}.get(part, options.modes)
        shown = "all" if part == "wide" else kind
        for graphs, mode in itertools.product(options.graphs, modes):
            named = {"train.activation_checkpointing": shown, "parallel.mode": mode, "train.cuda_graphs": graphs}
            found.append(Row(part, mode, size, shown, graphs, config, {**common, **own, **named}))
    return found


def part_settings(part: str, size: int, options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The configuration of a part, and the flags that differ from it."""
    steps = {"one": min(options.steps, 60), "text": options.text_steps, "wide": options.wide_steps}.get(
        part, options.steps
    )
    flags: dict[str, Any] = {
        "train.steps": steps,
        "checkpoint.interval_steps": steps // 2,
        "schedule.warmup_steps": min(20, steps),
    }
    if part == "text":
        # Four sequences a step, however many processes there are.
        micro = max(1, min(2, 4 // size))
        sizes = {"train.micro_batch_size": micro, "train.global_batch_size": max(4, size)}
        return "m7c_125m.toml", flags | sizes | {"data.source": "builtin", "evaluate.interval_steps": steps // 2}
    flags |= {"evaluate.interval_steps": 0, "data.source": "synthetic", "log.interval_steps": 10}
    if part == "wide":
        return "wide_1b3.toml", flags | {"log.interval_steps": 2, "train.global_batch_size": max(8, size)}
    count = options.sequences
    return "m7c_shake.toml", flags | {"train.micro_batch_size": count, "train.global_batch_size": count * size}


class Start:
    """One start of processes that take rows one after another.

    They are started here, as torchrun would, and not by it: its workers would outlive it where it is killed.

    Args:
        cases: The rows, all with the same number of GPUs.
        folder: Of runs, outputs and figures.
    """

    def __init__(self, cases: list[Row], folder: Path) -> None:
        self.folder = folder
        self.begin = time.monotonic()
        plan = folder / "plan.json"
        plan.write_text(
            json.dumps(
                [
                    {**dataclasses.asdict(case), "label": case.label, "checkpoint_config": case.checkpoint_config}
                    for case in cases
                ]
            )
        )
        self.store, places = places_here(cases[0].gpus)
        self.processes = []
        for place in places:
            with (folder / "start").open("ab") as log:
                # A group for each, so that its own children can be ended with it.
                process = subprocess.Popen(
                    [sys.executable, str(HERE / "scale_worker.py"), str(CONFIGS), str(plan)],
                    stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=HERE.parent,
                    env={"OMP_NUM_THREADS": "1", **os.environ, **place},
                )  # fmt: skip
            self.processes.append(process)

    def answer(self, case: Row, seconds: float) -> dict[str, Any]:
        """The figures of a row; waits for the given time, and a little longer if the row must be stopped."""
        found = self._wait(case, time.monotonic() + seconds)
        if found["outcome"] == "no end":
            for process in self.processes:
                process.send_signal(signal.SIGTERM)
            found = self._wait(case, time.monotonic() + STOP_SECONDS)
        return {**found, "outcome": f"no end in {seconds:.0f} s"} if found["outcome"] == "no end" else found

    def _wait(self, case: Row, deadline: float) -> dict[str, Any]:
        path = self.folder / f"{case.label}.json"
        while not path.exists():
            if time.monotonic() > deadline:
                return {"outcome": "no end"}
            ended = [(process.poll(), rank) for rank, process in enumerate(self.processes)]
            failed = [f"rank {rank} with status {status}" for status, rank in ended if status is not None]
            if failed and not path.exists():
                return {"outcome": f"ended: {', '.join(failed)}"}
            time.sleep(0.1)
        seconds, self.begin = time.monotonic() - self.begin, time.monotonic()
        return {"wall_seconds": seconds, **json.loads(path.read_text())}

    def end(self, *, well: bool) -> None:
        """End the processes and all that they started; after a plan that went well they end by themselves."""
        deadline = time.monotonic() + (10.0 if well else 0.0)
        for process in self.processes:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def output(self, case: Row) -> str:
        """The output of all processes in a row, and at their start."""
        files = [*sorted(self.folder.glob(f"{case.label}_rank*")), self.folder / "start"]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in files)


def measure(wanted: list[Row], options: argparse.Namespace, keep: Any) -> None:
    """Run the rows and pass each with its figures and its output to `keep`."""
    deadline = time.monotonic() + options.budget
    left = list(wanted)
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        while left:
            if deadline - time.monotonic() < LEAST_SECONDS:
                for case in left:
                    keep(case, {"outcome": "left out: no time"}, "")
                return
            cases = list(itertools.takewhile(lambda case: case.gpus == left[0].gpus, left))
            start, well = Start(cases, Path(folder)), True
            try:
                for case in cases:
                    remaining = deadline - time.monotonic()
                    if remaining < LEAST_SECONDS:
                        well = False
                        break
                    found = start.answer(case, min(options.limit, remaining - STOP_SECONDS))
                    keep(case, found, start.output(case))
                    left.remove(case)
                    well = "step_ms" in found
                    if not well:
                        break
            finally:
                start.end(well=well)


def compared(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their speed in multiples of one GPU's."""
    ended = [row for row in found if "step_ms" in row]
    one = {(row["checkpointing"], row["graphs"]): row for row in ended if row["part"] == "one"}
    out = []
    for row in found:
        base = one.get((row["checkpointing"], row["graphs"]))
        if base and row in ended and row["part"] in ("one", "speed"):
            row = row | {"times_one_gpu": row["tokens_per_second"] / base["tokens_per_second"]}
        out.append(row)
    return out


def main() -> int:
    """Run every row; the exit status is 1 if one failed, or had no time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=max(torch.cuda.device_count(), 1))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--modes", nargs="+", choices=("ddp", "fsdp", "hsdp"), default=["ddp", "fsdp"])
    parser.add_argument("--checkpointing", nargs="+", default=["all", "none"], help="none, all or a range of layers")
    parser.add_argument("--sequences", type=int, default=8, help="a GPU, in one forward pass of `one` and `speed`")
    parser.add_argument("--steps", type=int, default=500, help="of `speed`")
    parser.add_argument("--text-steps", type=int, default=300)
    parser.add_argument("--wide-steps", type=int, default=16)
    parser.add_argument("--compile", choices=("true", "false"), default="true")
    parser.add_argument("--graphs", nargs="+", choices=("true", "false"), default=["true", "false"], help="recorded")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the configuration, in every row")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers in place of the models")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for all rows; later ones are left out")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a row")
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--scratch", type=Path, default=None, help="where the runs are written; deleted in the end")
    options = parser.parse_args()
    file = ResultFile(
        f"scale_{options.gpus}",
        f"The production model on one GPU and on {options.gpus}, {options.sequences} sequences a GPU",
        folder=options.output, commit=options.commit,
    )  # fmt: skip
    notes = [
        "Medians over the second half of each run's rows of metrics; memory of the fullest GPU.",
        "host ms: a step's time in data, forward, backward and optimizer on rank 0's host, wait ms: for the others.",
        "formula gib: the estimate of `trifocal doctor`, before anything is run (`trifocal.models.training_memory`).",
        "checkpoint share: seconds that training waited for a checkpoint, over the time between two of them in the "
        "production run's configuration, or in that of 1.3 billion parameters.",
    ]
    changed = [f"In every row: {' '.join(options.set)}."] if options.set else []
    found: list[dict[str, Any]] = []

    def keep(case: Row, row: dict[str, Any], output: str) -> None:
        head = {name: getattr(case, name) for name in ("part", "mode", "gpus", "checkpointing", "graphs", "config")}
        warned = [line for line in output.splitlines() if "warning" in line.lower()]
        found.append({**head, **row, "warnings": len(warned)})
        file.write(compared(found), notes=notes + changed, columns=COLUMNS)
        print(json.dumps(compared(found)[-1]), flush=True)
        print("\n".join(warned)[:2000] if row["outcome"] == "ended" else output[-6000:], flush=True)

    measure(rows(options), options, keep)
    print(file.page.read_text())
    return int(any("step_ms" not in row for row in found))


if __name__ == "__main__":
    sys.exit(main())
