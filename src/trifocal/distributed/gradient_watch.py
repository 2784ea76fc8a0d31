"""Hooks into the exchange of gradients: which process sent what is not finite, and how long each exchange takes.

After the exchange all processes have the NaN of one, so each checks what it sends.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule

# The default collectives, which the classes below extend, are in a private module.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

Observer = Callable[[str, str, Tensor, Sequence[Tensor]], Callable[[], None]]
"""Called when an exchange begins, with its kind, its name, the buffer and the parameters in it. Returns a function that
is called at the end of the exchange (on a GPU, when the end is queued)."""


class GradientWatch:
    """Keeps, on the device, the largest absolute entry of the gradients that this process sends.

    It costs one reduction over each buffer that is sent; the host does not wait.

    Args:
        device: Where the gradients are.

    Attributes:
        observer: Called at every exchange; None for no observer.
    """

    def __init__(self, device: torch.device) -> None:
        self.observer: Observer | None = None
        self._largest = torch.zeros((), device=device)

    def check(self, buffer: Tensor) -> None:
        """Update the largest entry with a buffer of gradients; NaN and infinity are kept."""
        largest = torch.linalg.vector_norm(buffer.detach(), ord=torch.inf).float()
        torch.maximum(self._largest, largest, out=self._largest)

    def reset(self) -> None:
        """Start a new step."""
        self._largest.zero_()

    def finite(self) -> bool:
        """Whether all gradients since `reset` were finite; waits for the device."""
        return bool(torch.isfinite(self._largest))

    def watch_ddp(self, module: DistributedDataParallel, *, one_by_one: bool = False) -> None:
        """Check every bucket before DDP averages it.

        Args:
            module: The wrapped model.
            one_by_one: Send each gradient by itself. The rounding of a sum over three or more processes depends on the
                place in the buffer, and DDP rebuilds its buckets after its first step: the first step of a resumed
                run would differ by roundings from the same step of an uninterrupted one.
        """

        def average(_state: None, bucket: dist.GradBucket) -> Future[Tensor]:
            self.check(bucket.buffer())
            end = self.observed("all_reduce", f"bucket {bucket.index()}", bucket.buffer(), bucket.parameters())
            averaged = _average_one_by_one(bucket) if one_by_one else _average(bucket)
            if end is None:
                return averaged

            def noted(done: Future[Tensor]) -> Tensor:
                end()
                return done.value()

            return averaged.then(noted)

        module.register_comm_hook(None, average)

    def watch_fsdp(self, module: nn.Module) -> None:
        """Check the gradients of every sharded module before they are reduced and scattered.

        With one shard a replica there is no reduce-scatter, and nothing is checked.
        """
        for path, part in module.named_modules():
            if isinstance(part, FSDPModule):
                part.set_custom_all_gather(_AllGather(self, path or "model"))
                part.set_custom_reduce_scatter(_ReduceScatter(self, path or "model"))

    def observed(
        self, kind: str, name: str, buffer: Tensor, parameters: Sequence[Tensor] = ()
    ) -> Callable[[], None] | None:
        """Tell the observer of an exchange that begins; returns the function for its end, if there is an observer."""
        return None if self.observer is None else self.observer(kind, name, buffer, parameters)


def _average(bucket: dist.GradBucket) -> Future[Tensor]:
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]


def _average_one_by_one(bucket: dist.GradBucket) -> Future[Tensor]:
    buffer = bucket.buffer()
    buffer.div_(dist.get_world_size())
    works = [dist.all_reduce(gradient, async_op=True) for gradient in bucket.gradients()]
    for work in works:
        # On a GPU the stream waits, not the host.
        work.wait()
    averaged: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
    averaged.set_result(buffer)
    return averaged


def _call_at_end(work: Any, end: Callable[[], None] | None) -> Any:
    if end is not None and work is None:
        end()
    elif end is not None:
        work.get_future().then(lambda done: end())
    return work


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, watch: GradientWatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        self._watch.check(input_tensor)
        end = self._watch.observed("reduce_scatter", self._name, input_tensor)
        return _call_at_end(super().__call__(output_tensor, input_tensor, *args, **options), end)


class _AllGather(DefaultAllGather):
    def __init__(self, watch: GradientWatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __call__(self, output_tensor: Tensor, *args: Any, **options: Any) -> Any:
        end = self._watch.observed("all_gather", self._name, output_tensor)
        return _call_at_end(super().__call__(output_tensor, *args, **options), end)
