"""Launching kernels, and compiling all that a call is going to launch at the same time.

A kernel is compiled when it is first launched, and most of its seconds are spent outside of Python: in the compiler's
passes, the assembler, and a C compiler that makes its launcher. One after another they keep a first call waiting on a
single core.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
import triton

_MOST_WORKERS = 16
_compiled_for: ContextVar[torch.device | None] = ContextVar("compiled_for", default=None)


class Kernel:
    """A function of Triton's or Gluon's that is launched as `kernel[grid](...)`; inside of `only_compile`, compiled.

    Args:
        function: What `triton.jit` or `gluon.jit` made.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = function.__name__

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        if _compiled_for.get() is None:
            return self.function[grid]  # type: ignore[no-any-return]
        return functools.partial(self.function.warmup, grid=grid)


@contextlib.contextmanager
def only_compile(device: torch.device) -> Iterator[None]:
    """Compile every kernel that is launched inside, all at the same time, and launch none.

    Tensors inside are of the meta device, which `own_device` takes for the given one. What is launched then with the
    same types, strides and alignments finds its kernel ready.

    Args:
        device: A CUDA device, the current one.

    Raises:
        Exception: What the compiler raises.
    """
    token = _compiled_for.set(device)
    workers = min(_MOST_WORKERS, os.cpu_count() or 1)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
            with triton.AsyncCompileMode(pool) as mode:
                yield
            # The launcher of each too, which Triton makes when it first looks for it.
            list(pool.map(lambda future: future.result().run, mode.future_kernels.values()))
    finally:
        _compiled_for.reset(token)


def own_device(device: torch.device) -> torch.device:
    """The device itself; for the meta device the one that is compiled for, if any."""
    return (_compiled_for.get() or device) if device.type == "meta" else device
