"""The first call of its kind: every kernel of the whole attention, forward and backward, compiled at the same time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trifocal.ops.layout import Documents
from trifocal.ops.triton.launch import only_compile

_compiled: set[tuple[object, ...]] = set()


def precompile(
    run: Callable[..., None], device: torch.device, lengths: tuple[int, ...], kind: tuple[object, ...], given: Any
) -> None:
    """Compile the kernels that the call `run(*given)` is going to launch, unless one of its kind was compiled.

    Lengths (batch entries, queries, keys, and keys of the longest document) are of one kind up to the next power of
    two; `kind` has everything else that the kernels depend on. The call is made on the meta device; a kernel that it
    misses is compiled when it is launched.
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
        return Documents(*map(_meta, x))
    return tuple(map(_meta, x)) if isinstance(x, tuple) else x
