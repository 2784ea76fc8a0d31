"""Check and time the kernels of compressed and window attention and of the gated combination, with candidate tiles.

    python benchmarks/interval_kernels.py --output DIR

First the values and every gradient against float64 at odd shapes, then each kernel at the named shapes with every
candidate configuration. Candidates are compiled in processes of their own, in parallel, so that a compiler that fails
on one costs that one. Writes DIR/interval_kernels.json and prints the same, shortest first.
"""

import argparse
import functools
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.testing import do_bench

from trifocal.ops import Documents, Geometry, reference
from trifocal.ops.triton.combine import combine_backward, combine_forward, row_sums
from trifocal.ops.triton.common import Tile, choose_tile
from trifocal.ops.triton.compressed import _branch as compressed_branch
from trifocal.ops.triton.compressed import compressed_backward, compressed_forward
from trifocal.ops.triton.interval import IntervalProblem
from trifocal.ops.triton.interval_backward import launch_d_k_d_v, launch_d_q
from trifocal.ops.triton.interval_forward import launch_forward
from trifocal.ops.triton.window import _branch as window_branch
from trifocal.ops.triton.window import window_backward, window_forward

DEVICE = "cuda"
GEOMETRY = Geometry()


class Shape(NamedTuple):
    """Batch, queries = keys, heads, groups, D, V."""

    batch: int
    length: int
    heads: int
    groups: int
    dim: int
    value_dim: int


SHAPES = {
    "A": Shape(1, 65536, 64, 4, 128, 128),
    "B": Shape(1, 8192, 64, 4, 128, 128),
    "C": Shape(1, 32768, 32, 8, 128, 128),
    "D": Shape(16, 2048, 12, 2, 64, 64),
    "P": Shape(1, 32768, 64, 4, 192, 128),
}
# Shapes that are compiled for with a length that compiles fast to run.
TINY = {name: shape._replace(batch=1, length=512) for name, shape in SHAPES.items()}


PLAIN = Tile(64, 64, 4, 2)


class Candidate(NamedTuple):
    """One configuration of a kernel at a shape; without one, the portable kernel's own, the first of its kernel."""

    shape: str
    branch: str
    kernel: str
    tile: Tile | None = None
    tma: bool | None = None
    parts: int | None = None
    hopper: tuple[tuple[str, Any], ...] | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.shape, self.branch, self.kernel

    def __str__(self) -> str:
        tile = "" if self.tile is None else " (" + ",".join(str(x) for x in self.tile if x is not None) + ")"
        way = {None: "", True: " tma", False: " ptr"}[self.tma]
        hopper = "" if self.hopper is None else " hopper " + " ".join(f"{name}={x}" for name, x in self.hopper)
        return f"{' '.join(self.key)}{tile}{way}{f' parts={self.parts}' if self.parts else ''}{hopper}"


D_K_D_V: list[dict[str, Any]] = [{"stages": 2}, {"stages": 3, "ahead": True}]
# Configurations of the Hopper kernels by shape, branch and kernel.
HOPPER: dict[str, dict[tuple[str, str], list[dict[str, Any]]]] = {
    "A": {
        ("cmp", "forward"): [{"keys": 128}],
        ("cmp", "d_q"): [{"keys": 64}],
        ("cmp", "d_k_d_v"): D_K_D_V,
        ("win", "forward"): [{"keys": 64}, {"keys": 64, "tail": 16}, {"keys": 128, "tail": 16}],
        ("win", "d_q"): [{"keys": 64}, {"keys": 64, "tail": 16}],
        ("win", "d_k_d_v"): D_K_D_V,
    },
    "P": {
        ("cmp", "forward"): [{"keys": 128}, {"keys": 64}],
        ("cmp", "d_q"): [{"keys": 64}],
        ("cmp", "d_k_d_v"): D_K_D_V[:1],
        ("win", "forward"): [{"keys": 64}, {"keys": 64, "tail": 16}],
        ("win", "d_q"): [{"keys": 64}],
        ("win", "d_k_d_v"): D_K_D_V[:1],
    },
    "C": {
        ("cmp", "forward"): [{"keys": 128}],
        ("win", "forward"): [{"keys": 64}, {"keys": 64, "tail": 32}],
        ("win", "d_q"): [{"keys": 64}, {"keys": 64, "tail": 32}],
        ("win", "d_k_d_v"): D_K_D_V,
    },
    "B": {
        ("cmp", "forward"): [{"keys": 128}, {"keys": 64}],
        ("win", "forward"): [{"keys": 64}, {"keys": 64, "tail": 16}],
    },
    "D": {
        ("cmp", "d_k_d_v"): D_K_D_V,
        ("win", "forward"): [{"keys": 64, "tail": 16}],
        ("win", "d_k_d_v"): D_K_D_V,
    },
}


