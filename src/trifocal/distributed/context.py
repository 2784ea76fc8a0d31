"""Context parallelism: the exchange of keys between the processes that share each sequence.

The exchange is an operator with a backward that is one too, so that compilers see shapes alone. Its collectives are an
all-gather of the keys forward, and a reduce-scatter of their gradients backward, in the keys' type.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trifocal.distributed.processes import DistributedContext
from trifocal.nn.context import ContextShard

# The collectives that take a group by its name, as an operator must. Those of `torch.distributed` change theirs between
# the versions of PyTorch.
_collectives = torch.ops._c10d_functional


@torch.library.custom_op("trifocal::gather_context", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def gather_context(x: Tensor, group: str, size: int) -> Tensor:
    """Own tokens of all processes of a group, [B, T, ...] -> [B, S, ...], in the order of the sequence."""
    of_ranks = _collectives.wait_tensor(_collectives.all_gather_into_tensor(x[None].contiguous(), size, group))
    early, late = of_ranks.unflatten(2, (2, -1)).unbind(2)
    return torch.cat((*early, *late.unbind()[::-1]), dim=1)


@gather_context.register_fake
def _(x: Tensor, group: str, size: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * size, *x.shape[2:])


@torch.library.custom_op("trifocal::scatter_context", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def scatter_context(x: Tensor, group: str, size: int) -> Tensor:
    """Sum over the processes of a group, [B, S, ...] -> [B, T, ...]: each gets its own tokens."""
    chunks = x.chunk(2 * size, dim=1)
    ordered = torch.cat([chunks[number] for rank in range(size) for number in (rank, -1 - rank)], dim=1)
    for_ranks = ordered.unflatten(1, (size, -1)).movedim(1, 0).contiguous()
    own: Tensor = _collectives.wait_tensor(_collectives.reduce_scatter_tensor(for_ranks, "sum", size, group))
    return own[0]


@scatter_context.register_fake
def _(x: Tensor, group: str, size: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // size, *x.shape[2:])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.group, ctx.size = inputs


gather_context.register_autograd(
    lambda ctx, d: (scatter_context(d, ctx.group, ctx.size), None, None), setup_context=_keep
)


def make_context_shard(processes: DistributedContext, size: int) -> ContextShard:
    """This process among the `size` neighbours that share each sequence; all processes of the run call this.

    Args:
        processes: The processes of the run.
        size: Divides their number.
    """
    # A mesh would split the NCCL communicator, and PyTorch then warns about the options that Gloo does not know.
    name = dist.new_subgroups(size)[0].group_name
    return ContextShard(processes.rank % size, size, lambda x: gather_context(x, name, size))  # type: ignore[no-any-return]
