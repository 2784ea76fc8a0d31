"""Costs of a step that do not depend on the machine: its operations, and the bytes that it stores for backward."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trifocal.ops import Documents, Geometry, reference


def stored_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that backward keeps alive, each storage once; parameters and inputs included."""
    storages: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # The tensor is kept, so that no other takes its address.
        storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(size for size, _ in storages.values())


def count_operations(step: Callable[[], object]) -> Counter[str]:
    """Operators that PyTorch's dispatcher sees, by name, also those inside of `select_blocks`, one operator to it."""
    with _OperationCounter() as counter:
        step()
    return counter.counts


class _OperationCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[str(func)] += 1
        if func is torch.ops.trifocal.select_blocks.default:
            q, k_cmp, lse, sizes, num_keys, scale, boundaries = args[:7]
            documents = None if boundaries is None else Documents.from_checked(boundaries, num_keys)
            with self:
                reference.select_blocks(q, k_cmp, lse, Geometry(*sizes), num_keys, scale, documents)
        return func(*args, **(kwargs or {}))
