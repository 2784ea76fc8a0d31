"""Scoring and selected attention on a GPU: first right, then how fast, for several configurations of each kernel.

    python benchmarks/probe_selected.py [--seconds 200] [--only check,scoring,forward,backward,profile]

Values and gradients are compared with float64; then every candidate configuration is timed on the shapes A to D
(medians of CUDA events): choices fall out of random inputs, or drift slowly ("smooth"). Results go to the screen
and, as JSON, to `$OUT/probe_selected.json` (or the current folder).
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from trifocal.ops import reference  # noqa: E402
from trifocal.ops.geometry import Geometry  # noqa: E402
from trifocal.ops.layout import Documents  # noqa: E402
from trifocal.ops.triton import choice_index, selected  # noqa: E402
from trifocal.ops.triton.common import Tile  # noqa: E402
from trifocal.ops.triton.scoring import select_blocks_forward  # noqa: E402
from trifocal.ops.triton.selected import selected_forward  # noqa: E402
from trifocal.ops.triton.selected_backward import selected_backward  # noqa: E402

PAPER = Geometry()
# B, T, H, G, D, V
SHAPES = {
    "A": (1, 65536, 64, 4, 128, 128),
    "B": (1, 8192, 64, 4, 128, 128),
    "C": (1, 32768, 32, 8, 128, 128),
    "D": (16, 2048, 12, 2, 64, 64),
    "P": (1, 16384, 64, 4, 192, 128),
}
WORKERS = 12
START = time.monotonic()
results: dict[str, Any] = {}


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:5.0f}s] {text}", flush=True)


def milliseconds(call: Callable[[], Any], budget: float = 80.0) -> float:
    """Median over a number of runs that fits the budget, each timed with events."""
    call()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    runs = max(3, min(25, int(budget / max(begin.elapsed_time(end), 0.01))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def error(actual: Tensor, exact: Tensor) -> float:
    difference = (actual.double() - exact.double()).abs().nan_to_num(nan=float("inf")).max().item()
    return difference / max(1.0, exact.double().abs().max().item())


class Problem:
    """Random inputs of one shape and a choice of blocks."""

    def __init__(self, name: str, tokens: int | None = None) -> None:
        batch, length, heads, groups, dim, value_dim = SHAPES[name]
        if tokens is not None:
            batch, length = min(batch, 2), tokens
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

        self.tokens = length
        self.q, self.d_o = normal(batch, length, heads, dim), normal(batch, length, heads, value_dim)
        self.k, self.v = normal(batch, length, groups, dim), normal(batch, length, groups, value_dim)
        blocks = PAPER.num_compressed_blocks(length)
        self.k_cmp = normal(batch, blocks, groups, dim)
        self.gate = torch.rand(batch, length, heads, generator=generator, device="cuda").bfloat16()
        # Any finite number serves for the time; the choice below is made with it, too.
        self.lse = torch.full((batch, length, heads), 5.0, device="cuda")
        self.scale = dim**-0.5
        self.choices = {"random": self.score()}

    def score(self, **options: Any) -> Tensor:
        return select_blocks_forward(self.q, self.k_cmp, self.lse, PAPER, self.tokens, self.scale, None, **options)

    def drift(self) -> Tensor:
        """A choice that changes slowly along the sequence: neighbours share most of their blocks."""
        batch, length, groups, places = self.choices["random"].shape
        generator = torch.Generator("cuda").manual_seed(1)
        blocks = PAPER.num_selection_blocks(length)
        knots = torch.randn(batch * groups * 8, 1, length // 64 + 2, generator=generator, device="cuda")
        walk = torch.nn.functional.interpolate(knots, size=length, mode="linear").view(batch, groups, 8, length)
        features = torch.randn(8, blocks, generator=generator, device="cuda")
        own = torch.arange(length, device="cuda")[:, None] // PAPER.selection_block_size
        block = torch.arange(blocks, device="cuda")
        chosen = torch.empty_like(self.choices["random"])
        for b in range(batch):
            for g in range(groups):
                scores = walk[b, g].T @ features
                scores.masked_fill_((block < 1) | (block > own - 2), float("inf")).masked_fill_(
                    block > own, -float("inf")
                )
                top = scores.topk(min(places, blocks), dim=-1)
                index = top.indices.masked_fill(top.values == -float("inf"), blocks).sort(-1).values
                chosen[b, :, g] = -1
                chosen[b, :, g, : index.shape[-1]] = index.masked_fill(index == blocks, -1).int()
        self.choices["smooth"] = chosen
        return chosen

    def forward(self, choice: str = "random", **options: Any) -> tuple[Tensor, Tensor]:
        return selected_forward(self.q, self.k, self.v, self.choices[choice], PAPER, self.scale, None, **options)

    def backward(self, o: Tensor, lse: Tensor, choice: str = "random", **options: Any) -> tuple[Tensor, ...]:
        return selected_backward(
            self.d_o, self.q, self.k, self.v, o, lse, self.choices[choice], PAPER, self.scale, None, **options
        )


# --- is it right? ---


def importance_gap(q: Tensor, k_cmp: Tensor, lse: Tensor, chosen: Tensor, geometry: Geometry, num_keys: int) -> float:
    """By how much, relative to the row's largest, a block left out beats one taken; 0 when none does."""
    q, k_cmp, lse = q.double(), k_cmp.double(), lse.double()
    compressed, blocks, groups = k_cmp.shape[1], geometry.num_selection_blocks(num_keys), k_cmp.shape[2]
    q = q.unflatten(2, (groups, -1))
    position = torch.arange(num_keys - q.shape[1], num_keys, device=q.device)[:, None]
    last_token = torch.arange(compressed, device=q.device) * geometry.compression_stride
    visible = last_token + geometry.compression_block_size - 1 <= position
    scores = torch.einsum("btgrd,bcgd->bgrtc", q, k_cmp) * q.shape[-1] ** -0.5
    lse = lse.unflatten(2, (groups, -1)).permute(0, 2, 3, 1)[..., None]
    p = (scores - lse).exp().masked_fill(~visible, 0.0).sum(2)
    overlap = torch.tensor(
        [[geometry.overlap_tokens(i, j) for j in range(blocks)] for i in range(compressed)],
        dtype=torch.float64, device=q.device,
    )  # fmt: skip
    importance = p @ overlap / geometry.compression_stride
    own = position // geometry.selection_block_size
    block = torch.arange(blocks, device=q.device)
    forced = (block < geometry.num_initial_blocks) | (block > own - geometry.num_local_blocks)
    free = ~forced & (block <= own)
    taken = (chosen.transpose(1, 2)[..., None] == block).any(-2)
    if (taken & (block > own)).any() or (forced & (block <= own) & ~taken).any():
        return float("inf")
    count = torch.minimum(own[:, 0] + 1, torch.tensor(geometry.num_selected_blocks, device=q.device))
    if (taken.sum(-1) != count).any():
        return float("inf")
    worst_taken = importance.masked_fill(~(taken & free), float("inf")).amin(-1)
    best_left = importance.masked_fill(taken | ~free, -float("inf")).amax(-1)
    gap = (best_left - worst_taken) / importance.amax(-1).clamp(min=1e-30)
    return max(0.0, gap.nan_to_num(nan=0.0, neginf=0.0).max().item())


