"""The blocks that a model chooses, seen from outside."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Choices(TorchDispatchMode):
    """Keeps the blocks that are chosen by compressed keys or an index while it is entered.

    Attributes:
        found: The choice of each call, [B, T, G, N].
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.trifocal.select_blocks.default, torch.ops.trifocal.select_blocks_by_index.default):
            self.found.append(result)
        return result
