"""Context parallelism: the exchange of keys between the processes that share each sequence.

The exchange is an operator with a backward that is one too, so that compilers see only shapes. Its collectives are an
all-gather of the keys forward, and a reduce-scatter of their gradients backward, in the keys' type. Windows need only
the tokens in front of each chunk, which neighbours have: these go from process to process, both ways.

One call exchanges all keys and values of a layer. While one tensor is on its way, another is put in order. And a
compiler, which may change the order of operators and sees other shapes in each process, finds one exchange in a layer
and not six, whose order must be the same everywhere.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trifocal.distributed.processes import DistributedContext
from trifocal.nn.context import ContextShard

# The collectives that take a group by its name, as an operator must. Those of `torch.distributed` change theirs between
# the versions of PyTorch.
_collectives = torch.ops._c10d_functional


def _one_ahead(
    xs: Iterable[Tensor], start: Callable[[Tensor], Tensor], end: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Exchange tensors one after the other; on a GPU each is started before the one in front of it is ended.

    Two are on their way at most, so that few buffers are taken. On a CPU only one: two threads of a Gloo group write
    the name of the collective that they have ended into the same string, and free it twice (PyTorch 2.13).
    """
    found: list[Tensor] = []
    running: Tensor | None = None
    for x in xs:
        if running is not None and not x.is_cuda:
            found.append(end(running))
            running = None
        started = start(x)
        if running is not None:
            found.append(end(running))
        running = started
    return found if running is None else [*found, end(running)]