def check(worker: int) -> None:
    """A worker's share of the checks."""
    from tests.tolerances import cost_in_torch

    number = -1

    usual = Geometry(16, 8, 32, 4, 1, 2, 64)
    wide = Geometry(32, 16, 128, 3, 1, 1, 64)
    odd = Geometry(16, 16, 48, 3, 1, 1, 64)
    cases = [
        # why, batch, queries, keys, heads, groups, dim, value dim, geometry, document lengths, orders
        ("paper widths", 1, 333, 333, 16, 1, 192, 128, usual, None, ("gathered", "masked", "query")),
        ("small group", 2, 250, 250, 8, 2, 128, 128, usual, None, ("gathered", "masked")),
        ("odd heads, dims", 2, 131, 300, 6, 2, 72, 40, usual, None, ("gathered", "masked", "query")),
        ("one head", 1, 200, 200, 3, 3, 64, 64, PAPER, None, ("gathered", "masked")),
        ("blocks of 128", 1, 400, 400, 8, 2, 64, 256, wide, None, ("gathered", "masked")),
        ("blocks of 48", 1, 250, 250, 40, 1, 64, 64, odd, None, ("gathered", "masked")),
        ("packed", 1, 420, 420, 6, 2, 64, 64, usual, [100, 1, 17, 64, 200, 38], ("gathered", "masked", "query")),
        ("64 heads a group", 1, 150, 150, 64, 1, 128, 64, usual, None, ("gathered", "masked")),
        ("blocks of 64", 2, 700, 700, 32, 2, 128, 128, PAPER, None, ("gathered", "masked")),
        ("64, packed", 1, 900, 900, 16, 4, 64, 128, PAPER, [100, 1, 64, 65, 400, 270], ("gathered", "masked")),
        ("64, T < S", 1, 333, 1000, 64, 4, 128, 128, PAPER, None, ("gathered",)),
        ("64, 64 heads", 1, 450, 450, 64, 1, 128, 64, PAPER, None, ("gathered",)),
        ("64, 8 heads", 3, 333, 400, 16, 2, 64, 64, PAPER, None, ("gathered",)),
        ("64, 32 heads, packed", 1, 1500, 1500, 32, 1, 128, 128, PAPER, [1, 1400, 99], ("gathered", "masked")),
        ("64, six heads", 2, 333, 400, 12, 2, 64, 64, PAPER, None, ("gathered", "masked")),
        ("64, one head", 1, 333, 400, 2, 2, 128, 64, PAPER, None, ("gathered", "masked")),
    ]
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for why, batch, queries, keys, heads, groups, dim, value_dim, geometry, lengths, orders in cases:
            if dtype == torch.float16 and why not in ("small group", "blocks of 64"):
                continue
            if dtype == torch.float32 and why not in ("small group", "packed", "odd heads, dims"):
                continue
            number += 1
            if number % WORKERS != worker:
                continue
            allowed = 2 * cost_in_torch(dtype)
            generator = torch.Generator("cuda").manual_seed(2)

            def normal(*shape: int, generator: torch.Generator = generator, dtype: torch.dtype = dtype) -> Tensor:
                return torch.randn(shape, generator=generator, device="cuda").to(dtype)

            q, d_o = normal(batch, queries, heads, dim), normal(batch, queries, heads, value_dim)
            k, v = normal(batch, keys, groups, dim), normal(batch, keys, groups, value_dim)
            documents = None
            if lengths is not None:
                borders = torch.tensor([0, *lengths], device="cuda").cumsum(0)
                documents = Documents.from_cu_seqlens(borders, keys)
            places = geometry.num_selected_blocks
            scale = dim**-0.5
            blocks = geometry.num_selection_blocks(keys)
            chosen = torch.randint(
                -1, blocks, (batch, queries, groups, places), generator=generator, device="cuda"
            ).int()
            gate = (
                torch.rand(batch, queries, heads, generator=generator, device="cuda").to(dtype) if number % 2 else None
            )
            leaves = [x.double().requires_grad_() for x in (q, k, v)]
            exact = reference.selected_attention(*leaves, chosen, geometry, scale, documents)
            d_exact = d_o.double() if gate is None else d_o.double() * gate.double()[..., None]
            exact_gradients = torch.autograd.grad(exact, leaves, d_exact)
            variants = [(order, hand, None) for order in orders for hand in (True, False)]
            # Parts of as many queries, and no parts.
            variants += [
                ("masked", hand, part) for hand in (True, False) for part in (100, 10**6) if "masked" in orders
            ]
            for order, by_hand, part in variants:
                if by_hand and order == "query":
                    continue
                try:
                    first = None
                    for _ in range(2):
                        # What is freed here is handed out again: outputs start as NaN.
                        for _ in range(4):
                            poison = torch.full((2**22,), float("nan"), device="cuda")
                        del poison
                        o, lse = selected_forward(
                            q, k, v, chosen, geometry, scale, documents, order=order, by_hand=by_hand
                        )
                        got = [o]
                        if order != "query":
                            got += selected_backward(
                                d_o, q, k, v, o, lse, chosen, geometry, scale, documents,
                                gate=gate, order=order, by_hand=by_hand, part_queries=part,
                            )  # fmt: skip
                        same = first is None or all(torch.equal(a, b) for a, b in zip(first, got, strict=True))
                        first = got
                    errors = [error(a, e) for a, e in zip(got, (exact, *exact_gradients), strict=False)]
                    verdict = "ok" if max(errors) <= allowed and same else "WRONG"
                    say(
                        f"check {verdict:5} {str(dtype)[6:]:8} {order:8} {'by hand' if by_hand else '':7} {why:16} "
                        f"{'' if part is None else f'parts of {part} '}"
                        + " ".join(f"{e:.1e}" for e in errors)
                        + f" (allowed {allowed:.1e}) equal bits {same}"
                    )
                    results[f"check {dtype} {order} {by_hand} {part} {why}"] = [verdict, errors, allowed, same]
                except Exception:
                    say(f"check FAIL {dtype} {order} {why}\n{traceback.format_exc(limit=-4)[-1500:]}")
            if documents is None and geometry.num_selected_blocks < blocks:
                try:
                    k_cmp = normal(batch, geometry.num_compressed_blocks(keys), groups, dim)
                    _, lse = reference.compressed_attention(
                        q.double(), k_cmp.double(), k_cmp.double(), geometry, keys, scale, None
                    )
                    got_choice = select_blocks_forward(q, k_cmp, lse.float(), geometry, keys, scale, None)
                    gap = importance_gap(q, k_cmp, lse, got_choice, geometry, keys)
                    say(f"check {'ok' if gap < 1e-5 else 'WRONG':5} {str(dtype)[6:]:8} scoring  {why:16} gap {gap:.1e}")
                    results[f"check {dtype} scoring {why}"] = gap
                except Exception:
                    say(f"check FAIL {dtype} scoring {why}\n{traceback.format_exc(limit=-4)[-1500:]}")


