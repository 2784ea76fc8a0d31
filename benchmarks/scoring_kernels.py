"""Check and time scoring on Hopper: importance and choice, by portable kernels, by Hopper's, and by the rules.

    python benchmarks/scoring_kernels.py --output DIR

At each shape the importance of the last chunk of queries is compared with the portable kernel's and, for some queries,
with float64; the choice is compared with the rule on the kernel's own importance. Prints each row as soon as it is
there, and writes DIR/scoring_kernels.json. Shapes are compiled in parallel, then timed one after the other.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from trifocal.ops import Geometry
from trifocal.ops.triton import scoring, scoring_hopper_choice
from trifocal.ops.triton.scoring import LINE, select_blocks_forward

GEOMETRY = Geometry()
# Batch, queries = keys, heads, groups, columns of q; the shapes of `trifocal.bench`.
SHAPES = {
    "A": (1, 65536, 64, 4, 128),
    "B": (1, 8192, 64, 4, 128),
    "C": (1, 32768, 32, 8, 128),
    "P32k": (1, 32768, 64, 4, 192),
}
REPEATS = 7
SAMPLE = 24
# Queries whose scores are held at a time.
CHUNK = 1024
# What `select_blocks_forward` takes as `hopper`; others are compared with the first.
VARIANTS = {"portable": False, "Hopper": True, "by the rules": None}


class Problem(NamedTuple):
    """Inputs of scoring, bf16."""

    q: Tensor
    k: Tensor
    lse: Tensor
    scale: float


def make_problem(shape: tuple[int, int, int, int, int]) -> Problem:
    """Unit-normal q and keys, and the log-sum-exp of their scores."""
    batch, length, heads, groups, dim = shape
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(batch, length, heads, dim, generator=generator, device="cuda", dtype=torch.bfloat16)
    size = GEOMETRY.num_compressed_blocks(length)
    k = torch.randn(batch, size, groups, dim, generator=generator, device="cuda", dtype=torch.bfloat16)
    last = torch.arange(size, device="cuda") * GEOMETRY.compression_stride + GEOMETRY.compression_block_size - 1
    lse = torch.empty(batch, length, heads, device="cuda")
    for first in range(0, length, CHUNK):
        part = q[:, first : first + CHUNK].unflatten(2, (groups, -1)).float()
        scores = torch.einsum("btgrd,bcgd->btgrc", part, k.float()) * dim**-0.5
        visible = last <= torch.arange(first, first + part.shape[1], device="cuda")[:, None]
        lse[:, first : first + CHUNK] = (
            scores.masked_fill_(~visible[:, None, None], -torch.inf).logsumexp(-1).flatten(2)
        )
    return Problem(q, k, lse, dim**-0.5)


def run(problem: Problem, hopper: bool | None) -> Tensor:
    """The whole of scoring."""
    q, k, lse, scale = problem
    return select_blocks_forward(q, k, lse, GEOMETRY, q.shape[1], scale, None, hopper=hopper)


def last_importance(problem: Problem, hopper: bool | None) -> tuple[Tensor, int]:
    """Importance of the last chunk's queries, [B, queries, G, J], zero where none is needed; and the first query."""
    seen: list[Any] = []

    class Keep:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(own: Tensor, carried: Tensor, *others: Any, **constants: Any) -> None:
                seen[:] = [own, carried, *[number for number in others if isinstance(number, int)][:2]]

            return launch

    with (
        mock.patch.object(scoring, "choice_kernel", Keep()),
        mock.patch.object(scoring_hopper_choice, "choice_by_warp_kernel", Keep()),
    ):
        run(problem, hopper)
    own, carried, first, end = seen
    length, groups = problem.q.shape[1], problem.k.shape[2]
    blocks = GEOMETRY.num_selection_blocks(length)
    sizes = (problem.q.shape[0], end - first, groups, -(-blocks // LINE.value) * LINE.value)
    count = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    own, carried = own[:count].view(sizes), carried[:count].view(sizes)
    candidate_blocks = torch.arange(first, end, device="cuda") // GEOMETRY.selection_block_size + 1
    scored = torch.arange(sizes[3], device="cuda") < candidate_blocks[:, None]
    scored = (scored & (candidate_blocks > GEOMETRY.num_selected_blocks)[:, None])[:, None]
    own[..., 1:] += carried[..., 1:]
    return own.where(scored, 0.0), first


def exact_importance(problem: Problem, query: Tensor) -> Tensor:
    """Importance of some queries of the first batch entry in float64, [queries, G, J]."""
    rules, groups = GEOMETRY, problem.k.shape[2]
    q = problem.q[0, query].double().unflatten(1, (groups, -1))
    lse = problem.lse[0, query].double().unflatten(1, (groups, -1))
    scores = torch.einsum("tgrd,cgd->tgrc", q, problem.k[0].double()) * problem.scale
    first = torch.arange(problem.k.shape[1], device="cuda") * rules.compression_stride
    visible = first + rules.compression_block_size - 1 <= query[:, None]
    p = (scores - lse[..., None]).exp().where(visible[:, None, None], 0.0).sum(2)
    start = torch.arange(rules.num_selection_blocks(problem.q.shape[1]), device="cuda") * rules.selection_block_size
    ends = torch.minimum(first[:, None] + rules.compression_block_size, start + rules.selection_block_size)
    overlap = (ends - torch.maximum(first[:, None], start)).clamp(min=0).double() / rules.compression_stride
    return p @ overlap


def rule(importance: Tensor, query: Tensor) -> Tensor:
    """The choice that importance [queries, G, J] means: ties to the lower index."""
    own = (query // GEOMETRY.selection_block_size)[:, None, None]
    block = torch.arange(importance.shape[-1], device="cuda")
    forced = (block < GEOMETRY.num_initial_blocks) | (block > own - GEOMETRY.num_local_blocks)
    importance = importance.masked_fill(forced, torch.inf).masked_fill(block > own, -torch.inf)
    order = importance.sort(dim=-1, descending=True, stable=True).indices[..., : GEOMETRY.num_selected_blocks]
    return order.sort(-1).values.to(torch.int32)


def check(problem: Problem, hopper: bool | None) -> dict[str, float | bool]:
    """Errors of the importance, of a row's largest, and whether the choice is right and the same twice."""
    importance, first = last_importance(problem, hopper)
    portable, _ = last_importance(problem, False)
    largest = portable.amax(-1, keepdim=True).clamp(min=1e-30)
    length = problem.q.shape[1]
    first_scored = GEOMETRY.num_selected_blocks * GEOMETRY.selection_block_size
    query = torch.linspace(max(first, first_scored), length - 1, SAMPLE, device="cuda").long()
    exact = exact_importance(problem, query)
    rows = importance[0, query - first, :, : exact.shape[-1]]
    chosen, again = run(problem, hopper), run(problem, hopper)
    return {
        "from_float64": ((rows.double() - exact).abs() / exact.amax(-1, keepdim=True)).max().item(),
        "from_portable": ((importance - portable).abs() / largest).max().item(),
        "choices_as_portable": (chosen == run(problem, False)).all(-1).double().mean().item(),
        "choice_exact": torch.equal(chosen[0, query], rule(rows, query)),
        "same_twice": torch.equal(chosen, again),
    }


def kernel_times(problem: Problem, hopper: bool | None) -> dict[str, float]:
    """Median milliseconds of the importance and choice kernels of a call, all chunks together."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            run(problem, hopper)
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    result = {}
    for name in ("importance", "choice"):
        named = sorted((e.time_range.start, e.time_range.elapsed_us()) for e in events if name in e.name)
        launches = len(named) // REPEATS
        calls = [sum(us for _, us in named[n * launches : (n + 1) * launches]) for n in range(REPEATS)]
        result[name] = statistics.median(calls) / 1e3
    return result


def whole_time(problem: Problem, hopper: bool | None) -> float:
    """Median milliseconds of a call."""
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(problem, hopper)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def compile_shape(name: str) -> None:
    """Leave a shape's kernels in Triton's cache, by running them."""
    problem = make_problem(SHAPES[name])
    for hopper in VARIANTS.values():
        run(problem, hopper)
    torch.cuda.synchronize()


def compile_all() -> None:
    """All shapes, each in a process of its own."""
    started = {name: subprocess.Popen([sys.executable, __file__, "--compile", name]) for name in SHAPES}
    failed = [name for name, process in started.items() if process.wait() != 0]
    if failed:
        raise SystemExit(f"shapes that fail: {', '.join(failed)}")


def time_shape(name: str) -> Iterator[dict[str, Any]]:
    """A row for each variant."""
    problem = make_problem(SHAPES[name])
    batch, length, heads, _, dim = SHAPES[name]
    for variant, hopper in VARIANTS.items():
        row: dict[str, Any] = {"shape": name, "name": variant, "ms": whole_time(problem, hopper)}
        row |= kernel_times(problem, hopper)
        row["tflops"] = batch * heads * dim * length**2 / GEOMETRY.compression_stride / row["importance"] / 1e9
        yield row | check(problem, hopper)


def describe(row: dict[str, Any]) -> str:
    """One line for people."""
    right = row["from_float64"] < 1e-5 and row["choice_exact"] and row["same_twice"]
    parts = (
        f"{row['shape']:5} importance {row['importance']:7.3f} ms {row['tflops']:4.0f} TFLOP/s",
        f"choice {row['choice']:6.3f}",
        f"call {row['ms']:7.3f}",
        f"from float64 {row['from_float64']:.1e}",
        f"from portable {row['from_portable']:.1e}, equal choices {row['choices_as_portable']:.6f}",
        row["name"],
    )
    return "  ".join(parts) + ("" if right else f"  WRONG {row}")


def main() -> None:
    """Compile, check and time, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path())
    parser.add_argument("--compile", choices=SHAPES, help="compile for this shape, and no more")
    options = parser.parse_args()
    if options.compile is not None:
        compile_shape(options.compile)
        return
    compile_all()
    rows = []
    for name in SHAPES:
        for row in time_shape(name):
            rows.append(row)
            print(describe(row), flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    (options.output / "scoring_kernels.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