@torch.library.custom_op("trifocal::gather_context", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def gather_context(xs: list[Tensor], group: str, size: int) -> list[Tensor]:
    """Local tokens of all processes of a group, each [B, T, ...] -> [B, S, ...], in the order of the sequence."""

    def start(x: Tensor) -> Tensor:
        return _collectives.all_gather_into_tensor(x[None].contiguous(), size, group)  # type: ignore[no-any-return]

    def end(of_ranks: Tensor) -> Tensor:
        early, late = _collectives.wait_tensor(of_ranks).unflatten(2, (2, -1)).unbind(2)
        return torch.cat((*early, *late.unbind()[::-1]), dim=1)

    return _one_ahead(xs, start, end)


@gather_context.register_fake
def _(xs: list[Tensor], group: str, size: int) -> list[Tensor]:
    return [x.new_empty(x.shape[0], x.shape[1] * size, *x.shape[2:]) for x in xs]


@torch.library.custom_op("trifocal::scatter_context", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def scatter_context(xs: list[Tensor], group: str, size: int) -> list[Tensor]:
    """Sums over the processes of a group, each [B, S, ...] -> [B, T, ...]: each process gets its local tokens."""

    def start(x: Tensor) -> Tensor:
        chunks = x.chunk(2 * size, dim=1)
        ordered = torch.cat([chunks[number] for rank in range(size) for number in (rank, -1 - rank)], dim=1)
        for_ranks = ordered.unflatten(1, (size, -1)).movedim(1, 0).contiguous()
        return _collectives.reduce_scatter_tensor(for_ranks, "sum", size, group)  # type: ignore[no-any-return]

    def end(part: Tensor) -> Tensor:
        return _collectives.wait_tensor(part)[0]  # type: ignore[no-any-return]

    return _one_ahead(xs, start, end)


@scatter_context.register_fake
def _(xs: list[Tensor], group: str, size: int) -> list[Tensor]:
    return [x.new_empty(x.shape[0], x.shape[1] // size, *x.shape[2:]) for x in xs]


@torch.library.custom_op("trifocal::gather_halo", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def gather_halo(xs: list[Tensor], past: int, group: str, rank: int, size: int) -> list[Tensor]:
    """The `past` tokens in front of both local chunks, each [B, T, ...] -> [B, H, ...]; none of the first chunk. They
    come from the ends of the late and early chunks of the processes before and behind.
    """
    splits = _halo_splits(past, rank, size)

    def start(x: Tensor) -> Tensor:
        early, late = (chunk[:, chunk.shape[1] - past :] for chunk in x.chunk(2, dim=1))
        sent = torch.cat((late, early), dim=1) if rank else early
        return _collectives.all_to_all_single(sent.transpose(0, 1).contiguous(), splits, splits, group)  # type: ignore[no-any-return]

    def end(rows: Tensor) -> Tensor:
        return _collectives.wait_tensor(rows).transpose(0, 1).contiguous()  # type: ignore[no-any-return]

    return _one_ahead(xs, start, end)


def _halo_splits(past: int, rank: int, size: int) -> list[int]:
    """Tokens that go to each process; as many come from it."""
    partners = {*([rank - 1] if rank else []), min(rank + 1, size - 1)}
    return [past if other in partners else 0 for other in range(size)]


@gather_halo.register_fake
def _(xs: list[Tensor], past: int, group: str, rank: int, size: int) -> list[Tensor]:
    count = sum(_halo_splits(past, rank, size))
    return [x.new_empty(x.shape[0], count, *x.shape[2:]) for x in xs]


@torch.library.custom_op("trifocal::scatter_halo", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def scatter_halo(xs: list[Tensor], past: int, num_local: int, group: str, rank: int, size: int) -> list[Tensor]:
    """The way back of `gather_halo`, each [B, H, ...] -> [B, T, ...], T = `num_local`."""
    splits = _halo_splits(past, rank, size)

    def start(x: Tensor) -> Tensor:
        return _collectives.all_to_all_single(x.transpose(0, 1).contiguous(), splits, splits, group)  # type: ignore[no-any-return]

    def end(rows: Tensor) -> Tensor:
        arrived = _collectives.wait_tensor(rows).transpose(0, 1)
        d_x = arrived.new_zeros(arrived.shape[0], num_local, *arrived.shape[2:])
        early, late = d_x.chunk(2, dim=1)
        early[:, early.shape[1] - past :] = arrived[:, arrived.shape[1] - past :]
        if rank:
            late[:, late.shape[1] - past :] = arrived[:, :past]
        return d_x

    return _one_ahead(xs, start, end)


@scatter_halo.register_fake
def _(xs: list[Tensor], past: int, num_local: int, group: str, rank: int, size: int) -> list[Tensor]:
    return [x.new_empty(x.shape[0], num_local, *x.shape[2:]) for x in xs]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    xs, *ctx.where = inputs
    ctx.num_local = xs[0].shape[1]
    # Keys that only choose may have no gradient.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_xs: list[Tensor | None], scatter: Callable[[list[Tensor]], list[Tensor]]) -> tuple[Any, ...]:
    wanted = [d if needed else None for d, needed in zip(d_xs, ctx.needs_input_grad[0], strict=True)]
    found = iter(scatter([d for d in wanted if d is not None]))
    return [None if d is None else next(found) for d in wanted], *(None for _ in ctx.where)


def _scatter(ctx: Any, d_xs: list[Tensor | None]) -> tuple[Any, ...]:
    return _backward(ctx, d_xs, lambda xs: scatter_context(xs, *ctx.where))


def _scatter_halo(ctx: Any, d_xs: list[Tensor | None]) -> tuple[Any, ...]:
    past, *group = ctx.where
    return _backward(ctx, d_xs, lambda xs: scatter_halo(xs, past, ctx.num_local, *group))


gather_context.register_autograd(_scatter, setup_context=_keep)
gather_halo.register_autograd(_scatter_halo, setup_context=_keep)


def make_context_shard(processes: DistributedContext, size: int) -> ContextShard:
    """This process among `size` neighbours that share each sequence; all processes of the run call this."""
    # A mesh would split the NCCL communicator, and PyTorch then warns about the options that Gloo does not know.
    name = dist.new_subgroups(size)[0].group_name
    rank = processes.rank % size

    def gather(xs: Sequence[Tensor], past: int = 0) -> list[Tensor]:
        found: list[Tensor]
        found = gather_halo([*xs], past, name, rank, size) if past else gather_context([*xs], name, size)
        return found

    return ContextShard(rank, size, gather)