# --- how fast? ---

SCORING = {
    "A": [Tile(64, 128, 4, 3), Tile(128, 128, 8, 3)],
    "C": [Tile(64, 128, 4, 2), Tile(64, 128, 4, 3)],
    "D": [Tile(64, 128, 4, 2)],
    "B": [Tile(64, 128, 4, 3)],
    "P": [Tile(64, 64, 4, 2)],
}
PORTABLE = {"by_hand": False}
# Order, tile, and what else `selected_forward` takes.
FORWARD: dict[str, list[tuple[str, Tile, dict[str, Any]]]] = {
    "A": [
        ("gathered", Tile(64, 64, 4, 2), PORTABLE), ("gathered", Tile(64, 64, 4, 1), {}),
        ("gathered", Tile(64, 128, 4, 1), {}), ("gathered", Tile(64, 256, 4, 1), {}),
    ],
    "C": [
        ("gathered", Tile(64, 128, 4, 3), PORTABLE), ("gathered", Tile(64, 128, 4, 1), {}),
        ("gathered", Tile(64, 256, 4, 1), {}), ("gathered", Tile(64, 512, 4, 1), {}),
    ],
    "B": [
        ("gathered", Tile(64, 64, 4, 2), PORTABLE), ("gathered", Tile(64, 64, 4, 1), {}),
        ("gathered", Tile(64, 128, 4, 1), {}), ("gathered", Tile(64, 256, 4, 1), {}),
        ("masked", Tile(128, 0, 8, 3, 128), {}),
    ],
    "D": [
        ("masked", Tile(128, 0, 8, 3, 128), {}), ("gathered", Tile(64, 128, 4, 1), {}),
        ("gathered", Tile(64, 256, 4, 1), {}),
    ],
    "P": [("gathered", Tile(64, 32, 4, 2), {}), ("gathered", Tile(64, 64, 4, 3), {})],
}  # fmt: skip
# Order, tile, tile of the masked order's d_q, and what else `selected_backward` takes.
BACKWARD: dict[str, list[tuple[Any, ...]]] = {
    "A": [
        ("gathered", Tile(64, 256, 4, 2), None, PORTABLE), ("gathered", Tile(128, 256, 8, 2), None, PORTABLE),
        ("gathered", Tile(64, 128, 4, 1), None), ("gathered", Tile(64, 256, 4, 1), None),
        ("gathered", Tile(64, 512, 4, 1), None),
    ],
    "C": [
        ("gathered", Tile(64, 512, 4, 2), None, PORTABLE), ("gathered", Tile(64, 256, 4, 1), None),
        ("gathered", Tile(64, 512, 4, 1), None),
    ],
    "B": [
        ("gathered", Tile(64, 256, 4, 2), None, PORTABLE), ("gathered", Tile(128, 256, 8, 1), None, PORTABLE),
        ("gathered", Tile(64, 128, 4, 1), None), ("gathered", Tile(64, 256, 4, 1), None),
    ],
    "D": [
        ("masked", Tile(128, 0, 4, 2), Tile(64, 0, 4, 2, 168), PORTABLE), ("masked", None, Tile(64, 0, 4, 2, 168)),
        ("masked", Tile(64, 0, 4, 1), Tile(64, 0, 4, 2, 168)), ("masked", None, Tile(128, 0, 8, 3)),
    ],
    "P": [("gathered", Tile(64, 256, 4, 2), None), ("gathered", Tile(64, 256, 8, 1), None)],
}  # fmt: skip


