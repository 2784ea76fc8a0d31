"""The selected branch's loop orders where they meet, and parts of the masked one: first right, then how fast.

    python benchmarks/masked_order.py [--seconds 58] [--check false]

Twelve processes compare values and gradients with float64 (`probe_selected.check`) and compile what is timed. Then
each variant is called with gates, as in training, compared with keys outside, and the device's time is written down by
kernel: an eager call of these sizes may take longer on the host, as the row "whole" shows, a training call of all three
branches timed with events besides. To the screen, and to `$OUT/masked_order.json`.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from probe_selected import PAPER, SHAPES, WORKERS, Problem, check, error, milliseconds, plain, say  # noqa: E402
from torch import Tensor  # noqa: E402

from trifocal import nsa_attention  # noqa: E402
from trifocal.ops.triton import selected, selected_backward  # noqa: E402
from trifocal.ops.triton.common import Tile  # noqa: E402

# B, T, H, G, D, V; the most wanted first.
MEETING = {
    "12/2 2x2048": (2, 2048, 12, 2, 64, 64),
    "12/2 16x2048": (16, 2048, 12, 2, 64, 64),
    "64/4 1x2048": (1, 2048, 64, 4, 128, 128),
    "64/4 1x4096": (1, 4096, 64, 4, 128, 128),
    "12/2 4x2048": (4, 2048, 12, 2, 64, 64),
    "32/8 1x2048": (1, 2048, 32, 8, 128, 128),
    "64/4 1x1024": (1, 1024, 64, 4, 128, 128),
    "64/4 1x8192": (1, 8192, 64, 4, 128, 128),
    "32/8 1x4096": (1, 4096, 32, 8, 128, 128),
    "12/2 4x8192": (4, 8192, 12, 2, 64, 64),
    "32/8 1x1024": (1, 1024, 32, 8, 128, 128),
    "32/8 1x8192": (1, 8192, 32, 8, 128, 128),
}
SHAPES.update(MEETING)
# Shapes among which all others find their kernels compiled: lengths are not compiled in.
COMPILED = ("12/2 2x2048", "12/2 16x2048", "64/4 1x2048", "32/8 1x2048")
# A part of so many queries is the whole block.
WHOLE = 10**6
PARTS = (WHOLE, 512, 256, 128)
# Tiles of d_k, d_v and of d_q, besides those that are chosen.
NARROW_TILES = ((Tile(64, 0, 4, 1, 168), Tile(64, 0, 4, 3, 168)), (Tile(64, 0, 4, 1, 184), Tile(128, 0, 8, 3)))
NARROW_FORWARD = (Tile(64, 0, 4, 3, 128), Tile(128, 0, 8, 3))


def variants(problem: Problem) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What is tried on a shape: a title and a call; those of the backward pass take o and lse."""

    def forward(title: str, **options: Any) -> tuple[str, Callable[..., Any]]:
        return f"forward {title}", lambda: problem.forward(**options)

    def backward(title: str, **options: Any) -> tuple[str, Callable[..., Any]]:
        return f"backward {title}", lambda o, lse: problem.backward(o, lse, gate=problem.gate, **options)

    yield forward("gathered", order="gathered")
    yield forward("masked", order="masked")
    yield other_start(problem, *forward("masked", order="masked"))
    narrow = problem.q.shape[-1] <= 64
    for tile in NARROW_FORWARD if narrow else ():
        yield forward(f"masked {plain(tile)}", order="masked", tile=tile)
    yield backward("gathered", order="gathered")
    yield backward("masked", order="masked")
    yield other_start(problem, *backward("masked", order="masked"))
    yield backward("masked by keys", order="masked", by_keys=True)
    yield backward("masked by keys, whole", order="masked", by_keys=True, part_queries=WHOLE)
    for queries in PARTS:
        if queries == WHOLE or 2 * queries <= problem.tokens:
            title = "whole" if queries == WHOLE else f"parts of {queries}"
            yield backward(f"masked {title}", order="masked", part_queries=queries)
    for tile, tile_d_q in NARROW_TILES if narrow else ():
        title = f"masked {plain(tile)} {plain(tile_d_q)}"
        yield backward(title, order="masked", tile=tile, tile_d_q=tile_d_q)


