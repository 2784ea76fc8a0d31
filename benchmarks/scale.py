"""The production model on packed text, on one GPU and on several under DDP, FSDP2 and HSDP: speed and memory.

    python benchmarks/scale.py                                   # one GPU, and all of this machine's
    python benchmarks/scale.py --gpus 4 --modes fsdp --set parallel.reshard_after_forward=false
    python benchmarks/scale.py --device cpu --gpus 1 2 --tiny    # does the script work? Small models, few steps

A row is a start of `trifocal train` in as many processes as GPUs, 8 sequences each, compiled and recorded, with a
checkpoint half way. One that does not end in its time is stopped by SIGTERM, as by a scheduler, and counts with its
steps. Both files of results are written after every row.
"""

import argparse
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

CONFIG = Path(__file__).parent.parent / "configs" / "m7c_shake.toml"
GIB = 2**30
SEQUENCES = 8
NOTES = (
    "step ms: the median over rows of metrics before the checkpoint, without the first two; tokens/s and efficiency "
    "follow from it. Memory of rank 0's GPU.",
    "checkpoint blocked seconds: how long training stood still for the checkpoint.",
)
COLUMNS = (
    "mode", "gpus", "steps", "tokens_per_second", "times_one_gpu", "efficiency", "step_ms", "peak_gib_a_gpu",
    "executed_mfu", "checkpoint_blocked_seconds", "first_loss", "last_loss", "warnings", "wall_seconds", "outcome",
)  # fmt: skip
# The least and the most time of a row.
LEAST_SECONDS, MAX_SECONDS = 30.0, 130.0
TINY = {"model.num_layers": 2, "model.dim": 64, "model.mlp_dim": 128, "train.sequence_length": 128, "train.steps": 8,
        "train.precision": "fp32", "train.compile": False, "checkpoint.interval_steps": 4}  # fmt: skip


def flags(mode: str, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """What differs from the configuration."""
    found = {
        "run.device": options.device, "parallel.mode": mode, "data.source": "builtin",
        "data.streams": max(options.gpus), "train.steps": options.steps, "schedule.warmup_steps": 8,
        "train.micro_batch_size": SEQUENCES, "train.global_batch_size": SEQUENCES * size,
        "train.activation_checkpointing": "none", "train.cuda_graphs": True, "train.compile": True,
        "checkpoint.interval_steps": options.steps // 2, "evaluate.interval_steps": 0, "log.interval_steps": 10,
        "log.sample_interval_steps": 0, "log.telemetry_interval_steps": 0,
    }  # fmt: skip
    if mode == "hsdp":
        # Two copies, where each can still be shared.
        found["parallel.shards"] = max(2, size // 2)
    return found | (TINY if options.tiny else {}) | dict(pair.split("=", 1) for pair in options.set)


def figures(run: Path, tokens_per_step: int) -> dict[str, Any]:
    """The figures of the run's own files."""
    metrics = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    rows = [row for row in metrics if row["kind"] == "train"]
    saved = [row for row in metrics if row.get("name") == "checkpoint_saved"]
    if not rows or not saved:
        return {"outcome": "failed: no checkpoint"}
    begun = int(saved[0]["message"].split()[0].removeprefix("step_"))
    # The first two rows compile and record; without any others, the last.
    steady = [row for row in rows[2:] if row["step"] <= begun] or rows[-1:]
    step_seconds = median(row["step_seconds"] for row in steady)
    return {
        "steps": saved[-1]["step"],
        "tokens_per_second": tokens_per_step / step_seconds,
        "step_ms": 1000 * step_seconds,
        "rows_step_ms": [1000 * row["step_seconds"] for row in rows],
        "peak_gib_a_gpu": max(row["memory_peak_bytes"] for row in rows) / GIB,
        "executed_mfu": median(row["executed_mfu"] for row in steady) if "executed_mfu" in steady[0] else None,
        "checkpoint_blocked_seconds": saved[0]["blocked_seconds"],
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "outcome": "ended",
    }


def measure(mode: str, size: int, seconds: float, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Train in n processes; returns the row's figures and the output of the processes."""
    given, begin = flags(mode, size, options), time.monotonic()
    folder = Path(tempfile.mkdtemp())
    try:
        output = train(CONFIG, folder / "run", given, size, seconds)
        length = int(given.get("train.sequence_length", 2048))
        found = figures(folder / "run", int(given["train.global_batch_size"]) * length)
    except Exception as error:
        output, found = str(error), {"outcome": failure(error)}
    finally:
        # Its checkpoints may fill the disk.
        shutil.rmtree(folder, ignore_errors=True)
    if found.get("steps", 0) < int(given["train.steps"]) and time.monotonic() - begin > seconds:
        found["outcome"] = f"stopped after {seconds:.0f} s, at step {found.get('steps', 0)}"
    return {**found, "wall_seconds": time.monotonic() - begin}, output


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their speed in multiples of one GPU's."""
    one = next((row for row in rows if row["gpus"] == 1 and "step_ms" in row), None)
    if one is None:
        return rows
    found = []
    for row in rows:
        if "step_ms" in row:
            times = row["tokens_per_second"] / one["tokens_per_second"]
            row = row | {"times_one_gpu": times, "efficiency": times / row["gpus"]}
        found.append(row)
    return found


@unwinding_signals()
def main() -> int:
    """Run every row; the exit status is 1 if one failed, or had no time."""
    count = max(torch.cuda.device_count(), 1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=sorted({1, count}), help="in this order")
    parser.add_argument("--modes", nargs="+", choices=("ddp", "fsdp", "hsdp"), default=["ddp", "fsdp", "hsdp"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="in the configuration of every row")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers in place of the model")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for all rows; later ones are left out")
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    title = f"The production model on one GPU and on several, {SEQUENCES} sequences a GPU"
    file = ResultFile("scale", title, folder=options.output, commit=options.commit)
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + options.budget
    for size in options.gpus:
        for mode in ["none"] if size == 1 else options.modes:
            left = deadline - time.monotonic() - STOP_SECONDS
            row, output = {"outcome": "left out: no time"}, ""
            if left >= LEAST_SECONDS:
                row, output = measure(mode, size, min(left, MAX_SECONDS), options)
            warned = [line for line in output.splitlines() if "warning" in line.lower()]
            found.append({"part": "text", "mode": mode, "gpus": size, **row, "warnings": len(warned)})
            file.write(compared(found), notes=NOTES, columns=COLUMNS)
            print(json.dumps(found[-1]), flush=True)
            print("\n".join(warned)[:2000] if row["outcome"] == "ended" else output[-6000:], flush=True)
    print(file.page.read_text())
    return int(any("step_ms" not in row for row in found))


if __name__ == "__main__":
    sys.exit(main())
