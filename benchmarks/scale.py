"""Train the production model on one GPU and on several, under DDP, FSDP2 and HSDP, and compare the speeds.

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

The most important rows come first: every part with the first of `--checkpointing`, then those with the others. A row is
a start of `trifocal train` in as many processes as GPUs, and its figures are those of the run's files. A row that does
not end in its time is stopped by SIGTERM, as by a scheduler, and counts with its steps. Both files of results are
written after every row.
"""

import argparse
import dataclasses
import itertools
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lib.processes import STOP_SECONDS, train
from lib.recorder import failure
from lib.results import ResultFile
from trifocal.cli.output import unwinding_signals
from trifocal.runlog import read_metrics
from trifocal.train import load_config
from trifocal.train.run_folder import load_run

CONFIGS = Path(__file__).parent.parent / "configs"
GIB = 2**30
OWN_PHASES = ("data", "forward", "backward", "optimizer")
PARTS = ("one", "speed", "text", "wide")
COLUMNS = (
    "part", "mode", "gpus", "checkpointing", "graphs", "steps", "tokens_per_second", "times_one_gpu", "efficiency",
    "step_ms", "host_ms", "wait_ms", "peak_gib_a_gpu", "executed_mfu", "checkpoint_ms", "checkpoint_blocked_seconds",
    "checkpoint_share", "first_loss", "last_loss", "warnings", "wall_seconds", "outcome",
)  # fmt: skip
NOTES = [
    "step ms: the median over rows of metrics beside which no checkpoint was written, without the first two; "
    "tokens/s and efficiency follow from it. Memory of rank 0's GPU.",
    "checkpoint ms: what a checkpoint costs. Training stands still for checkpoint blocked seconds; what all steps "
    "then take above the median, until it is written, is added.",
    "host ms: a step's time in data, forward, backward and optimizer on rank 0's host, wait ms: for the others; means "
    "of the whole run, the first steps' compilation included.",
    "checkpoint share: seconds that training waited for a checkpoint, over the time between two of them in the "
    "production run's configuration, or in that of 1.3 billion parameters.",
]
# The least time to begin a row.
LEAST_SECONDS = 30.0
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
    }
    given = dict(pair.split("=", 1) for pair in options.set)
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
            if mode == "hsdp":
                # Two copies, where each can still be shared.
                named["parallel.shards"] = max(2, size // 2)
            found.append(Row(part, mode, size, shown, graphs, config, {**common, **own, **named, **given}))
    return found


def part_settings(part: str, size: int, options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The configuration of a part, and the flags that differ from it."""
    steps = {"one": min(options.steps, 100), "text": options.text_steps, "wide": options.wide_steps}.get(
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


def rows_beside(save: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with a step that a checkpoint was written beside: from its own step until its end is noted."""
    begin = int(save["message"].split()[0].removeprefix("step_"))
    return [row for row in rows if row["step"] > begin and row["step"] - row["steps"] < save["step"]]


def figures(case: Row, run: Path) -> dict[str, Any]:
    """The figures of the run's own files; of a run without a checkpoint, its outcome alone."""
    metrics = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    rows = [row for row in metrics if row["kind"] == "train"]
    # A row is the mean of the steps since the last one.
    for before, row in zip([{"step": 0}, *rows], rows, strict=False):
        row["steps"] = row["step"] - before["step"]
    saved = [row for row in metrics if row.get("name") == "checkpoint_saved"]
    if not rows or not saved:
        return {"outcome": "failed"}
    config, steps = load_run(run), saved[-1]["step"]
    slowed = [rows_beside(save, rows) for save in saved]
    # The first two rows compile and record; without any others, the second half.
    steady = [row for row in rows[2:] if not any(row in each for each in slowed)] or rows[len(rows) // 2 :]
    step_seconds = median(row["step_seconds"] for row in steady)
    # The first checkpoint warms files and buffers up; the last is never written in the background.
    typical = -2 if config.checkpoint.asynchronous and len(saved) > 1 else -1
    blocked = saved[typical]["blocked_seconds"]
    more = sum(row["steps"] * (row["step_seconds"] - step_seconds) for row in slowed[typical])
    interval = load_config(CONFIGS / case.checkpoint_config).checkpoint.interval_steps
    beat = json.loads((run / "heartbeat" / "rank0.jsonl").read_text().splitlines()[-1])["total_seconds"]
    wanted = config.train.steps
    return {
        "steps": steps,
        "compiled": config.train.compile,
        "tokens_per_second": config.train.global_batch_size * config.train.sequence_length / step_seconds,
        "step_ms": 1000 * step_seconds,
        "host_ms": 1000 * sum(beat.get(phase, 0.0) for phase in OWN_PHASES) / steps,
        "wait_ms": 1000 * beat.get("wait", 0.0) / steps,
        "data_wait_ms_p95": 1000 * steady[-1]["data_wait_seconds_p95"],
        "phase_seconds": beat,
        "rows_step_ms": [1000 * row["step_seconds"] for row in rows],
        "peak_gib_a_gpu": max(row["memory_peak_bytes"] for row in rows) / GIB,
        "checkpoint_seconds": [row["save_seconds"] for row in saved],
        "checkpoint_ms": 1000 * (blocked + more),
        "checkpoint_blocked_seconds": blocked,
        "checkpoint_share": blocked / (interval * step_seconds),
        "executed_mfu": median(row["executed_mfu"] for row in steady) if "executed_mfu" in steady[0] else None,
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "outcome": "ended" if steps == wanted else f"stopped at step {steps} of {wanted}",
    }


def measure(case: Row, folder: Path, seconds: float) -> tuple[dict[str, Any], str]:
    """Train a row, and delete its files; returns its figures and its output."""
    run, begin = folder / case.label, time.monotonic()
    output = train(CONFIGS / case.config, run, case.flags, case.gpus, seconds)
    found: dict[str, Any] = {"wall_seconds": time.monotonic() - begin}
    try:
        found |= figures(case, run)
    except Exception as error:
        found["outcome"] = failure(error)
    if found["wall_seconds"] > seconds and "step_ms" not in found:
        found["outcome"] = f"stopped after {seconds:.0f} s, before a checkpoint"
    # Its checkpoints may fill the disk.
    shutil.rmtree(run, ignore_errors=True)
    return found, output


def compared(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their speed in multiples of one GPU's."""
    ended = [row for row in found if "step_ms" in row]
    one = {(row["checkpointing"], row["graphs"]): row for row in ended if row["part"] == "one"}
    out = []
    for row in found:
        base = one.get((row["checkpointing"], row["graphs"]))
        if base and row in ended and row["part"] in ("one", "speed"):
            times = row["tokens_per_second"] / base["tokens_per_second"]
            row = row | {"times_one_gpu": times, "efficiency": times / row["gpus"]}
        out.append(row)
    return out


@unwinding_signals()
def main() -> int:
    """Run every row; the exit status is 1 if one failed, or had no time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=max(torch.cuda.device_count(), 1))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--modes", nargs="+", choices=("ddp", "fsdp", "hsdp"), default=["ddp", "fsdp"])
    parser.add_argument("--checkpointing", nargs="+", default=["all", "none"], help="none, all or a range of layers")
    parser.add_argument("--sequences", type=int, default=8, help="a GPU, in one forward pass of `one` and `speed`")
    parser.add_argument("--steps", type=int, default=500, help="steps of `speed`")
    parser.add_argument("--text-steps", type=int, default=300)
    parser.add_argument("--wide-steps", type=int, default=16)
    parser.add_argument("--compile", choices=("true", "false"), default="true")
    parser.add_argument("--graphs", nargs="+", choices=("true", "false"), default=["true", "false"], help="recorded")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="in the configuration of every row")
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
    changed = [f"In every row: {' '.join(options.set)}."] if options.set else []
    found: list[dict[str, Any]] = []

    def keep(case: Row, row: dict[str, Any], output: str) -> None:
        head = {name: getattr(case, name) for name in ("part", "mode", "gpus", "checkpointing", "graphs", "config")}
        warned = [line for line in output.splitlines() if "warning" in line.lower()]
        found.append({**head, **row, "warnings": len(warned)})
        file.write(compared(found), notes=NOTES + changed, columns=COLUMNS)
        print(json.dumps(compared(found)[-1]), flush=True)
        print("\n".join(warned)[:2000] if row["outcome"] == "ended" else output[-6000:], flush=True)

    deadline = time.monotonic() + options.budget
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        for case in rows(options):
            remaining = deadline - time.monotonic()
            if remaining < LEAST_SECONDS:
                keep(case, {"outcome": "left out: no time"}, "")
            else:
                keep(case, *measure(case, Path(folder), min(options.limit, remaining - STOP_SECONDS)))
    print(file.page.read_text())
    return int(any("step_ms" not in row for row in found))


if __name__ == "__main__":
    sys.exit(main())
