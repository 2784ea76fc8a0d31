"""Gradients in one tensor with a fixed address, for CUDA graphs: all-reduced once a step, after backward."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trifocal.distributed.gradient_watch import GradientWatch


class FlatGradients:
    """The gradients of a replicated model, in one tensor.

    DDP exchanges gradients during backward, from hooks; a recorded graph runs no hooks. So all gradients are exchanged
    after backward. Between GPUs of one machine that takes about a millisecond for 300 MB.

    Args:
        parameters: Those that get gradients, all of one type and on one device.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        first = self._parameters[0]
        sizes = [parameter.numel() for parameter in self._parameters]
        self._all = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.views: list[Tensor] = [
            part.view_as(parameter) for part, parameter in zip(self._all.split(sizes), self._parameters, strict=True)
        ]

    def zero(self) -> None:
        """Begin a step: every parameter's gradient is zero, in this memory."""
        self._all.zero_()
        for parameter, view in zip(self._parameters, self.views, strict=True):
            parameter.grad = view

    def exchange(self, watch: GradientWatch) -> None:
        """Sum the gradients over all processes; `watch` sees those of this process before."""
        watch.check(self._all)
        dist.all_reduce(self._all)
