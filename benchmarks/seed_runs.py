"""Train every seed configuration for a while, the production one at length, and write what came of it.

python benchmarks/seed_runs.py                    # every configuration, 20 steps; production 200, both ways
python benchmarks/seed_runs.py --only production  # production alone
python benchmarks/seed_runs.py --backend reference
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from trifocal.bench.results import ResultFile
from trifocal.runlog import read_metrics

ROOT = Path(__file__).parent.parent
GIB = 2**30


def run(name: str, config: str, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Train in a process of its own and read its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "trifocal", "train", str(ROOT / "configs" / config),
            "--run.directory", f"{folder}/run",
            "--train.steps", str(steps), "--schedule.warmup_steps", str(steps // 10),
            "--checkpoint.interval_steps", str(steps), "--evaluate.interval_steps", str(steps),
            "--log.interval_steps", "10", "--log.sample_interval_steps", "0", *overrides,
        ]  # fmt: skip
        print(f"{name}: {' '.join(command)}", flush=True)
        done = subprocess.run(command, capture_output=True, text=True)
        row: dict[str, Any] = {"run": name, "config": config, "steps": steps, "exit_status": done.returncode}
        if done.returncode:
            print((done.stdout + done.stderr)[-2000:], flush=True)
            return row
        rows = read_metrics(f"{folder}/run/metrics.jsonl")
    train = [row for row in rows if row["kind"] == "train"]
    evaluation = [row for row in rows if row["kind"] == "evaluation"]
    # The first rows hold start-up and compilation.
    steady = train[len(train) // 2 :]
    row |= {
        "first_loss": train[0]["loss"],
        "last_loss": train[-1]["loss"],
        "validation_loss": evaluation[-1]["validation_loss"],
        "tokens_per_second": median(row["tokens_per_second"] for row in steady),
        "step_ms": median(row["step_seconds"] for row in steady) * 1000,
        "peak_gib": max(row["memory_peak_bytes"] for row in train) / GIB,
    }
    print(row, flush=True)
    return row


def main() -> int:
    """Run what was asked for; the exit status is 1 if any run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("production", "seeds"), default="")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    backend = ["--model.backend", arguments.backend]
    rows = []
    if arguments.only != "seeds":
        text = ["--data.source", "builtin", "--data.include_site_packages", "True"]
        for checkpointing in ("all", "none"):
            rows.append(
                run(
                    f"production, checkpointing {checkpointing}", "m7c_125m.toml", arguments.steps,
                    ["--train.activation_checkpointing", checkpointing, *text, *backend],
                )
            )  # fmt: skip
    if arguments.only != "production":
        for layers in (1, 4, 5, 12, 24, 48):
            rows.append(
                run(f"minimal, {layers} layers", "minimal.toml", 20, ["--model.num_layers", str(layers), *backend])
            )
        for config in ("showcase", "m7c_2k_test", "m7c_shake", "m7c_long", "paper_layer"):
            rows.append(run(config, f"{config}.toml", 20, ["--data.source", "builtin", *backend]))
    file = ResultFile(
        f"seed_runs_{arguments.backend}", f"The seed configurations, backend {arguments.backend}",
        folder=arguments.output, commit=arguments.commit,
    )  # fmt: skip
    notes = ["Medians over the second half of each run. Text: the Python files of the machine."]
    print(file.write(rows, notes=notes).read_text())
    return int(any(row["exit_status"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
