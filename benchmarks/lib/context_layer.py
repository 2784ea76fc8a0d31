"""One attention layer on a long sequence, in one process or in several that share it: what each process measures."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lib.timing import peak_gib, time_call
from trifocal.distributed.context import make_context_shard
from trifocal.distributed.processes import DistributedContext, processes_started
from trifocal.nn import NSAttention
from trifocal.nn.context import ContextShard, TokenShard
from trifocal.ops import Geometry

# Sums in another order, in fp64.
_BOUND = 1e-10
_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class LayerProblem:
    """A layer, its sequence, and how often it is timed."""

    tokens: int
    dim: int
    heads: int
    groups: int
    head_dim: int
    geometry: tuple[int, ...]
    calls: int

    def layer(self, device: torch.device, dtype: torch.dtype, backend: str = "auto") -> NSAttention:
        """The same layer in every process."""
        torch.manual_seed(0)
        sizes = {"head_dim": self.head_dim, "value_dim": self.head_dim}
        made = NSAttention(
            geometry=Geometry(*self.geometry),
            backend=backend,  # type: ignore[arg-type]
            dim=self.dim,
            num_heads=self.heads,
            num_kv_heads=self.groups,
            **sizes,
        )
        return made.to(device, dtype)


def step(layer: NSAttention, x: Tensor, upstream: Tensor, local_tokens: TokenShard | None) -> tuple[Tensor, ...]:
    """Forward and backward; gradients of the input and of the weights."""
    given = {} if local_tokens is None else {"local_tokens": local_tokens}
    o = layer(x, **given)
    return torch.autograd.grad(o, [x, *layer.parameters()], upstream.to(o.dtype))


def difference(problem: LayerProblem, shard: ContextShard, processes: DistributedContext) -> float:
    """Largest relative difference of a gradient from one process's, in fp64, on a short sequence."""
    device, tokens = processes.device, 2 * shard.num_chunks * 37
    layer = problem.layer(device, torch.float64, "reference")
    generator = torch.Generator().manual_seed(1)
    x, upstream = (
        torch.randn(1, tokens, problem.dim, generator=generator, dtype=torch.float64).to(device) for _ in range(2)
    )
    exact = step(layer, x.requires_grad_(), upstream, None)
    x = shard.local_tokens(x).detach().requires_grad_()
    d_x, *weights = step(layer, x, shard.local_tokens(upstream), TokenShard.of(shard, x, None))
    for weight in weights:
        dist.all_reduce(weight)
    found = [*shard.gather((d_x,)), *weights]
    return max(((a - e).abs().max() / e.abs().max()).item() for a, e in zip(found, exact, strict=True))


def measure(problem: LayerProblem, processes: DistributedContext) -> dict[str, Any]:
    """Times and memory of this process."""
    device = processes.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shard = make_context_shard(processes, processes.size) if processes.size > 1 else None
    if shard is not None and not (found := difference(problem, shard, processes)) < _BOUND:
        return {"status": f"refused: gradients differ from one process's by {found:.3g}"}
    layer = problem.layer(device, dtype)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(1)
    x, upstream = (
        torch.randn(1, problem.tokens // processes.size, problem.dim, device=device, dtype=dtype) for _ in range(2)
    )
    x.requires_grad_()

    def timed(given: ContextShard | None, *, backward: bool = True) -> float:
        local_tokens = None if given is None else TokenShard.of(given, x, None)

        def forward() -> Tensor:
            with torch.no_grad():
                return layer(x) if local_tokens is None else layer(x, local_tokens=local_tokens)

        # As often in every process: a call waits for the others.
        once = time_call(
            (lambda: step(layer, x, upstream, local_tokens)) if backward else forward,
            device,
            budget_seconds=1.0,
            minimum_calls=problem.calls,
            maximum_calls=problem.calls,
        )
        return once.median_ms

    row: dict[str, Any] = {"status": "ok", "forward_ms": timed(shard, backward=False), "ms": timed(shard)}
    row["peak_gib"] = peak_gib(device)
    if shard is not None:
        # The same work on the same shapes, on copies of this process's own keys.
        alone = ContextShard(shard.rank, shard.size, lambda xs: [x.repeat(1, shard.size, 1, 1) for x in xs])
        row["without_exchange_ms"] = timed(alone)
    return row


def main(device: str, problem: dict[str, Any], path: str) -> None:
    """Measure, and let rank 0 write the figures of the slowest process and of the most memory."""
    with processes_started(torch.device(device), timeout_seconds=_TIMEOUT_SECONDS) as processes:
        rows = processes.gather(measure(LayerProblem(**problem), processes))
        if processes.is_rank0:
            bad = [row for row in rows if row["status"] != "ok"]
            merged = bad[0] if bad else {key: max((row[key] for row in rows), key=lambda v: v or 0) for key in rows[0]}
            Path(path).write_text(json.dumps(merged), encoding="utf-8")