def other_start(problem: Problem, title: str, call: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    """The call with the longest tiles of all first where otherwise those of one batch entry and group are."""
    together = problem.q.shape[0] * problem.k.shape[2] <= selected.MOST_TOGETHER

    def other(*arguments: Tensor) -> Any:
        with contextlib.ExitStack() as stack:
            for module in (selected, selected_backward):
                stack.enter_context(mock.patch.object(module, "MOST_TOGETHER", 0 if together else 10**6))
            return call(*arguments)

    return f"{title}, started {'apart' if together else 'together'}", other


def whole(problem: Problem) -> Callable[[], Any]:
    """A training call of all three branches."""
    pairs = (problem.k_cmp, problem.k_cmp, problem.k, problem.v, problem.k, problem.v)
    gates = problem.gate[..., None].expand(*problem.gate.shape, 3).contiguous()
    leaves = [x.detach().requires_grad_() for x in (problem.q, *pairs, gates)]

    def call() -> Any:
        o = nsa_attention(*leaves, PAPER, backend="triton")
        return torch.autograd.grad(o, leaves, problem.d_o)

    return call


def device_time(call: Callable[[], Any], calls: int = 5) -> tuple[float, dict[str, float]]:
    """Microseconds of all kernels of a call, and of the longest of them; the mean of a few calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    rows = [(row.key, row.self_device_time_total / calls) for row in recorded.key_averages()]
    longest = sorted(rows, key=lambda row: -row[1])[:5]
    return sum(spent for _, spent in rows), {name[:26]: round(spent, 1) for name, spent in longest if spent > 0}


def measure(seconds: float, results: dict[str, Any]) -> None:
    """All variants of all shapes, as far as the seconds go."""
    for name in MEETING:
        problem = Problem(name)
        try:
            call = whole(problem)
            events = milliseconds(call)
            total, kernels = device_time(call)
            say(f"whole {name:12} {total:8.1f} us, by events {1000 * events:.1f}: {kernels}")
            results[f"{name} whole"] = {"us": total, "events_us": 1000 * events, "kernels_us": kernels}
        except Exception:
            say(f"FAIL whole {name}\n{traceback.format_exc(limit=-3)[-800:]}")
        saved = problem.forward(order="gathered")
        expected: dict[str, Any] = {}
        for title, call in variants(problem):
            if time.monotonic() - START > seconds:
                say(f"out of time before {name} {title}")
                return
            stage = title.split()[0]
            arguments = saved if stage == "backward" else ()
            try:
                got = call(*arguments)[: 3 if stage == "backward" else 1]
                gap = max(error(a, b) for a, b in zip(got, expected.setdefault(stage, got), strict=True))
                same = all(torch.equal(a, b) for a, b in zip(got, call(*arguments), strict=False))
                total, kernels = device_time(lambda call=call, arguments=arguments: call(*arguments))
                verdict = "ok" if gap < 1e-2 and same else "WRONG"
                parts = ", ".join(f"{kernel} {spent}" for kernel, spent in kernels.items())
                say(f"{verdict} {name:12} {total:8.1f} us {title}: {parts} (gap {gap:.1e}, equal bits {same})")
                results[f"{name} {title}"] = {"us": total, "kernels_us": kernels, "gap": gap, "equal_bits": same}
            except Exception:
                say(f"FAIL {name} {title}\n{traceback.format_exc(limit=-3)[-800:]}")


def compile_share(worker: int) -> None:
    """Compile a share of what is timed into Triton's cache."""
    number = -1
    for name in COMPILED:
        problem = Problem(name)
        zeros = torch.zeros_like(problem.d_o), torch.zeros_like(problem.lse)
        for title, call in [("whole", whole(problem)), *variants(problem)]:
            number += 1
            if number % WORKERS != worker:
                continue
            try:
                call(*(zeros if title.startswith("backward") else ()))
            except Exception:
                say(f"FAIL compiling {name} {title}: {traceback.format_exc(limit=-2)[-500:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=58.0)
    parser.add_argument("--check", choices=("true", "false"), default="true")
    parser.add_argument("--worker", type=int, default=None, help="a share of the checks and compilations")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        compile_share(arguments.worker)
        if arguments.check == "true":
            check(arguments.worker)
        return
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    command = [sys.executable, __file__, "--check", arguments.check, "--worker"]
    workers = [subprocess.Popen([*command, str(worker)]) for worker in range(WORKERS)]
    results: dict[str, Any] = {}
    try:
        for worker in workers:
            # What is not compiled by then is compiled where it is timed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(timeout=max(1.0, 0.6 * arguments.seconds - (time.monotonic() - START)))
            worker.kill()
        say("compiled and checked")
        measure(arguments.seconds, results)
    finally:
        for worker in workers:
            worker.kill()
        path = Path(os.environ.get("OUT", ".")) / "masked_order.json"
        path.write_text(json.dumps(results, indent=1))
        say(f"wrote {path}")


START = time.monotonic()

if __name__ == "__main__":
    main()
