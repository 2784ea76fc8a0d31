"""Train the showcase and its twins the same way and compare their validation losses over the run.

    python benchmarks/showcase.py                      # sparse (mean and learnable compressor) and dense, three seeds
    python benchmarks/showcase.py --seeds 1337 --jobs 1

The dense twin differs in the attention alone. Every variant sees the same tokens in the same order.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from lib.results import ResultFile, cpu_name
from trifocal.runlog import read_metrics

ROOT = Path(__file__).parent.parent
VARIANTS = {
    "sparse, mean compressor": ["--model.compressor", "mean"],
    "sparse, learnable compressor": ["--model.compressor", "mlp"],
    "dense": ["--model.attention", "dense"],
}


def run(variant: str, seed: int, extra: list[str]) -> dict[str, Any]:
    """Train one variant in a process of its own, on one thread, and read its evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "trifocal", "train", str(ROOT / "configs" / "showcase.toml"),
            "--run.directory", f"{folder}/run", "--run.seed", str(seed), "--data.seed", str(seed),
            "--run.device", "cpu", "--evaluate.interval_steps", "100", "--log.sample_interval_steps", "0",
            *VARIANTS[variant], *extra,
        ]  # fmt: skip
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
        if done.returncode:
            raise RuntimeError(f"{variant}, seed {seed}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
        rows = [row for row in read_metrics(f"{folder}/run/metrics.jsonl") if row["kind"] == "evaluation"]
    print(f"{variant}, seed {seed}: validation loss {rows[-1]['validation_loss']:.4f}", flush=True)
    return {
        "variant": variant,
        "seed": seed,
        "validation_loss": rows[-1]["validation_loss"],
        "bits_per_byte": rows[-1]["bits_per_byte"],
        "curve": [(row["step"], round(row["validation_loss"], 4)) for row in rows],
    }


def main() -> int:
    """Train every variant with every seed and write the table and the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1338, 1339])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    arguments, extra = parser.parse_known_args()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        futures = [pool.submit(run, name, seed, extra) for seed in arguments.seeds for name in arguments.variants]
        rows = [future.result() for future in futures]
    means = {
        name: mean(row["validation_loss"] for row in rows if row["variant"] == name) for name in arguments.variants
    }
    file = ResultFile(
        "showcase", "The showcase and its twins: validation loss, nats per byte",
        folder=arguments.output, device=cpu_name(), commit=arguments.commit,
    )  # fmt: skip
    print(
        file.write(rows, notes=[f"Mean over seeds, {name}: {value:.4f}." for name, value in means.items()]).read_text()
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
