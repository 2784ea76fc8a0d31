"""Memory that the attention's kernels need: their launchers run on the meta device, which allocates nothing.

The launchers choose orders, chunks and buffers as in a real call. No kernel is compiled or launched. A call takes some
20 ms at any length, with or without a GPU. The meta device counts as one multiprocessor, so sums that many of them
would keep in parts are counted once: that part, some tens of MiB, is missed.
"""

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trifocal.nn.selected_attention import VALUE_COLUMNS
from trifocal.ops import Documents, Geometry
from trifocal.ops.pipeline import Stages, run_backward, run_stages

# A sort keeps a second copy of its results while it runs.
_SORTS = (torch.ops.aten.sort.default, torch.ops.aten.sort.stable)


@dataclass(frozen=True)
class KernelMemory:
    """Bytes that one layer's sparse attention needs while it runs.

    Attributes:
        forward: At the fullest moment of forward, beyond the outputs, log-sum-exps and choice that remain.
        backward: At the fullest moment of backward, beyond its inputs; gradients are included.
    """

    forward: int
    backward: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators make inside of it, until they are freed.

    Attributes:
        now: Bytes that live.
        peak: The most that lived at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.now
        results = func(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, Tensor):
                self.add(x)
        self.peak = max(self.peak, self.now + self.inside(func, args, self.now - before))
        return results

    def inside(self, func: Any, args: Any, made: int) -> int:
        """Bytes that an operator needs besides the `made` bytes of its results."""
        return made if func in _SORTS else 0

    def add(self, x: Tensor) -> None:
        """Count a tensor's storage, once."""
        storage = x.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@functools.cache
def kernel_memory(
    geometry: Geometry,
    batch: int,
    length: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    packed: bool = False,
    attention: str = "nsa",
    window_size: int = 0,
) -> KernelMemory:
    """Run the launchers of forward and backward on the meta device.

    Args:
        geometry: Block sizes, in tokens.
        batch: B.
        length: Queries and keys of a batch entry, T.
        num_heads: H.
        num_kv_heads: G.
        head_dim: D.
        value_dim: V.
        dtype: Of q, k and v.
        packed: Whether the tokens are packed documents.
        attention: `"nsa"`, `"selected"` or `"window"`.
        window_size: Of window attention alone; others have the geometry's.

    Raises:
        ImportError: If Triton is not installed.
    """
    from trifocal.ops.triton.combine import combine_forward
    from trifocal.ops.triton.interval.compressed import compressed_forward
    from trifocal.ops.triton.interval.window import window_backward, window_forward
    from trifocal.ops.triton.launch import no_launches
    from trifocal.ops.triton.scoring import select_blocks_forward
    from trifocal.ops.triton.selected.backward import selected_backward
    from trifocal.ops.triton.selected.forward import selected_forward

    empty = functools.partial(torch.empty, device="meta")
    num_blocks = length // geometry.compression_stride if packed else geometry.num_compressed_blocks(length)
    q = empty(batch, length, num_heads, head_dim, dtype=dtype)
    k_cmp, _, k_slc, v_slc, k_win, v_win = inputs = tuple(
        empty(batch, tokens, num_kv_heads, width, dtype=dtype)
        for tokens in (num_blocks, length, length)
        for width in (head_dim, value_dim)
    )
    documents = None
    if packed:
        borders, ids, positions = (empty(n, dtype=torch.int32) for n in (3, length, length))
        documents = Documents(borders, ids, positions)
    scale = head_dim**-0.5
    rest = (geometry, scale, documents)
    with torch.no_grad(), no_launches(), LiveBytes() as bytes_:
        if attention == "window":
            o, lse = window_forward(q, k_win, v_win, window_size, scale, documents)
        elif attention == "selected":
            few = k_cmp[..., :VALUE_COLUMNS]
            _, lse = compressed_forward(q, k_cmp, few, geometry, length, scale, documents)
            del _
            choice = select_blocks_forward(q, k_cmp, lse, geometry, length, scale, documents)
            o, lse = selected_forward(q, k_slc, v_slc, choice, *rest)
        else:
            gates = empty(batch, length, num_heads, 3)
            stages = Stages(compressed_forward, select_blocks_forward, selected_forward, window_forward)
            branches = run_stages(stages, q, inputs, gates, *rest, None)
            o = combine_forward(branches.o_cmp, branches.o_slc, branches.o_win, gates)
        forward, kept = bytes_.peak - bytes_.now, bytes_.now
        bytes_.peak = kept
        if attention == "window":
            window_backward(o, q, k_win, v_win, o, lse, window_size, scale, documents)
        elif attention == "selected":
            selected_backward(o, q, k_slc, v_slc, o, lse, choice, *rest)
        else:
            run_backward(o, q, branches, *rest)
        return KernelMemory(forward, bytes_.peak - kept)