def candidates() -> list[Candidate]:
    """Everything to compile and time: at each shape and kernel the portable kernel first."""
    result = []
    for shape, kernels in HOPPER.items():
        for (branch, kernel), options in kernels.items():
            result.append(Candidate(shape, branch, kernel))
            result += [Candidate(shape, branch, kernel, hopper=tuple(option.items())) for option in options]
    return result


def make_problem(shape: Shape, branch: str, dtype: torch.dtype = torch.bfloat16) -> IntervalProblem:
    """Unit-normal inputs; lse and delta from the forward kernel by pointers."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)

    num_keys = GEOMETRY.num_compressed_blocks(shape.length) if branch == "cmp" else shape.length
    q = normal(shape.batch, shape.length, shape.heads, shape.dim)
    k = normal(shape.batch, num_keys, shape.groups, shape.dim)
    v = normal(shape.batch, num_keys, shape.groups, shape.value_dim)
    d_o = normal(shape.batch, shape.length, shape.heads, shape.value_dim)
    gate = torch.rand(q.shape[:3], generator=generator, device=DEVICE).to(dtype)
    scale = shape.dim**-0.5
    if branch == "cmp":
        rule = compressed_branch(q, k, GEOMETRY, shape.length, None, backward=True)
    else:
        rule = window_branch(q, k, GEOMETRY.window_size, None)
    o, lse = launch_forward(q, k, v, scale, rule, PLAIN, False)
    return IntervalProblem(d_o, q, k, v, lse, row_sums(d_o, o), gate, scale, rule)


def runner(candidate: Candidate, problem: IntervalProblem) -> Callable[[], tuple[Tensor, ...]]:
    """The call to time."""
    p, tma = problem, candidate.tma
    tile = candidate.tile or choose_tile(candidate.kernel, p.q, p.v, window=candidate.branch == "win")
    hopper = None if candidate.hopper is None else dict(candidate.hopper)
    if candidate.kernel == "forward":
        return lambda: launch_forward(p.q, p.k, p.v, p.scale, p.branch, tile, tma, hopper)
    if candidate.kernel == "d_q":
        return lambda: (launch_d_q(p, None, tile, tma, hopper),)
    return lambda: launch_d_k_d_v(p, tile, candidate.parts, tma, hopper)


@functools.cache
def work(candidate: Candidate, shape: Shape) -> float:
    """FLOPs that the mathematics needs in a kernel, masked scores not counted."""
    if candidate.branch == "cmp":
        block, stride = GEOMETRY.compression_block_size, GEOMETRY.compression_stride
        seen = sum(max(0, (t + 1 - block + stride) // stride) for t in range(shape.length))
    else:
        seen = sum(min(t + 1, GEOMETRY.window_size) for t in range(shape.length))
    d, v = shape.dim, shape.value_dim
    columns = {"forward": d + v, "d_q": 2 * d + v, "d_k_d_v": 2 * d + 2 * v}[candidate.kernel]
    return 2.0 * shape.batch * shape.heads * seen * columns


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact; infinite for NaN. Equal infinities differ by nothing."""
    same = exact.isinf() & (actual == exact)
    actual, exact = actual.masked_fill(same, 0.0), exact.masked_fill(same, 0.0)
    difference = (actual.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)
    return float(difference.nan_to_num(nan=float("inf")))


