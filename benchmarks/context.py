"""One long sequence on one GPU, and shared by several: an attention layer, and training steps of a model.

    python benchmarks/context.py                                  # both parts on one GPU and on two
    python benchmarks/context.py --gpus 1 2 4 8 --parts layer --tokens 1048576 --calls 3
    python benchmarks/context.py --gpus 1 4 --parts losses        # does the sharing change what is learned?
    python benchmarks/context.py --device cpu --tiny              # does the script work? Short sequences, small sizes

| part | what runs |
|---|---|
| `layer` | one layer with its projections, forward and with backward (`ms`), 1 x 262,144 tokens, 64/4 heads of 128 |
| `model` | `trifocal train` on rows of 1,048,576 random tokens, 12 layers of width 768, a row a step |
| `losses` | ten steps of that model on packed text, two rows of 16,384 tokens a step; one GPU in fp32 too |

Before a layer is timed, its gradients in fp64 are compared with one process's on a short sequence. `exposed share` is
the part of its time that is saved when each process computes on copies of its own keys in place of the others'. A
layer that a GPU's memory does not hold is left out.

`losses` in bf16 are compared with one GPU's in fp32: a run whose rows are shared may err twice as much as one GPU's in
bf16. The learning rate rises over all ten steps, so that a rounding stays as small as it began.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lib.context_layer import LayerProblem
from lib.processes import train
from lib.recorder import failure
from lib.results import ResultFile
from trifocal.cli.output import unwinding_signals
from trifocal.ops import Geometry
from trifocal.runlog import read_metrics
from trifocal.testing.processes import run_processes

CONFIG = Path(__file__).parent.parent / "configs" / "m7c_long.toml"
PARTS = ("layer", "model", "losses")
GIB = 2**30
# A layer, forward and backward: 40.6 GiB at 262,144 tokens, and 20.5 at half of them.
LAYER_BYTES_A_TOKEN = 168_000
LAYER = LayerProblem(262144, 2048, 64, 4, 128, tuple(vars(Geometry()).values()), calls=7)
TINY_LAYER = LayerProblem(208, 32, 4, 2, 8, (4, 2, 8, 3, 1, 1, 8), calls=2)
LOSS_STEPS, TIMES_ONE_GPU = 10, 2.0
TINY_MODEL = {"model.num_layers": 2, "model.dim": 64, "model.mlp_dim": 128, "train.precision": "fp32",
              "train.compile": False}  # fmt: skip


def layer_row(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The layer in `size` processes."""
    problem = TINY_LAYER if options.tiny else LAYER
    problem = dataclasses.replace(
        problem, tokens=options.tokens or problem.tokens, calls=options.calls or problem.calls
    )
    head = {"part": "layer", "gpus": size, "tokens": problem.tokens}
    needed = problem.tokens / size * LAYER_BYTES_A_TOKEN
    if options.device == "cuda" and needed > torch.cuda.get_device_properties(0).total_memory:
        return {**head, "status": f"left out: needs {needed / GIB:.0f} GiB a GPU"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        arguments = f"{options.device!r}, {dataclasses.asdict(problem)!r}, {str(path)!r}"
        code = f"from lib.context_layer import main; main({arguments})"
        run_processes(["-c", code], size, Path(folder), limit_seconds=options.limit)
        return {**head, **json.loads(path.read_text())}


def trained(
    size: int, steps: int, tokens: int, flags: Mapping[str, Any], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], str]:
    """The rows of metrics of the model, trained in `size` processes, and whether all steps are there."""
    flags = {
        "run.device": options.device, "parallel.context": size, "train.sequence_length": tokens,
        "train.steps": steps, "train.cuda_graphs": False, "schedule.warmup_steps": steps,
        "evaluate.interval_steps": 0, "checkpoint.interval_steps": 0, "log.interval_steps": 1,
        "log.sample_interval_steps": 0, "log.telemetry_interval_steps": 0,
        **(TINY_MODEL if options.tiny else {}), **flags,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        output = train(CONFIG, run, flags, size, options.limit)
        rows = read_metrics(run / "metrics.jsonl", "train") if (run / "metrics.jsonl").exists() else []
    if len(rows) == steps:
        return rows, "ok"
    print(output[-4000:], flush=True)
    return rows, f"failed after {len(rows)} of {steps} steps"


def model_row(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Steps of the model in `size` processes."""
    tokens = options.tokens or (208 if options.tiny else 2**20)
    rows, status = trained(
        size, options.steps, tokens, {"data.source": "synthetic", "train.global_batch_size": 1}, options
    )
    head = {"part": "model", "gpus": size, "tokens": tokens, "status": status}
    if status != "ok":
        return head
    # The first steps compile.
    steady = rows[len(rows) // 2 :]
    return {
        **head,
        "ms": 1000 * median(row["step_seconds"] for row in steady),
        "tokens_per_second": median(row["tokens_per_second"] for row in steady),
        "peak_gib": max(row["memory_peak_bytes"] for row in rows) / GIB,
        "last_loss": rows[-1]["loss"],
    }


def losses_row(size: int, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """The losses of ten steps; not compiled, so that most of the time is theirs."""
    tokens = options.tokens or (208 if options.tiny else 2**14)
    flags = {"data.source": "builtin", "train.global_batch_size": 2, "train.micro_batch_size": 1}
    flags |= {"train.precision": precision, "train.compile": False}
    rows, status = trained(size, LOSS_STEPS, tokens, flags, options)
    head = {"part": "losses", "gpus": size, "tokens": tokens, "precision": precision, "status": status}
    return {**head, "losses": [row["loss"] for row in rows]}


def measured(part: str, size: int, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row of any part; if it fails, the next one follows."""
    try:
        if part == "losses":
            return losses_row(size, precision, options)
        return (layer_row if part == "layer" else model_row)(size, options)
    except Exception as error:
        print(str(error), flush=True)
        head = {"part": part, "gpus": size, "tokens": options.tokens or None, "status": failure(error)}
        return head | ({"precision": precision} if precision else {})


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `losses`, those in bf16 with their largest error; several GPUs' may be twice as large as one's."""
    ended = {(row["gpus"], row["precision"]): row["losses"] for row in rows if row["status"] == "ok"}
    exact = ended.get((1, "fp32"))

    def error(losses: list[float]) -> float:
        return max(abs(a - b) for a, b in zip(losses, exact or (), strict=True))

    found = []
    for row in rows:
        if exact and row["status"] == "ok" and row["precision"] == "bf16":
            row = row | {"largest_difference": error(row["losses"])}
            if row["gpus"] > 1 and (1, "bf16") in ended:
                own = error(ended[1, "bf16"])
                row["times_one_gpu"] = row["largest_difference"] / own if own else None
                if row["largest_difference"] > TIMES_ONE_GPU * own:
                    row["status"] = f"failed: errs by more than {TIMES_ONE_GPU * own:.3g}"
        found.append(row)
    return found


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows in multiples of that with the fewest GPUs of their part and length; `losses`, the last, are judged."""
    found = []
    for row in rows:
        if row["part"] == "losses":
            continue
        ended = [
            base
            for base in rows
            if (base["part"], base["tokens"], base["status"]) == (row["part"], row["tokens"], "ok") and "ms" in base
        ]
        one = min(ended, key=lambda base: base["gpus"], default=row)
        if row["status"] == "ok" and row["gpus"] > one["gpus"]:
            times = one["ms"] / row["ms"]
            row = row | {
                "base_gpus": one["gpus"], "times_base": times, "efficiency": times * one["gpus"] / row["gpus"],
            }  # fmt: skip
            if row["peak_gib"]:
                row["memory_of_base"] = row["peak_gib"] / one["peak_gib"]
        if "without_exchange_ms" in row:
            row = row | {"exposed_share": 1 - row["without_exchange_ms"] / row["ms"]}
        found.append(row)
    return found + judged([row for row in rows if row["part"] == "losses"])


@unwinding_signals()
def main() -> int:
    """Measure every row; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], help="in this order")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["layer", "model"])
    parser.add_argument("--tokens", type=int, default=0, help="of the sequence, in place of the parts' own")
    parser.add_argument("--calls", type=int, default=0, help="that are timed of a layer, in place of its own number")
    parser.add_argument("--steps", type=int, default=8, help="of the model")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"],
                        help="of one GPU's losses")  # fmt: skip
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="short sequences, small sizes")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for a row")
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    title = "One sequence on one GPU, and shared by several"
    file = ResultFile("context", title, folder=options.output, commit=options.commit)
    rows: list[dict[str, Any]] = []

    for part in options.parts:
        for size in options.gpus:
            precisions = (options.precisions if size == 1 else ["bf16"]) if part == "losses" else [""]
            for precision in precisions:
                rows.append(measured(part, size, precision, options))
                file.write(compared(rows), notes=["Times of the slowest process, memory of the fullest GPU."])
                print(json.dumps(rows[-1]), flush=True)
    print(file.page.read_text())
    return int(any(row["status"] != "ok" and not row["status"].startswith("left out") for row in compared(rows)))


if __name__ == "__main__":
    sys.exit(main())
