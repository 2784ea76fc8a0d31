"""One long sequence on one GPU, and shared by several: an attention layer, and training steps of a model.

    python benchmarks/context.py                                  # both parts on one GPU and on two
    python benchmarks/context.py --gpus 1 2 4 8 --parts layer --tokens 1048576
    python benchmarks/context.py --device cpu --tiny              # does the script work? Short sequences, small sizes

| part | what runs |
|---|---|
| `layer` | forward and backward of one layer, 1 x 262,144 tokens, 64 query and 4 KV heads of 128, bf16 |
| `model` | `trifocal train` on rows of 1,048,576 random tokens, 12 layers of width 768, a row a step |

Before a layer is timed, its gradients in fp64 are compared with one process's on a short sequence. `exposed share` is
the part of its time that goes away when each process computes on copies of its own keys in place of the others'.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from lib.context_layer import LayerProblem
from lib.processes import train
from lib.results import ResultFile
from trifocal.cli.output import unwinding_signals
from trifocal.ops import Geometry
from trifocal.runlog import read_metrics
from trifocal.testing.processes import run_processes

CONFIG = Path(__file__).parent.parent / "configs" / "m7c_long.toml"
PARTS = ("layer", "model")
GIB = 2**30
LAYER = LayerProblem(262144, 2048, 64, 4, 128, tuple(vars(Geometry()).values()), calls=7)
TINY_LAYER = LayerProblem(208, 32, 4, 2, 8, (4, 2, 8, 3, 1, 1, 8), calls=2)
TINY_MODEL = {"model.num_layers": 2, "model.dim": 64, "model.mlp_dim": 128, "train.precision": "fp32",
              "train.compile": False}  # fmt: skip


def layer_row(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The layer in so many processes."""
    problem = TINY_LAYER if options.tiny else LAYER
    if options.tokens:
        problem = dataclasses.replace(problem, tokens=options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        arguments = f"{options.device!r}, {dataclasses.asdict(problem)!r}, {str(path)!r}"
        code = f"from lib.context_layer import main; main({arguments})"
        run_processes(["-c", code], size, Path(folder), limit_seconds=options.limit)
        return {"part": "layer", "gpus": size, "tokens": problem.tokens, **json.loads(path.read_text())}


def model_row(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Steps of the model in so many processes."""
    tokens = options.tokens or (208 if options.tiny else 2**20)
    flags: dict[str, Any] = {
        "run.device": options.device, "data.source": "synthetic", "parallel.context": size,
        "train.sequence_length": tokens, "train.global_batch_size": 1, "train.steps": options.steps,
        "train.cuda_graphs": False, "schedule.warmup_steps": 1, "evaluate.interval_steps": 0,
        "checkpoint.interval_steps": 0, "log.interval_steps": 1, "log.sample_interval_steps": 0,
        "log.telemetry_interval_steps": 0, **(TINY_MODEL if options.tiny else {}),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        output = train(CONFIG, run, flags, size, options.limit)
        rows = read_metrics(run / "metrics.jsonl", "train") if (run / "metrics.jsonl").exists() else []
    head = {"part": "model", "gpus": size, "tokens": tokens}
    if len(rows) < options.steps:
        print(output[-4000:], flush=True)
        return {**head, "status": f"failed after {len(rows)} of {options.steps} steps"}
    # The first steps compile.
    steady = rows[len(rows) // 2 :]
    return {
        **head,
        "status": "ok",
        "ms": 1000 * median(row["step_seconds"] for row in steady),
        "tokens_per_second": median(row["tokens_per_second"] for row in steady),
        "peak_gib": max(row["memory_peak_bytes"] for row in rows) / GIB,
        "last_loss": rows[-1]["loss"],
    }


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows in multiples of the first of their part, which is one GPU's."""
    first = {row["part"]: row for row in reversed(rows)}
    found = []
    for row in rows:
        one = first[row["part"]]
        if row["status"] == one["status"] == "ok" and row["gpus"] > 1:
            row = row | {"times_one_gpu": one["ms"] / row["ms"]}
            if row["peak_gib"]:
                row["memory_of_one_gpu"] = row["peak_gib"] / one["peak_gib"]
            if "without_exchange_ms" in row:
                row["exposed_share"] = 1 - row["without_exchange_ms"] / row["ms"]
        found.append(row)
    return found


@unwinding_signals()
def main() -> int:
    """Measure every row; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], help="in this order; the first is the base")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=0, help="of the sequence, in place of the parts' own")
    parser.add_argument("--steps", type=int, default=8, help="of the model")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="short sequences, small sizes")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for a row")
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    title = "One sequence on one GPU, and shared by several"
    file = ResultFile("context", title, folder=options.output, commit=options.commit)
    measures = {"layer": layer_row, "model": model_row}
    rows: list[dict[str, Any]] = []
    for part in options.parts:
        for size in options.gpus:
            rows.append(measures[part](size, options))
            file.write(compared(rows), notes=["Times of the slowest process, memory of the fullest GPU."])
            print(json.dumps(compared(rows)[-1]), flush=True)
    print(file.page.read_text())
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
