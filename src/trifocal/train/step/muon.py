"""Muon: the momentum of a matrix is orthogonalised before it is applied. AdamW trains everything else.

Mathematics of `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` (arXiv:2502.16982), so that the learning rate
and the weight decay of AdamW serve. PyTorch's own computes one matrix after the other, each of them in every process,
and has no `found_inf`.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trifocal.distributed.parallel import local_shard

# The quintic a x + b x³ + c x⁵ of https://kellerjordan.github.io/posts/muon/: values between 0 and 1 come near 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315
# For y = s x, with s⁴ = c, it is ((y² + shift)² + rest) y: products without an addend, which costs half of one more.
SCALE = _C**0.25
_SHIFT = _B / (2 * SCALE**2)
_REST = _A - _SHIFT**2
_ITERATIONS = 5
_EPSILON = 1e-7
# Updates of this many entries are computed at a time.
_MAX_ENTRIES = 2**26


class MuonWithAdamW(torch.optim.AdamW):
    """Fused AdamW, and Muon for the groups that have a `momentum`, whose parameters are matrices.

    Replicated matrices (DDP) are divided among all processes. Sharded ones (FSDP2, HSDP) are collected, each process
    computes some, and their shards are sent back. Where `found_inf` is set, nothing changes, as in fused AdamW.
    """

    found_inf: Tensor | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        # AdamW's own wants a `step` in each parameter's state.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step."""
        assert closure is None
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if "momentum" not in group]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if "momentum" in group:
                for matrices in _batches(group["params"]):
                    self._update(matrices, group)

    def _update(self, matrices: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        """Update matrices of one shape."""
        momentum, rows, columns = group["momentum"], *matrices[0].shape
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        gradients = [local_shard(matrix.grad) for matrix in matrices if matrix.grad is not None]
        buffers = [local_shard(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
        # buffer += (1 - momentum) (gradient - buffer)
        self._descend(buffers, gradients, momentum - 1, -1.0)
        slopes = list(torch._foreach_lerp(gradients, buffers, momentum))
        update = slopes[0].new_empty(len(slopes), *slopes[0].shape, dtype=torch.bfloat16)
        torch._foreach_copy_(update.unbind(), slopes)
        torch._foreach_copy_(slopes, _orthogonalised(update, matrices[0]).unbind())
        factor = 0.2 * math.sqrt(max(rows, columns)) / SCALE
        weights = [local_shard(matrix) for matrix in matrices]
        self._descend(weights, slopes, group["lr"] * factor, group["weight_decay"] / factor)

    def _descend(self, values: list[Tensor], slopes: list[Tensor], rate: Any, decay: float) -> None:
        """values -= rate (slopes + decay values), in one pass; nothing where `found_inf` is set."""
        torch._fused_sgd_(
            values, slopes, [], weight_decay=decay, momentum=0.0, lr=rate, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False, found_inf=self.found_inf,
        )  # fmt: skip


def orthogonalise(matrices: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """Newton–Schulz: matrices [n, rows, columns] with singular values near `SCALE`, in fp16, which has room for all
    entries and rounds an eighth of what bf16 does.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    norms = matrices.norm(dim=(1, 2), keepdim=True, dtype=torch.promote_types(torch.float32, dtype))
    x = torch.mul(matrices, SCALE / norms.clamp(min=_EPSILON), out=torch.empty_like(matrices, dtype=dtype))
    for _ in range(_ITERATIONS):
        gram = x.mT @ x if tall else x @ x.mT
        gram.diagonal(dim1=1, dim2=2).add_(_SHIFT)
        square = gram @ gram
        square.diagonal(dim1=1, dim2=2).add_(_REST)
        x = x @ square if tall else square @ x
    return x


def _batches(matrices: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Matrices with a gradient, of one shape each time."""
    by_shape = defaultdict(list)
    for matrix in matrices:
        if matrix.grad is not None:
            by_shape[matrix.shape].append(matrix)
    for shape, same in by_shape.items():
        count = max(1, _MAX_ENTRIES // shape.numel())
        yield from (same[first : first + count] for first in range(0, len(same), count))


def _orthogonalised(update: Tensor, like: Tensor) -> Tensor:
    """`orthogonalise` for this process's part of matrices, [n, local rows, columns]; each process computes some."""
    if isinstance(like, DTensor):
        [dimension] = [dimension for dimension, placement in enumerate(like.placements) if placement.is_shard()]
        return _of_shards(update, like.shape[0], like.device_mesh.get_group(dimension))
    if dist.is_initialized() and dist.get_world_size() > 1:
        return _of_replicas(update)
    return orthogonalise(update)


def _shares(count: int, size: int) -> list[int]:
    """The part of each process, as torch.chunk divides."""
    share = -(-count // size)
    return [max(0, min(share, count - process * share)) for process in range(size)]


def _of_replicas(update: Tensor) -> Tensor:
    count, size = len(update), dist.get_world_size()
    share = -(-count // size)
    part = orthogonalise(update[dist.get_rank() * share : (dist.get_rank() + 1) * share])
    mine = part.new_zeros(share, *part.shape[1:])
    mine[: len(part)] = part
    gathered = mine.new_empty(size, *mine.shape)
    dist.all_gather(list(gathered), mine)
    return gathered.flatten(0, 1)[:count]


def _of_shards(update: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    count, local_rows, columns = update.shape
    # Rows of each process, and matrices that it computes.
    heights, counts = _shares(rows, size), _shares(count, size)
    assert local_rows == heights[rank]
    by_owner = [number * local_rows * columns for number in counts]
    by_source = [counts[rank] * height * columns for height in heights]
    received = update.new_empty(sum(by_source))
    dist.all_to_all_single(received, update.flatten(), by_source, by_owner, group=group)
    shards = [
        part.view(counts[rank], height, columns)
        for part, height in zip(received.split(by_source), heights, strict=True)
    ]
    whole = orthogonalise(torch.cat(shards, dim=1))
    results = torch.cat([part.flatten() for part in whole.split(heights, dim=1)])
    back = torch.empty_like(update, dtype=results.dtype)
    dist.all_to_all_single(back.view(-1), results, by_owner, by_source, group=group)
    return back
