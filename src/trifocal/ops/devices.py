"""Facts about a device that the rules of `dispatch` and the launchers of kernels ask for; nothing here needs Triton."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

_compiled_for: ContextVar[torch.device | None] = ContextVar("compiled_for", default=None)
_properties: Callable[..., Any] = functools.cache(torch.cuda.get_device_properties)
_capability = functools.cache(torch.cuda.get_device_capability)


@contextlib.contextmanager
def compiling_for(device: torch.device) -> Iterator[None]:
    """Inside, kernels are compiled for this device and not launched, and tensors of the meta device count as its."""
    token = _compiled_for.set(device)
    try:
        yield
    finally:
        _compiled_for.reset(token)


def is_compiling() -> bool:
    """Whether kernels are only compiled; see `compiling_for`."""
    return _compiled_for.get() is not None


def own_device(device: torch.device) -> torch.device:
    """The device itself; for the meta device the one that kernels are compiled for, if any."""
    return (_compiled_for.get() or device) if device.type == "meta" else device


def computes_bf16(device: torch.device) -> bool:
    """Whether a device has instructions for products in bf16; a CPU of which PyTorch does not say so counts as one."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type != "cpu" or not known or any(has for name, has in known.items() if name.endswith("bf16"))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device; a host's to a GPU without waiting for it."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the host, of which PyTorch says it only in words."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on a device."""
    return _properties(own_device(device)).shared_memory_per_block_optin


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 for the interpreter's CPU."""
    device = own_device(device)
    return _properties(device).multi_processor_count if device.type == "cuda" else 1


def architecture(device: torch.device) -> str:
    """The row of a table of tiles: `"hopper"`, sm_90 and newer with over 200 KiB of shared memory; `"ampere"`, over 150
    KiB; `"small"`.
    """
    device = own_device(device)
    if device.type != "cuda":
        return "hopper"
    capability = _capability(device)
    available = shared_memory(device)
    if capability[0] >= 9 and available > 200 * 1024:
        return "hopper"
    return "ampere" if available > 150 * 1024 else "small"


def has_copy_engine(device: torch.device) -> bool:
    """Whether a device copies tiles of tensors by itself (TMA)."""
    return _generation(device) >= 9


def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel can start while the one before it still runs (programmatic dependent launch)."""
    return _generation(device) >= 9


def is_hopper(device: torch.device) -> bool:
    """Whether a device belongs to the one generation with Hopper's matrix units."""
    return _generation(device) == 9


def _generation(device: torch.device) -> int:
    """The major number of a CUDA device's capability; 0 for others."""
    device = own_device(device)
    return _capability(device)[0] if device.type == "cuda" else 0