SMALL = Geometry(8, 4, 16, 3, 1, 1, 40)
# Why, geometry, shape, keys, lengths of packed documents.
CASES: list[tuple[str, Geometry, Shape, int, list[int] | None]] = [
    ("rep 16", GEOMETRY, Shape(2, 333, 32, 2, 128, 128), 333, None),
    ("packed", GEOMETRY, Shape(1, 1200, 16, 2, 128, 128), 1200, [1, 31, 32, 33, 500, 2, 601]),
    ("rep 6, D 64", GEOMETRY, Shape(2, 1027, 12, 2, 64, 64), 1027, None),
    ("D 256, V 256", SMALL, Shape(1, 300, 4, 2, 256, 256), 300, None),
    ("rep 1, D 192, V 128", SMALL, Shape(1, 257, 3, 3, 192, 128), 257, None),
    ("rep 4, D 80, V 48", SMALL, Shape(1, 301, 8, 2, 80, 48), 301, None),
    ("rep 64, D 16", SMALL, Shape(1, 129, 64, 1, 16, 16), 129, None),
    ("D 100, V 36: odd strides", SMALL, Shape(1, 300, 4, 2, 100, 36), 300, None),
    ("T < S", GEOMETRY, Shape(2, 77, 16, 1, 128, 128), 900, None),
    ("one query", GEOMETRY, Shape(2, 1, 16, 1, 128, 64), 700, None),
    ("packed small", SMALL, Shape(1, 600, 12, 2, 64, 64), 600, [200, 7, 8, 1, 384]),
]
# For the Hopper kernels; "varied" is with other options.
HOPPER_CASES: list[tuple[str, Geometry, Shape, int, list[int] | None]] = [
    ("plain hopper: rep 16", GEOMETRY, Shape(2, 333, 32, 2, 128, 128), 333, None),
    ("plain hopper: rep 4, several programs' turns", GEOMETRY, Shape(1, 2500, 16, 4, 128, 128), 2500, None),
    ("plain hopper: rep 8, D 64, V 128, T < S", GEOMETRY, Shape(2, 77, 16, 2, 64, 128), 900, None),
    ("plain hopper: rep 64, small steps", SMALL, Shape(1, 300, 64, 1, 64, 64), 300, None),
    ("plain hopper: D 192", GEOMETRY, Shape(2, 700, 32, 2, 192, 128), 700, None),
    ("plain hopper: 6 heads, D 64", GEOMETRY, Shape(2, 701, 12, 2, 64, 64), 701, None),
    ("plain hopper: 5 heads, T < S", GEOMETRY, Shape(1, 333, 5, 1, 128, 128), 800, None),
    ("plain hopper: one head", GEOMETRY, Shape(1, 600, 2, 2, 128, 128), 600, None),
    ("plain hopper: packed window", GEOMETRY, Shape(1, 1200, 16, 2, 128, 64), 1200, [1, 31, 32, 33, 500, 2, 601]),
]
HOPPER_CASES += [(name.replace("plain", "varied"), *rest) for name, *rest in HOPPER_CASES]
CHECKS = [(case, torch.bfloat16) for case in CASES + HOPPER_CASES]
CHECKS += [(case, torch.float32) for case in CASES[:4]] + [
    (case, torch.float16) for case in CASES[:2] + HOPPER_CASES[:1]
]


def check(number: int) -> dict[str, Any]:
    """Values and gradients of one case against the reference in float64."""
    (name, *case), dtype = CHECKS[number]
    row: dict[str, Any] = {"case": name, "dtype": str(dtype).removeprefix("torch.")}
    try:
        row |= check_case(*case, dtype, hopper=name.split()[0] if "hopper:" in name else "")
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:300]
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    row["ok"] = "failed" not in row and max(x for x in row.values() if isinstance(x, float)) < limit
    return row


