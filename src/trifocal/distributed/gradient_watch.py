"""Whose gradient it was: after the exchange every process has everyone's NaN, so each looks at its own before."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule

# The interfaces that custom collectives are to implement are public in name only; their defaults are taken as they are.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel

Observer = Callable[[str, str, Tensor, list[Tensor]], Callable[[], None]]
"""Told of an exchange when it begins: its kind, of what, the buffer, the parameters in it. What it returns is called
when the exchange has ended (on a GPU: when that stands in the queue of work)."""


class GradientWatch:
    """Remembers, on the device, the largest entry of what this process gave to the exchange of gradients.

    One reduction over a buffer that is being sent anyway; the host does not wait.

    Args:
        device: Where the gradients are.
    """

    def __init__(self, device: torch.device) -> None:
        self._largest = torch.zeros((), device=device)
        self._observer: Observer | None = None
        self._parts: dict[str, FSDPModule] = {}

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

    def watch_ddp(self, module: DistributedDataParallel, *, one_by_one: bool = False) -> None:
        """Look at every bucket before DDP averages it, and average as it does by itself.

        Args:
            module: The wrapped model.
            one_by_one: Send each gradient by itself. A sum over three processes or more is rounded in an order that
                depends on the place in what is sent, and DDP lays its buckets out anew after its first step: so the
                first step of a resumed run would differ by roundings from the same step of an uninterrupted one.
        """
        module.register_comm_hook(self, _look_and_average_one_by_one if one_by_one else _look_and_average)

    def watch_fsdp(self, module: nn.Module) -> None:
        """Look at the gradients of every sharded module before they are scattered.

        Shards of one process are not scattered: with one shard a copy, nothing is seen.
        """
        for path, part in module.named_modules():
            if isinstance(part, FSDPModule):
                name = path or "model"
                self._parts[name] = part
                part.set_custom_reduce_scatter(_LookingReduceScatter(self, name))

    def observe(self, observer: Observer | None) -> None:
        """Tell an observer of every exchange from now on, of weights too where they are sharded; None for nobody."""
        self._observer = observer
        for name, part in self._parts.items():
            part.set_custom_all_gather(DefaultAllGather() if observer is None else _ObservedAllGather(self, name))

    def begin(self, kind: str, name: str, buffer: Tensor, parameters: list[Tensor]) -> Callable[[], None] | None:
        """An exchange begins; what to call at its end, if somebody wants to know."""
        return None if self._observer is None else self._observer(kind, name, buffer, parameters)


def _look_and_average(watch: GradientWatch, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    watch.look(bucket.buffer())
    end = watch.begin("all_reduce", f"bucket {bucket.index()}", bucket.buffer(), bucket.parameters())
    averaged = allreduce_hook(None, bucket)  # type: ignore[arg-type]
    if end is None:
        return averaged

    def noted(done: torch.futures.Future[Tensor]) -> Tensor:
        end()
        return done.value()

    return averaged.then(noted)


def _look_and_average_one_by_one(watch: GradientWatch, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    watch.look(buffer)
    end = watch.begin("all_reduce", f"bucket {bucket.index()}", buffer, bucket.parameters())
    buffer.div_(dist.get_world_size())
    works = [dist.all_reduce(gradient, async_op=True) for gradient in bucket.gradients()]
    for work in works:
        # On a GPU the queue of work waits, not the host.
        work.wait()
    if end is not None:
        end()
    averaged: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    averaged.set_result(buffer)
    return averaged


def _call_at_end(work: Any, end: Callable[[], None] | None) -> Any:
    if end is None:
        return work
    if work is None:
        end()
    else:
        work.get_future().then(lambda done: end())
    return work


class _LookingReduceScatter(DefaultReduceScatter):
    def __init__(self, watch: GradientWatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        self._watch.look(input_tensor)
        end = self._watch.begin("reduce_scatter", self._name, input_tensor, [])
        return _call_at_end(super().__call__(output_tensor, input_tensor, *args, **options), end)


class _ObservedAllGather(DefaultAllGather):
    def __init__(self, watch: GradientWatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        end = self._watch.begin("all_gather", self._name, output_tensor, [])
        return _call_at_end(super().__call__(output_tensor, input_tensor, *args, **options), end)