def jobs() -> list[tuple[str, str, Any]]:
    """Everything that is timed: stage, shape, configuration."""
    listed = [("scoring", shape, tile) for shape, tiles in SCORING.items() for tile in tiles]
    listed += [("forward", shape, option) for shape, options in FORWARD.items() for option in options]
    return listed + [("backward", shape, option) for shape, options in BACKWARD.items() for option in options]


def run_job(problem: Problem, stage: str, option: Any, choice: str, saved: Any = None) -> Callable[[], Any]:
    if stage == "scoring":
        return lambda: problem.score(tile=option)
    if stage == "forward":
        return lambda: problem.forward(choice, order=option[0], tile=option[1], **option[2])
    o, lse = saved
    more = option[3] if len(option) > 3 else {}
    return lambda: problem.backward(o, lse, choice, order=option[0], tile=option[1], tile_d_q=option[2], **more)


def precompile(worker: int) -> None:
    """Compile a share of the configurations into Triton's cache, on short sequences: lengths are not compiled in."""
    problems: dict[str, Problem] = {}
    for number, (stage, shape, option) in enumerate(jobs()):
        if number % WORKERS != worker:
            continue
        try:
            if shape not in problems:
                problems[shape] = Problem(shape, 2048)
            problem = problems[shape]
            zeros = torch.zeros_like(problem.d_o), torch.zeros_like(problem.lse)
            run_job(problem, stage, option, "random", zeros)()
        except Exception:
            print(f"precompile {stage} {shape} {option}: {traceback.format_exc(limit=-2)[-500:]}", flush=True)