def check_case(
    geometry: Geometry, shape: Shape, num_keys: int, lengths: list[int] | None, dtype: torch.dtype, hopper: str
) -> dict[str, float]:
    """Errors of both branches and of the combination, by name."""
    generator = torch.Generator(DEVICE).manual_seed(1)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=DEVICE, dtype=torch.float64).to(dtype)

    documents = None
    if lengths is not None:
        borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)
        documents = Documents.from_cu_seqlens(borders, num_keys)
    q = normal(shape.batch, shape.length, shape.heads, shape.dim)
    d_o = normal(shape.batch, shape.length, shape.heads, shape.value_dim)
    scale = shape.dim**-0.5
    result: dict[str, float] = {}
    counts = [num_keys] if lengths is None else lengths
    blocks = sum(geometry.num_compressed_blocks(count) for count in counts)
    slots = blocks if lengths is None else num_keys // geometry.compression_stride
    outputs = {}
    for branch, size in (("cmp", slots), ("win", num_keys)):
        if branch == "cmp" and hopper and lengths is not None:
            continue
        k, v = (normal(shape.batch, size, shape.groups, d) for d in (shape.dim, shape.value_dim))
        if branch == "cmp":
            # What lies in slots that no document fills must not matter.
            k[:, blocks:], v[:, blocks:] = float("nan"), float("nan")
        if hopper == "plain":
            forward: dict[str, Any] = {"hopper": {}}
            backward: dict[str, Any] = {"hopper_d_q": {}, "hopper_d_k_d_v": {}}
        elif hopper == "varied":
            forward = {"hopper": {"keys": 64, "tail": 16}}
            backward = {"hopper_d_q": {"tail": 16}, "hopper_d_k_d_v": {"stages": 3, "ahead": True}}
        else:
            kernels = ("forward", "d_q", "d_k_d_v")
            tiles = [choose_tile(kernel, q, v, window=branch == "win") for kernel in kernels]
            forward, backward = {"tile": tiles[0]}, {"d_q_tile": tiles[1], "d_k_d_v_tile": tiles[2]}
        leaves = [x.double().nan_to_num().requires_grad_() for x in (q, k, v)]
        if branch == "cmp":
            exact, lse_exact = reference.compressed_attention(*leaves, geometry, num_keys, scale, documents)
            o, lse = compressed_forward(q, k, v, geometry, num_keys, scale, documents, **forward)
            finite = lse_exact.isfinite()
            if not torch.equal(finite, lse.isfinite()):
                raise AssertionError("lse is finite elsewhere")
            result["cmp lse"] = relative_error(lse[finite], lse_exact[finite])
            got = compressed_backward(d_o, q, k, v, o, lse, geometry, num_keys, scale, documents, **backward)
            again = compressed_backward(d_o, q, k, v, o, lse, geometry, num_keys, scale, documents, **backward)
        else:
            w = geometry.window_size
            exact = reference.window_attention(*leaves, w, scale, documents)
            o, lse = window_forward(q, k, v, w, scale, documents, **forward)
            got = window_backward(d_o, q, k, v, o, lse, w, scale, documents, **backward)
            again = window_backward(d_o, q, k, v, o, lse, w, scale, documents, **backward)
        gradients = torch.autograd.grad(exact, leaves, d_o.double())
        for name, a, e in zip(("o", "d_q", "d_k", "d_v"), (o, *got), (exact, *gradients), strict=True):
            result[f"{branch} {name}"] = relative_error(a, e)
        if not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)):
            raise AssertionError("two runs of backward differ")
        outputs[branch] = o
    if hopper:
        return result
    gates = torch.rand(3, *q.shape[:3], device=DEVICE).permute(1, 2, 3, 0).to(dtype)
    branches = (outputs["cmp"], outputs["win"], outputs["cmp"] - outputs["win"])
    mixed = sum(gates[..., i, None].double() * branches[i].double() for i in range(3))
    result["mixed"] = relative_error(combine_forward(*branches, gates), mixed)
    d_gates, delta = combine_backward(d_o, *branches, torch.float32)
    exact_gates = torch.stack([(d_o.double() * o.double()).sum(-1) for o in branches], -1)
    result["d_gates"] = max(relative_error(d_gates, exact_gates), relative_error(delta.permute(1, 2, 3, 0), d_gates))
    return result


