"""Custom operators of torch that are left out where nothing looks at them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

# Operators accept any strides. Without this tag the compiler copies q once for each of them.
ANY_STRIDES = (torch.Tag.flexible_layout,)


class CustomOp:
    """A function as `torch.ops.trifocal.NAME`; in inference mode a call is the function's own.

    Nobody looks at operators there, and the first call of one imports PyTorch's compiler: two seconds, which a short
    command need not wait for. Where something looks (a compiler, a dispatch mode, a subclass of tensors), it sees the
    operator.

    Args:
        name: After `trifocal::`.
        function: Its first argument is a tensor.
        **rules: Of `torch.library.custom_op`.
    """

    def __init__(self, name: str, function: Callable[..., Any], **rules: Any) -> None:
        registered = torch.library.custom_op(f"trifocal::{name}", mutates_args=(), tags=ANY_STRIDES, **rules)(function)
        self._function, self._registered = function, registered
        self.register_fake, self.register_autograd = registered.register_fake, registered.register_autograd

    def __call__(self, x: Tensor, *others: Any) -> Any:
        """Run it."""
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return self._registered(x, *others)
        # Fake, distributed and other subclasses have rules of their own.
        if _get_current_dispatch_mode() is not None or type(x) is not Tensor:
            return self._registered(x, *others)
        return self._function(x, *others)


def custom_op(name: str, **rules: Any) -> Callable[[Callable[..., Any]], CustomOp]:
    """Make a function a `CustomOp`."""
    return lambda function: CustomOp(name, function, **rules)