def compare_orders(problem: Problem) -> None:
    """Two independent loop orders on a shape too large for the reference."""
    o, lse = problem.forward(order="masked")
    masked = (o, *problem.backward(o, lse, order="masked"))
    for title, forward, backward in (("by hand", {}, {}), ("portable", PORTABLE, PORTABLE), ("again", {}, {})):
        o, lse = problem.forward(order="gathered", **forward)
        gathered = (o, *problem.backward(o, lse, order="gathered", **backward))
        gaps = [error(a, b) for a, b in zip(gathered, masked, strict=True)]
        say(f"check gathered against masked, o d_q d_k d_v: {' '.join(f'{gap:.1e}' for gap in gaps)} {title}")
        results[f"check gathered against masked {title}"] = gaps


def times(shape: str, seconds: float, stages: list[str]) -> None:
    problem = Problem(shape)
    if shape == "B" and "check" in stages:
        compare_orders(problem)
    smooth = shape in ("A", "C")
    if smooth:
        problem.drift()
    for stage in ("scoring", "forward", "backward"):
        if stage not in stages:
            continue
        saved = problem.forward() if stage == "backward" else None
        best = (float("inf"), None)
        for option in (job[2] for job in jobs() if job[:2] == (stage, shape)):
            if time.monotonic() - START > seconds:
                say(f"out of time before {stage} {shape} {option}")
                return
            try:
                spent = milliseconds(run_job(problem, stage, option, "random", saved))
                best = min(best, (spent, option), key=lambda pair: pair[0])
                say(f"{stage:8} {shape} random {spent:8.3f} ms  {plain(option)}")
                results[f"{stage} {shape} random {plain(option)}"] = spent
            except Exception:
                say(f"{stage} {shape} {option} FAIL\n{traceback.format_exc(limit=-3)[-800:]}")
        if best[1] is None:
            continue
        try:
            if stage != "scoring" and smooth:
                spent = milliseconds(run_job(problem, stage, best[1], "smooth", saved))
                say(f"{stage:8} {shape} smooth {spent:8.3f} ms  {plain(best[1])}")
                results[f"{stage} {shape} smooth {plain(best[1])}"] = spent
            if stage == "forward" and shape in ("A", "C"):
                for size in (2**28, 2**29, 2**30):
                    options = {"order": best[1][0], "tile": best[1][1], **best[1][2], "buffer_bytes": size}
                    spent = milliseconds(lambda options=options: problem.forward(**options))
                    say(f"{stage:8} {shape} random {spent:8.3f} ms  buffer {size >> 20} MiB {plain(best[1])}")
                    results[f"{stage} {shape} random buffer {size}"] = spent
            if stage == "backward" and shape in ("A", "C"):
                for size in (2**28, 2**29, 2**30):
                    spent = milliseconds(
                        lambda size=size, best=best[1], saved=saved: problem.backward(
                            *saved, tile=best[1], buffer_bytes=size, **(best[3] if len(best) > 3 else {})
                        )
                    )
                    say(f"{stage:8} {shape} random {spent:8.3f} ms  buffer {size >> 20} MiB {plain(best[1])}")
                    results[f"{stage} {shape} random buffer {size}"] = spent
            if stage == "scoring" and shape == "A":
                for size in (2**25,):
                    spent = milliseconds(lambda size=size, tile=best[1]: problem.score(tile=tile, buffer_bytes=size))
                    say(f"{stage:8} {shape} random {spent:8.3f} ms  buffer {size >> 20} MiB {plain(best[1])}")
                    results[f"{stage} {shape} random buffer {size}"] = spent
            if "profile" in stages:
                profile(f"{stage} {shape} {plain(best[1])}", run_job(problem, stage, best[1], "random", saved))
        except Exception:
            say(f"{stage} {shape} after the best FAIL\n{traceback.format_exc(limit=-3)[-800:]}")