def shares(workers: int) -> list[list[tuple[str, int]]]:
    """Checks and candidates of each process: the Hopper kernels have processes of their own."""
    result: list[list[tuple[str, int]]] = [[] for _ in range(workers)]
    apart: dict[Any, list[tuple[str, int]]] = {}
    for number, (case, _) in enumerate(CHECKS):
        if "hopper:" in case[0]:
            apart[number] = [("check", number)]
        else:
            result[number % workers].append(("check", number))
    for number, candidate in enumerate(candidates()):
        if candidate.hopper is not None:
            apart.setdefault((candidate.kernel, candidate.hopper), []).append(("compile", number))
        else:
            result[number % workers].append(("compile", number))
    return [*apart.values(), *result]


def share(index: int, workers: int) -> None:
    """Do the checks of one process, and compile its candidates by running them; a line of JSON for each."""
    problems: dict[tuple[str, str], IntervalProblem] = {}
    for what, number in shares(workers)[index]:
        if what == "check":
            print(json.dumps({"check": check(number)}), flush=True)
            continue
        candidate = candidates()[number]
        key = (candidate.shape, candidate.branch)
        start = time.perf_counter()
        try:
            if key not in problems:
                problems[key] = make_problem(TINY[candidate.shape], candidate.branch)
            runner(candidate, problems[key])()
            torch.cuda.synchronize()
            print(json.dumps({"compiled": number, "seconds": time.perf_counter() - start}), flush=True)
        except Exception as error:
            print(json.dumps({"bad": f"{candidate}: {type(error).__name__}: {error}"[:300]}), flush=True)


def check_and_compile(workers: int, limit_seconds: float) -> dict[str, Any]:
    """Do all shares in parallel: what the checks said, and the numbers of the candidates that work."""
    start = time.perf_counter()
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--share", str(index), str(workers)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(len(shares(workers)))
    ]
    result: dict[str, Any] = {"checks": [], "compiled": [], "bad": []}
    for process in processes:
        try:
            text, _ = process.communicate(timeout=max(1.0, limit_seconds - (time.perf_counter() - start)))
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        for line in text.splitlines():
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            if "check" in row:
                result["checks"].append(row["check"])
            elif "compiled" in row:
                result["compiled"].append(row["compiled"])
            else:
                result["bad"].append(row["bad"])
                print("BAD", row["bad"], flush=True)
        if process.returncode:
            print(f"a compiling process ended with {process.returncode}: {text[-500:]}", flush=True)
    for row in result["checks"]:
        if not row["ok"]:
            print("WRONG", row, flush=True)
    worst: dict[str, float] = {}
    for row in result["checks"]:
        errors = [x for x in row.values() if isinstance(x, float)]
        worst[row["dtype"]] = max([worst.get(row["dtype"], 0.0), *errors])
    print(f"checks: {sum(row['ok'] for row in result['checks'])} of {len(CHECKS)} right, worst {worst}", flush=True)
    print(f"compiled {len(result['compiled'])} of {len(candidates())}", flush=True)
    return result


def time_one(candidate: Candidate, problem: IntervalProblem, expected: tuple[Tensor, ...] | None) -> dict[str, Any]:
    """Median milliseconds, rate and the difference from the first candidate's result."""
    run = runner(candidate, problem)
    got = run()
    error = 0.0 if expected is None else max(relative_error(a, e) for a, e in zip(got, expected, strict=True))
    del got
    milliseconds = do_bench(run, warmup=10, rep=60, return_mode="median")
    rate = work(candidate, SHAPES[candidate.shape]) / milliseconds / 1e9
    return {"name": str(candidate), "ms": milliseconds, "tflops": rate, "difference": error}


def time_some(numbers: list[int]) -> None:
    """Time candidates, shape after shape; a line of JSON before and after each."""
    groups: dict[tuple[str, str], list[int]] = {}
    everything = candidates()
    for number in numbers:
        groups.setdefault(everything[number].key[:2], []).append(number)
    for (shape, branch), members in groups.items():
        print(json.dumps({"start": members[0]}), flush=True)
        problem = make_problem(SHAPES[shape], branch)
        expected: dict[str, tuple[Tensor, ...]] = {}
        for number in members:
            candidate = everything[number]
            print(json.dumps({"start": number}), flush=True)
            if candidate.kernel not in expected:
                expected[candidate.kernel] = runner(Candidate(*candidate.key), problem)()
            row = time_one(candidate, problem, expected[candidate.kernel])
            print(json.dumps({"row": row}), flush=True)
        del problem, expected


