"""Launching kernels: fast after the first time; and compiling all kernels that a call needs at the same time.

Most seconds of compiling a kernel are spent outside of Python, so threads compile several side by side.

Triton spends 40 µs and more a launch on the meaning of all arguments for the compiled code, longer than a short kernel
runs. `Kernel` asks it once for arguments of a kind, and hands the compiled kernel its arguments from then on, pointers
as numbers. Only where a profiler listens are all launches Triton's own.
"""

import contextlib
import functools
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

from trifocal.ops import devices

Descriptor = GluonDescriptor | TensorDescriptor
_DESCRIPTORS = {GluonDescriptor, TensorDescriptor}

_MAX_WORKERS = 16
# Kinds of arguments that one kernel remembers. More come only of sizes that no two calls share.
_MAX_KINDS = 4096
# The default up to Triton 3.9, which warns that 3.10 has another.
_OPTIONS = {"enable_fp_fusion": True}


class Kernel:
    """A function of `triton.jit` or `gluon.jit` that is launched as `kernel[grid](...)`; inside of `only_compile`,
    compiled.

    All its arguments are given; those by name are constants. Launches share a kind if they agree in whatever code
    may depend on: constants, types, the alignment of pointers, and numbers that the function specializes on.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = function.__name__
        self._kinds: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] | None = None
        if isinstance(function, JITFunction):
            self._kinds = {}
            self._free = tuple(n for n, name in enumerate(function.arg_names) if name in function.do_not_specialize)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if devices.is_compiling():
            return functools.partial(self.function.warmup, grid=grid, **_OPTIONS)
        if self._kinds is None or _watched():
            return functools.partial(self.function[grid], **_OPTIONS)
        return functools.partial(self._launch, self._kinds, grid)

    def _launch(self, kinds: dict[tuple[Any, ...], Any], grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        kind, values = list(args), list(args)
        for place, x in enumerate(args):
            # The commonest type first: a launch goes through some thirty arguments.
            if type(x) is int:
                continue
            if isinstance(x, Tensor):
                values[place] = pointer = x.data_ptr()
                kind[place] = x.get_device(), x.dtype, pointer % 16
            else:
                kind[place] = x.kind if type(x) in _DESCRIPTORS else (type(x), x)
        # Code that is not specialized on a number still depends on its width: 32 bits or 64.
        for place in self._free:
            kind[place] = -(2**31) <= args[place] < 2**31
        key = *kind, *constants, *constants.values()
        known = kinds.get(key)
        if known is not None:
            compiled, rest = known
            stream = driver.active.get_current_stream(driver.active.get_current_device())
            # Nothing to tell a profiler, which is called neither before nor after.
            code = compiled.function, compiled.packed_metadata, None, None, None
            compiled.run(*(*grid, 1, 1)[:3], stream, *code, *values, *rest)
            return
        compiled = self.function[grid](*args, **_OPTIONS | constants)
        if compiled is not None:
            if len(kinds) >= _MAX_KINDS:
                kinds.clear()
            names = self.function.arg_names[len(args) :]
            kinds[key] = compiled, tuple(constants[name] for name in names)


def _watched() -> bool:
    """Whether a profiler has installed a hook for launches, in Triton's chain of hooks or in its place."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def describe_tiles(
    x: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    tile: tuple[int, ...],
    layout: NVMMASharedLayout | None = None,
) -> Descriptor:
    """A descriptor of x in tiles, for Gluon if there is a layout, else for Triton, without the slow checks of its
    constructor: `tma_fits` says beforehand whether x is fit for it.
    """
    # Fields that are left out have defaults, which are the class's attributes.
    descriptor: Any = object.__new__(TensorDescriptor if layout is None else GluonDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides, descriptor.block_shape = x, shape, strides, tile
    if layout is not None:
        descriptor.layout = layout
    descriptor.kind = (x.get_device(), x.dtype, *tile, layout)
    return descriptor  # type: ignore[no-any-return]


@contextlib.contextmanager
def only_compile(device: torch.device) -> Iterator[None]:
    """Compile every kernel that is launched inside, all at the same time, and launch none: tensors are of the meta
    device, as if on this one. A later launch with the same types, strides and alignments finds its kernel ready.
    """
    workers = min(_MAX_WORKERS, os.cpu_count() or 1)
    with (
        devices.compiling_for(device),
        ThreadPoolExecutor(workers, initializer=torch.cuda.set_device, initargs=(device,)) as pool,
    ):
        with triton.AsyncCompileMode(pool) as mode:
            yield
        _load([future.result() for future in mode.future_kernels.values()], pool)


def _load(kernels: Sequence[Any], pool: ThreadPoolExecutor) -> None:
    """Load compiled kernels, with the launcher of each, which Triton makes when it first looks for it.

    Up to Triton 3.6 all launchers are C extensions of one name, and Python, loading one again, puts its functions into
    the last module of that name, even another kernel's. So they are compiled at the same time, and loaded one by one.
    """
    list(pool.map(lambda kernel: driver.active.launcher_cls(kernel.src, kernel.metadata), kernels))
    list(map(operator.attrgetter("run"), kernels))