def profile(title: str, call: Callable[[], Any]) -> None:
    """Device time by kernel over one call."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.device_time_total)[:9]
    parts = {row.key[:44]: [row.count, round(row.device_time_total / 1000, 4)] for row in rows}
    say(f"profile {title}")
    for name, (count, spent) in parts.items():
        print(f"          {spent:9.4f} ms  x{count:<3} {name}", flush=True)
    results[f"profile {title}"] = parts


def plain(option: Any) -> str:
    """A configuration in few letters."""
    if isinstance(option, Tile):
        return "/".join(str(x) for x in option)
    if isinstance(option, dict):
        return " ".join(f"{name}={plain(value)}" for name, value in option.items())
    if isinstance(option, tuple):
        return " ".join(plain(part) for part in option)
    return str(option)


def index_times() -> None:
    """The index by itself."""
    for shape in ("A", "B"):
        problem = Problem(shape)
        chosen, size = selected.split_blocks(problem.choices["random"], PAPER.selection_block_size, 64)

        def build(chosen: Tensor = chosen, size: int = size, tokens: int = problem.tokens) -> Any:
            return choice_index.build_choice_index(chosen, size, tokens, None, chunk_rows=8192, piece_slots=32)

        spent = milliseconds(build)
        say(f"index    {shape} random {spent:8.3f} ms")
        results[f"index {shape}"] = spent
        profile(f"index {shape}", build)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--only", default="check,index,scoring,forward,backward,profile")
    parser.add_argument("--shapes", default="A,C,D,B,P")
    parser.add_argument("--worker", type=int, default=None, help="a share of the checks and compilations")
    arguments = parser.parse_args()
    stages = arguments.only.split(",")
    out = Path(os.environ.get("OUT", "."))
    if arguments.worker is not None:
        if "check" in stages:
            check(arguments.worker)
            (out / f"probe_check_{arguments.worker}.json").write_text(json.dumps(results, indent=1))
        precompile(arguments.worker)
        return
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    command = [sys.executable, __file__, "--only", arguments.only, "--worker"]
    workers = [subprocess.Popen([*command, str(worker)]) for worker in range(WORKERS)]
    try:
        for worker in workers:
            # What is not compiled by then is compiled where it is timed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(timeout=max(1.0, 0.5 * arguments.seconds - (time.monotonic() - START)))
            worker.kill()
        say("checked and compiled")
        for number in range(WORKERS):
            part = out / f"probe_check_{number}.json"
            if part.exists():
                results.update(json.loads(part.read_text()))
                part.unlink()
        if "index" in stages:
            index_times()
        for shape in arguments.shapes.split(","):
            try:
                times(shape, arguments.seconds, stages)
            except Exception:
                say(f"{shape} FAIL\n{traceback.format_exc(limit=-4)[-1500:]}")
            torch.cuda.empty_cache()
            (out / "probe_selected.json").write_text(json.dumps(results, indent=1))
    finally:
        for worker in workers:
            worker.kill()
        (out / "probe_selected.json").write_text(json.dumps(results, indent=1))
        say(f"wrote {out / 'probe_selected.json'}")


if __name__ == "__main__":
    main()
