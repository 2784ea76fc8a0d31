"""The production run to its last step, killed and stopped on the way, on real text.

    python benchmarks/production.py --directory runs/production
    python benchmarks/production.py --directory runs/tiny --config showcase.toml --steps 60 --kill 20 --stop 40

The text is the Python source of this machine, installed packages included, and the documents of `--prose`, a parquet
file with a column `text`. The run gets SIGKILL after the step `--kill` and SIGTERM after the step `--stop`, and goes on
each time with `trifocal train --resume`. The result has a row for each tenth of the run.
"""

import argparse
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lib.results import ResultFile
from trifocal.cli.output import unwinding_signals
from trifocal.data.sources.builtin import BuiltinSource
from trifocal.runlog import read_metrics

ROOT = Path(__file__).parent.parent
GIB = 2**30


def write_corpus(path: Path, prose: Path | None) -> str:
    """Write all documents into one parquet file; returns how much there is of each kind."""
    source = BuiltinSource(include_site_packages=True)
    code = [document.text for shard in range(len(source.shards)) for document, _ in source.read(shard, None)]
    text = pq.read_table(prose, columns=["text"])["text"].to_pylist() if prose else []
    documents = code + text
    # The loader shuffles within a part of a file alone.
    random.Random(0).shuffle(documents)
    pq.write_table(pa.table({"text": documents}), path, row_group_size=1000)
    return f"{sum(map(len, code)) / 1e6:.0f} M characters of Python, {sum(map(len, text)) / 1e6:.0f} M of prose"


def last_step(metrics: Path) -> int:
    """The last step in the metrics; a line that is being written does not count."""
    return max((row["step"] for row in read_metrics(metrics)), default=0) if metrics.exists() else 0


def run_until(command: list[str], metrics: Path, step: int, number: signal.Signals | None) -> tuple[float, int]:
    """Run a command, send it a signal after a step; returns the seconds that it took and its exit status."""
    begin = time.monotonic()
    print(" ".join(command), flush=True)
    process = subprocess.Popen(command)
    while number is not None and process.poll() is None:
        if last_step(metrics) >= step:
            process.send_signal(number)
            break
        time.sleep(2)
    status = process.wait()
    return time.monotonic() - begin, status


def tenths(rows: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """One row for each tenth of the run: loss, speed, memory."""
    found = []
    for first in range(0, steps, steps // 10):
        part = [row for row in rows if first < row["step"] <= first + steps // 10]
        train = [row for row in part if row["kind"] == "train"]
        evaluation = [row for row in part if row["kind"] == "evaluation"]
        if train:
            found.append(
                {
                    "steps": f"{first + 1}-{train[-1]['step']}",
                    "loss": train[-1]["loss"],
                    "validation_loss": evaluation[-1]["validation_loss"] if evaluation else None,
                    "bits_per_byte": evaluation[-1].get("bits_per_byte") if evaluation else None,
                    "tokens_per_second": median(row["tokens_per_second"] for row in train),
                    "peak_gib": max(row.get("memory_peak_bytes") or 0 for row in train) / GIB,
                    "warnings": sum(row.get("severity") in ("warning", "error") for row in part),
                }
            )
    return found


@unwinding_signals()
def main() -> int:
    """Train to the end; the exit status is 1 if the last step was not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--config", default="m7c_125m.toml")
    parser.add_argument("--prose", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--kill", type=int, default=16_000)
    parser.add_argument("--stop", type=int, default=33_000)
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options, flags = parser.parse_known_args()
    options.directory.parent.mkdir(parents=True, exist_ok=True)
    corpus = options.directory.with_suffix(".parquet")
    contents = write_corpus(corpus, options.prose)
    metrics = options.directory / "metrics.jsonl"
    train = [sys.executable, "-m", "trifocal", "train"]
    begin = [str(ROOT / "configs" / options.config), "--run.directory", str(options.directory)]
    begin += ["--data.source", f"parquet:{corpus}#text", "--train.steps", str(options.steps), *flags]
    resume = ["--resume", str(options.directory)]
    parts = [
        run_until([*train, *begin], metrics, options.kill, signal.SIGKILL),
        run_until([*train, *resume], metrics, options.stop, signal.SIGTERM),
        run_until([*train, *resume], metrics, options.steps, None),
    ]
    rows = tenths(read_metrics(metrics), options.steps)
    file = ResultFile("production", "The production run", folder=options.output, commit=options.commit)
    notes = [
        f"{options.config}, {options.steps} steps; text: {contents}. Overrides: {' '.join(flags) or 'none'}.",
        f"SIGKILL after step {options.kill}, SIGTERM after step {options.stop}; seconds and exit status of the three "
        f"parts: {', '.join(f'{seconds:.0f} s, {status}' for seconds, status in parts)}.",
        "Tokens a second: the median over the tenth. Peak memory: of the tenth, or since the start of its process.",
    ]
    print(file.write(rows, notes=notes).read_text())
    return int(last_step(metrics) < options.steps)


if __name__ == "__main__":
    sys.exit(main())
