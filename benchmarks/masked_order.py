"""The selected branch's loop orders where they meet, and the parts of the masked one: the device's times.

    python benchmarks/masked_order.py [--seconds 38] [--shapes "64/4 1x2048,..."]

A process for each kind of call compiles it. Then forward and backward of both orders, with gates as in training, run on
every shape, the masked order's d_k, d_v as they are cut and whole. All must agree and give equal bits twice. Times are
by kernel: an eager call of these sizes may take longer on the host. To the screen, and to `$OUT/masked_order.json`.
`probe_selected.py --only check` compares with float64.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from probe_selected import PAPER, SHAPES, Problem, error, say  # noqa: E402
from torch import Tensor  # noqa: E402

# B, T, H, G, D, V; the most wanted first.
MEETING = {
    "64/4 1x2048": (1, 2048, 64, 4, 128, 128),
    "32/8 1x2048": (1, 2048, 32, 8, 128, 128),
    "64/4 1x4096": (1, 4096, 64, 4, 128, 128),
    "32/8 1x4096": (1, 4096, 32, 8, 128, 128),
    "64/4 1x1024": (1, 1024, 64, 4, 128, 128),
    "32/8 1x1024": (1, 1024, 32, 8, 128, 128),
    "64/4 1x8192": (1, 8192, 64, 4, 128, 128),
    "32/8 1x8192": (1, 8192, 32, 8, 128, 128),
    "12/2 2x2048": (2, 2048, 12, 2, 64, 64),
    "12/2 16x2048": (16, 2048, 12, 2, 64, 64),
    "12/2 4x8192": (4, 8192, 12, 2, 64, 64),
}
SHAPES.update(MEETING)
# Shapes among which all others find their kernels compiled: lengths are not compiled in.
COMPILED = ("64/4 1x1024", "32/8 1x1024", "12/2 2x2048")
# A part of so many queries is the whole block.
WHOLE = 10**6
VARIANTS: dict[str, dict[str, Any]] = {
    "forward gathered": {"order": "gathered"},
    "forward masked": {"order": "masked"},
    "backward gathered": {"order": "gathered"},
    "backward masked": {"order": "masked"},
    "backward masked whole": {"order": "masked", "part_queries": WHOLE},
}


class Meeting(Problem):
    """A shape with blocks chosen at random, the first and the query's own always: scoring need not be compiled."""

    def score(self, **options: Any) -> Tensor:
        batch, length, groups = self.q.shape[0], self.tokens, self.k.shape[2]
        blocks = PAPER.num_selection_blocks(length)
        generator = torch.Generator("cuda").manual_seed(1)
        block = torch.arange(blocks, device="cuda")
        own = torch.arange(length, device="cuda")[:, None] // PAPER.selection_block_size
        drawn = torch.rand(batch, groups, length, blocks, generator=generator, device="cuda")
        drawn = drawn.masked_fill((block == 0) | (block == own), 2.0).masked_fill(block > own, -1.0)
        best = drawn.topk(min(PAPER.num_selected_blocks, blocks))
        chosen = best.indices.masked_fill(best.values < 0, -1).int()
        return chosen.transpose(1, 2).contiguous()


def call_of(problem: Problem, title: str, saved: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """The call that a title stands for: o, or d_q, d_k and d_v."""
    options = VARIANTS[title]
    if title.startswith("forward"):
        return lambda: problem.forward(**options)[:1]
    return lambda: problem.backward(*saved, gate=problem.gate, **options)


def device_time(call: Callable[[], Any], calls: int = 5) -> tuple[float, dict[str, float]]:
    """Microseconds of all kernels of a call, and of the longest of them; the mean of a few calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    rows = [(row.key, row.self_device_time_total / calls) for row in recorded.key_averages()]
    longest = sorted(rows, key=lambda row: -row[1])[:5]
    return sum(spent for _, spent in rows), {name[:26]: round(spent, 1) for name, spent in longest if spent > 0}


def measure(shapes: list[str], seconds: float, results: dict[str, Any]) -> None:
    """All variants of the shapes, as far as the seconds go."""
    for name in shapes:
        problem = Meeting(name)
        saved = problem.forward(order="gathered")
        expected: dict[str, Any] = {}
        for title in VARIANTS:
            if time.monotonic() - START > seconds:
                say(f"out of time before {name} {title}")
                return
            call = call_of(problem, title, saved)
            try:
                got = call()
                gap = max(error(a, b) for a, b in zip(got, expected.setdefault(title.split()[0], got), strict=True))
                same = all(torch.equal(a, b) for a, b in zip(got, call(), strict=True))
                total, kernels = device_time(call)
                verdict = "ok" if gap < 1e-2 and same else "WRONG"
                parts = ", ".join(f"{kernel} {spent}" for kernel, spent in kernels.items())
                say(f"{verdict} {name:12} {total:8.1f} us {title}: {parts} (gap {gap:.1e}, equal bits {same})")
                results[f"{name} {title}"] = {"us": total, "kernels_us": kernels, "gap": gap, "equal_bits": same}
            except Exception:
                say(f"FAIL {name} {title}\n{traceback.format_exc(limit=-3)[-800:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=38.0)
    parser.add_argument("--shapes", default=",".join(MEETING))
    parser.add_argument("--compile", nargs=2, default=None, metavar=("SHAPE", "VARIANT"), help="this alone, no times")
    arguments = parser.parse_args()
    if arguments.compile is not None:
        name, title = arguments.compile
        problem = Meeting(name)
        call_of(problem, title, (torch.zeros_like(problem.d_o), torch.zeros_like(problem.lse)))()
        return
    shapes = arguments.shapes.split(",")
    heads = {name.split()[0] for name in shapes}
    tasks = [(name, title) for name in COMPILED if name.split()[0] in heads for title in VARIANTS]
    workers = [subprocess.Popen([sys.executable, __file__, "--compile", *task]) for task in tasks]
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results: dict[str, Any] = {}
    try:
        for worker in workers:
            # What is not compiled by then is compiled where it is timed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(timeout=max(1.0, 0.6 * arguments.seconds - (time.monotonic() - START)))
            worker.kill()
        say("compiled")
        measure(shapes, arguments.seconds, results)
    finally:
        for worker in workers:
            worker.kill()
        path = Path(os.environ.get("OUT", ".")) / "masked_order.json"
        path.write_text(json.dumps(results, indent=1))
        say(f"wrote {path}")


START = time.monotonic()

if __name__ == "__main__":
    main()
