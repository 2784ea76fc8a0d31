"""What the attention's telemetry costs, as a share of the step time at the default interval.

    python benchmarks/telemetry_cost.py                                    # showcase, on this machine's device
    python benchmarks/telemetry_cost.py showcase m7c_2k_test m7c_long -- --data.source builtin

Trains each configuration for a while and looks at the attention ten times as often as by default, so that the median of
a look is known well. A look is timed with the work that was queued before it already done, and until its figures are on
the host; a step is timed without looks. Pictures are timed apart: one is stored at each evaluation.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from trifocal.bench.results import ResultFile
from trifocal.runlog.jsonl import read_lines
from trifocal.runlog.metrics import read_metrics
from trifocal.train.run_config import LogSection

ROOT = Path(__file__).parent.parent
INTERVAL = LogSection().telemetry_interval_steps


def train(config: str, steps: int, interval: int, evaluate: int, extra: list[str]) -> tuple[float, float]:
    """Train in a process of its own; the median seconds of a step, and of an entry into the phase `telemetry`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "trifocal", "train", str(ROOT / "configs" / f"{config}.toml"),
            "--run.directory", f"{folder}/run", "--train.steps", str(steps),
            "--schedule.warmup_steps", str(steps // 10), "--checkpoint.interval_steps", str(steps),
            "--log.interval_steps", "5", "--log.sample_interval_steps", "0",
            "--log.telemetry_interval_steps", str(interval), "--evaluate.interval_steps", str(evaluate),
            "--evaluate.batches", "1", *extra,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{config}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
        rows = read_metrics(f"{folder}/run/metrics.jsonl", "train")
        beats = read_lines(f"{folder}/run/heartbeat/rank0.jsonl")
    # The first rows hold start-up and compilation.
    return median(row["step_seconds"] for row in rows[len(rows) // 2 :]), beats[-1]["typical_seconds"]["telemetry"]


def main() -> int:
    """Measure each configuration and write the table; the exit status is 1 if one is over the bound of 2 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", default=["showcase"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    own, _, extra = " ".join(sys.argv[1:]).partition(" -- ")
    arguments = parser.parse_args(own.split())
    file = ResultFile(
        "telemetry_cost", "Cost of the attention's telemetry", folder=arguments.output, commit=arguments.commit
    )
    rows: list[dict[str, Any]] = []
    for config in arguments.configs:
        step, look = train(config, arguments.steps, INTERVAL // 10, 0, extra.split())
        # Evaluator at the end alone: what is left are the pictures of ten evaluations.
        _, picture = train(config, arguments.steps, arguments.steps, arguments.steps // 10, extra.split())
        rows.append(
            {
                "config": config,
                "step_ms": 1000 * step,
                "look_ms": 1000 * look,
                "picture_ms": 1000 * picture,
                "interval_steps": INTERVAL,
                "telemetry_share_percent": 100 * look / (INTERVAL * step),
            }
        )
        print(rows[-1], flush=True)
        page = file.write(rows, notes=["The share is look / (interval * step); the bound is 2 %."])
    print(page.read_text())
    return int(any(row["telemetry_share_percent"] > 2 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
