"""Where the time of a training step goes on one GPU: speed, memory, how long the GPU idles, and its kernels.

    python benchmarks/profile_training.py                                  # every case, about 90 s on an H200
    python benchmarks/profile_training.py --only production-graphs 16x2048-nsa --kernels 25
    python benchmarks/profile_training.py --device cpu --tiny              # does the script work?

Cases are prepared side by side in processes of their own, and measured one after another. The first step's losses and
gradient norms show that the `production-*` cases of one attention compute the same; later losses drift apart by
rounding, since all steps see the same random tokens and soon know them by heart.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from trifocal.bench.recorder import OK
from trifocal.bench.training_speed import TrainOptions, Worker
from trifocal.bench.training_worker import TrainCase
from trifocal.models import ModelConfig
from trifocal.ops import Geometry

TINY = ModelConfig(
    dim=32, num_layers=2, num_heads=4, head_dim=8, value_dim=8, mlp_dim=64, geometry=Geometry(16, 8, 32, 4, 1, 1, 32)
)


def cases(options: argparse.Namespace) -> dict[str, TrainCase]:
    """Every case by its name."""
    sizes = ("production", "16x2048") if not options.tiny else ("2x64", "4x64")
    model = TINY if options.tiny else ModelConfig()
    common = {"device": options.device, "warmup_steps": 3, "timed_steps": options.steps}
    nsa, dense, large_nsa, large_dense = (
        replace(case, profiled_steps=options.profiled)
        for case in TrainOptions(sizes=sizes, model=model, cuda_graphs=("no",), data=("random",), **common).cases()
    )
    return {
        "production-eager": replace(nsa, compile=False, cuda_graphs=False),
        "production-compiled": replace(nsa, cuda_graphs=False),
        "production-eager-graphs": replace(nsa, compile=False, cuda_graphs=True),
        "production-graphs": replace(nsa, cuda_graphs=True),
        "production-packed-graphs": replace(nsa, cuda_graphs=True, borders=1),
        "production-dense-graphs": replace(dense, cuda_graphs=True),
        "production-kept-graphs": replace(nsa, cuda_graphs=True, checkpointing="none"),
        "16x2048-nsa": large_nsa,
        "16x2048-dense": large_dense,
    }


def measure(chosen: dict[str, TrainCase], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Prepare all side by side, then measure each with the device to itself."""
    workers = {name: Worker(case, len(chosen), options.seconds) for name, case in chosen.items()}
    with ThreadPoolExecutor(len(workers)) as pool:
        ready = dict(zip(workers, pool.map(Worker.answer, workers.values()), strict=True))
    rows = {}
    for name, worker in workers.items():
        answer = ready[name]
        if answer["status"] == OK:
            worker.go()
            answer = worker.answer()
        worker.close()
        rows[name] = answer
        show(name, answer, options.kernels)
    return rows


def show(name: str, row: dict[str, Any], kernels: int, gaps: int = 5) -> None:
    """Print a case's figures, its longest kernels and where the GPU waits."""
    if row["status"] != OK:
        print(f"\n{name}: {row['status']}", flush=True)
        return
    memory = "" if row["peak_gib"] is None else f", {row['peak_gib']:.2f} GiB"
    print(
        f"\n{name}: {row['tokens_per_second']:,.0f} tokens/s, {row['step_ms']:.1f} ms a step "
        f"({row['step_p20_ms']:.1f} to {row['step_p80_ms']:.1f}){memory}\n"
        f"  first step {row['first_step_seconds']:.1f} s, first loss {row['first_loss']:.6f}, "
        f"first gradient norm {row['first_gradient_norm']:.5f}, last loss {row['loss']:.4f}"
    )
    if "kernels" in row:
        print(
            f"  GPU busy {row['gpu_busy_share']:.1%} while traced, {row['kernels_a_step']:.0f} kernels and "
            f"{row['kernel_ms_a_step']:.2f} ms of them a step"
        )
        for entry in row["kernels"][:kernels]:
            print(
                f"  {entry['ms_a_step']:8.3f} ms {entry['calls_a_step']:7.1f} x {entry['us_a_call']:8.1f} us  "
                f"{entry['kernel']}"
            )
        for gap in row["gaps"][:gaps]:
            print(
                f"  idle {gap['ms_a_step']:.3f} ms in {gap['gaps_a_step']:.1f} gaps, the longest "
                f"{gap['longest_us']:.0f} us: after {gap['after'][:40]}, before {gap['before'][:40]}"
            )
    sys.stdout.flush()


def main() -> int:
    """Run the cases; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=None, help="names of cases")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--profiled", type=int, default=2, help="traced steps")
    parser.add_argument("--kernels", type=int, default=18, help="kernels to print; the file has 40")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=110.0, help="time limit")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--output", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    every = cases(options)
    if unknown := set(options.only or ()) - set(every):
        parser.error(f"unknown cases {sorted(unknown)}; there are {', '.join(every)}")
    begin = time.monotonic()
    rows = measure({name: case for name, case in every.items() if not options.only or name in options.only}, options)
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\n{time.monotonic() - begin:.0f} s in all")
    return int(any(row["status"] != OK for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
