"""Whose gradient it was: after the exchange every process has everyone's NaN, so each looks at its own before."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule

# The interface that custom reduce-scatters are to implement is public in name only; its default is taken as it is.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel


class GradientWatch:
    """Remembers, on the device, the largest entry of what this process gave to the exchange of gradients.

    One reduction over a buffer that is being sent anyway; the host does not wait.

    Args:
        device: Where the gradients are.
    """

    def __init__(self, device: torch.device) -> None:
        self._largest = torch.zeros((), device=device)

    def look(self, buffer: Tensor) -> None:
        """Take a buffer of gradients into account; NaN and infinity stay."""
        largest = torch.linalg.vector_norm(buffer.detach(), ord=torch.inf).float()
        torch.maximum(self._largest, largest, out=self._largest)

    def reset(self) -> None:
        """Forget, at the start of a step."""
        self._largest.zero_()

    def finite(self) -> bool:
        """Whether all that was sent since `reset` was finite; waits for the device."""
        return bool(torch.isfinite(self._largest))

    def watch_ddp(self, module: DistributedDataParallel) -> None:
        """Look at every bucket before DDP averages it, and average as it does by itself."""
        module.register_comm_hook(self, _look_and_average)

    def watch_fsdp(self, module: nn.Module) -> None:
        """Look at the gradients of every sharded module before they are scattered.

        Shards of one process are not scattered: with one shard a copy, nothing is seen.
        """
        comm = _LookingReduceScatter(self)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_custom_reduce_scatter(comm)


def _look_and_average(watch: GradientWatch, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    watch.look(bucket.buffer())
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]


class _LookingReduceScatter(DefaultReduceScatter):
    def __init__(self, watch: GradientWatch) -> None:
        self._watch = watch

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        self._watch.look(input_tensor)
        return super().__call__(output_tensor, input_tensor, *args, **options)
