"""The first call of its kind: every kernel of the whole attention, forward and backward, compiled at the same time."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from trifocal.ops.layout import Documents
from trifocal.ops.triton.launch import only_compile

_compiled: set[tuple[object, ...]] = set()


@contextlib.contextmanager
def libraries_ahead(device: torch.device) -> Iterator[None]:
    """Load in threads, beside what the context does, what the first kernels of a process wait for.

    Triton hashes itself before its first kernel, for 0.4 s; the function has no public name, and without it nothing is
    lost but the time. PyTorch loads cuBLAS before its first product, which the end of the context waits for: nothing
    else may use the device while a step is recorded.

    Args:
        device: A CUDA device.
    """
    key = getattr(triton.runtime.cache, "triton_key", None)
    if key is not None:
        threading.Thread(target=key, name="hash of Triton").start()
    products = threading.Thread(target=_multiply, args=(device,), name="cuBLAS")
    products.start()
    try:
        yield
    finally:
        products.join()


def _multiply(device: torch.device) -> None:
    # Where this fails, what the command does next fails too, and says why.
    with contextlib.suppress(RuntimeError):
        matrix = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
        torch.mm(matrix, matrix)


def compile_once(
    run: Callable[..., None], device: torch.device, lengths: tuple[int, ...], kind: tuple[object, ...], given: Any
) -> None:
    """Compile the kernels that a call is going to launch, unless one of its kind was compiled.

    Lengths are of one kind up to the next power of two. The call is made on the meta device, without memory and
    without arithmetic; a kernel that it misses is compiled when it is launched.

    Args:
        run: Launches the kernels, with the arguments `given`.
        device: A CUDA device, the current one.
        lengths: Batch entries, queries and keys.
        kind: Everything else that the kernels depend on.
        given: Tensors, tuples of them, documents and None.
    """
    kind = (device, *(length.bit_length() for length in lengths), *kind)
    if kind in _compiled:
        return
    with torch.no_grad(), only_compile(device):
        run(*_meta(given))
    _compiled.add(kind)


def _meta(x: Any) -> Any:
    """The same without memory."""
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if isinstance(x, Documents):
        return Documents(*map(_meta, x[:3]))
    return tuple(map(_meta, x)) if isinstance(x, tuple) else x
