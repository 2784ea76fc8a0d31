"""NVTX ranges for Nsight Systems: phases, modules, and PyTorch's own operations. Writes no file.

nsys profile --trace cuda,nvtx trifocal train CONFIG.toml --trace.what nvtx --trace.steps 10:13
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trifocal.runlog.traces.base import ModuleHooks, Moment, Trace


class RangeTrace(Trace):
    """Opens and closes ranges; needs a GPU.

    Args:
        moment: The place within the traced step.
        model: The model; its modules get ranges in forward passes.
    """

    def __init__(self, moment: Moment, model: nn.Module) -> None:
        super().__init__(moment)
        self._hooks = ModuleHooks(model, entered=self._entered, left=self._left)
        # PyTorch's own ranges.
        self._operations: Any = torch.autograd.profiler.emit_nvtx()
        self._operations.__enter__()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A range around the phase."""
        torch.cuda.nvtx.range_push(f"step {self._moment.step}: {name}")
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    def end(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()
        self._operations.__exit__(None, None, None)

    def _entered(self, name: str, inputs: list[Tensor]) -> None:
        torch.cuda.nvtx.range_push(name)

    def _left(self, name: str, outputs: list[Tensor]) -> None:
        torch.cuda.nvtx.range_pop()
