"""Programmatic dependent launch: a kernel starts while the kernel before it still runs (sm_90 and newer).

A kernel's programs start as soon as all programs of the kernel before it have started and there is room for more; they
prepare themselves, and wait until that kernel is complete. A launcher passes `**dependent_launch(device)`, and its
kernel, with the constant DEPENDENT, follows these rules:

1. It calls `wait_for_inputs(DEPENDENT)` exactly once, in every program and on every path. If it has work to do before,
   it calls `release_next(DEPENDENT)` first of all, so that the next kernel need not wait for that work.
2. Before that it touches only memory that no kernel of the step writes: weights, tables of angles, its arguments. It
   may prefetch anything, by numbers that need not be up to date, if it reads them past the L1 cache (`volatile`).
3. Every read of activations and caches comes after it, and so does every write: the memory of an output may have
   been an input of a kernel that still runs.

Kernels that are launched in the plain way may stand anywhere between. A CUDA graph keeps this order, from CUDA 12.3 on.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from trifocal.ops import devices


@triton.jit
def release_next(DEPENDENT: tl.constexpr):
    """Let the next kernel start as soon as all programs have called this; a second call does nothing."""
    if DEPENDENT:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Let the next kernel start, and wait until the kernel before this one is complete and its results are visible."""
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a launch: the constant DEPENDENT, and the compiler's option where the device can."""
    if devices.has_dependent_launch(device) and not triton.knobs.runtime.interpret:
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}