def time_all(works: set[int], deadline: float) -> list[dict[str, Any]]:
    """Time the candidates that work. One that fails or hangs costs its process; the next process goes on behind it."""
    rows: list[dict[str, Any]] = []
    remaining = [number for number in range(len(candidates())) if number in works]
    while remaining and time.perf_counter() < deadline:
        command = [sys.executable, __file__, "--time", *map(str, remaining)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output = process.stdout
        assert output is not None
        started, last, pending = remaining[0], "", b""
        while select.select([output], [], [], max(0.0, min(25.0, deadline - time.perf_counter())))[0]:
            data = os.read(output.fileno(), 65536)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                if not line.startswith(b"{"):
                    last = line.decode()
                    continue
                row = json.loads(line)
                if "row" in row:
                    rows.append(row["row"])
                else:
                    started = row["start"]
        process.kill()
        if process.wait() == 0:
            return rows
        print(f"FAILED {candidates()[started]}: {last}"[:300], flush=True)
        remaining = [number for number in remaining if number > started]
    if remaining:
        print(f"out of time before {candidates()[remaining[0]]}", flush=True)
    return rows


def time_combination() -> list[dict[str, Any]]:
    """Both directions of the gated combination, with the bytes that they move by formula."""
    rows = []
    for name in ("A", "D"):
        shape = SHAPES[name]
        sizes = (shape.batch, shape.length, shape.heads, shape.value_dim)
        o_cmp, o_slc, o_win, d_o = (torch.randn(sizes, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
        gates = torch.rand(*sizes[:3], 3, device=DEVICE, dtype=torch.bfloat16)
        tensor_bytes = o_cmp.numel() * 2
        for direction, run in (
            ("forward", functools.partial(combine_forward, o_cmp, o_slc, o_win, gates)),
            ("backward", functools.partial(combine_backward, d_o, o_cmp, o_slc, o_win, torch.bfloat16)),
        ):
            milliseconds = do_bench(run, warmup=10, rep=60, return_mode="median")
            rate = 4 * tensor_bytes / milliseconds / 1e9
            rows.append({"name": f"{name} combine {direction}", "ms": milliseconds, "terabytes_per_second": rate})
    return rows


def main() -> None:
    """Check, compile, time, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--seconds", type=float, default=88.0)
    parser.add_argument("--share", type=int, nargs=2, help="one part of the checks and compilations, and no more")
    parser.add_argument("--time", type=int, nargs="+", help="time these candidates, and no more")
    options = parser.parse_args()
    if options.time:
        time_some(options.time)
        return
    if options.share:
        share(*options.share)
        return
    start = time.perf_counter()
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}

    def stage(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            result[name] = function(*arguments)
        except Exception:
            traceback.print_exc()
            result[name] = None
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "interval_kernels.json").write_text(json.dumps(result, indent=1, default=list))
        print(f"-- {name}: {time.perf_counter() - start:.0f} s", flush=True)
        return result[name]

    compiled = stage("compiled", check_and_compile, min(8, os.cpu_count() or 1), options.seconds * 0.55) or {}
    stage("combination", time_combination)
    works = set(compiled.get("compiled", ()))
    rows = stage("candidates", time_all, works, start + options.seconds) or []
    for row in result["combination"] or []:
        print(f"{row['ms']:8.3f} ms {row['terabytes_per_second']:6.2f} TB/s  {row['name']}")
    for row in sorted(rows, key=lambda row: (row["name"].split(" (")[0], row["ms"])):
        flag = "  WRONG" if not row["difference"] < 2e-2 else ""
        print(f"{row['ms']:8.3f} ms {row['tflops']:5.0f} TF/s  {row['name']}{flag}")


if __name__ == "__main__":
    main()
