"""Train the production model on one GPU and on several, under DDP and FSDP2, and say what the others add.

    python benchmarks/scale.py                        # one GPU, then all of this machine's
    python benchmarks/scale.py --gpus 4 --only ddp fsdp --checkpointing all none
    python benchmarks/scale.py --device cpu --gpus 2 --config showcase.toml --sequences 4   # does the script work?

Every row is a run of its own with 8 sequences a GPU, on random tokens, with a checkpoint in the last step. A row
that fails, or does not end in its time, says so, and the others go on. The table is written after every row.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trifocal.bench.results import ResultFile
from trifocal.diagnostics import read_metrics

ROOT = Path(__file__).parent.parent
GIB = 2**30


def run(mode: str, size: int, checkpointing: str, limit_seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    """Train in processes of their own and read what they wrote."""
    row: dict[str, Any] = {"mode": mode, "gpus": size, "checkpointing": checkpointing}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}",
            "-m", "trifocal", "train", str(ROOT / "configs" / options.config),
            "--run.directory", f"{folder}/run", "--run.device", options.device, "--data.source", "synthetic",
            "--parallel.mode", mode, "--train.activation_checkpointing", checkpointing,
            "--train.micro_batch_size", str(options.sequences),
            "--train.global_batch_size", str(options.sequences * size),
            "--train.steps", str(options.steps), "--schedule.warmup_steps", "1",
            "--checkpoint.interval_steps", str(options.steps), "--evaluate.interval_steps", "0",
            "--log.interval_steps", "5", "--log.sample_interval_steps", "0", "--log.telemetry_interval_steps", "0",
        ]  # fmt: skip
        begin = time.monotonic()
        with log.open("wb") as file:
            # A group of its own, so that a run that hangs can be ended whole.
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT)
            try:
                status = process.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = None
        text = log.read_text(errors="replace")
        row["wall_seconds"] = time.monotonic() - begin
        if status != 0:
            row["outcome"] = "no end in time" if status is None else f"exit status {status}"
            print(f"{row}\n{text[-3000:]}", flush=True)
            return row
        rows = read_metrics(f"{folder}/run/metrics.jsonl")
    train = [entry for entry in rows if entry["kind"] == "train"]
    # The first half holds compilation and the first exchanges.
    steady = train[len(train) // 2 :]
    saved = [entry for entry in rows if entry.get("name") == "checkpoint_saved"]
    row |= {
        "tokens_per_second": median(entry["tokens_per_second"] for entry in steady),
        "step_ms": 1000 * median(entry["step_seconds"] for entry in steady),
        "peak_gib_a_gpu": max(entry["memory_peak_bytes"] for entry in train) / GIB,
        "checkpoint_seconds": saved[-1]["save_seconds"],
        "executed_mfu": steady[-1].get("executed_mfu"),
        "last_loss": train[-1]["loss"],
        "warnings": text.count("Warning"),
        "outcome": "ended",
    }
    if row["warnings"]:
        print("\n".join(line for line in text.splitlines() if "Warning" in line)[:2000], flush=True)
    print(row, flush=True)
    return row


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their speed in multiples of one GPU's."""
    one = {row["checkpointing"]: row["tokens_per_second"] for row in rows if row["gpus"] == 1 and _ended(row)}
    return [
        row | {"times_one_gpu": row["tokens_per_second"] / one[row["checkpointing"]]}
        if _ended(row) and row["checkpointing"] in one
        else row
        for row in rows
    ]


def _ended(row: dict[str, Any]) -> bool:
    return row["outcome"] == "ended"


def main() -> int:
    """Run every row; the exit status is 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=max(torch.cuda.device_count(), 1))
    parser.add_argument("--only", nargs="+", choices=("none", "ddp", "fsdp", "hsdp"), default=["none", "ddp", "fsdp"])
    parser.add_argument("--checkpointing", nargs="+", default=["all"], help="none, all or a range of layers")
    parser.add_argument("--config", default="m7c_125m.toml")
    parser.add_argument("--sequences", type=int, default=8, help="a GPU, in one forward pass")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--budget", type=float, default=225.0, help="seconds for all rows; later ones are left out")
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    wanted = [
        (mode, 1 if mode == "none" else options.gpus, kind) for kind in options.checkpointing for mode in options.only
    ]
    file = ResultFile(
        f"scale_{options.gpus}",
        f"{options.config} on one GPU and on {options.gpus}, {options.sequences} sequences a GPU",
        folder=options.output, commit=options.commit,
    )  # fmt: skip
    notes = ["Medians over the second half of each run; memory of rank 0; random tokens."]
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    page = None
    for index, (mode, size, checkpointing) in enumerate(wanted):
        left = options.budget - (time.monotonic() - begin)
        # The rest of the time in equal parts, and what a row does not take goes to the next ones.
        limit = left if index == len(wanted) - 1 else min(left, 1.5 * left / (len(wanted) - index))
        if limit < 10:
            rows.append({"mode": mode, "gpus": size, "checkpointing": checkpointing, "outcome": "left out: no time"})
            continue
        rows.append(run(mode, size, checkpointing, limit, options))
        page = file.write(compared(rows), notes=notes)
    if page is not None:
        print(page.read_text())
    return int(not all(map(_ended, rows)))


if __name__ == "__main__":
    sys.exit(main())
