"""The products of a layer with its weights, in two ways with the same calls.

`BatchInvariantLinear` gives a row the same bits whatever other rows there are: decoding runs on it. `PyTorchLinear` is
PyTorch's, the fastest for many rows; a prompt runs on it, whose rows belong to one sequence anyway.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from trifocal.ops.decode import linear as decode_linear
from trifocal.ops.decode.linear import Norm, Residual


class BatchInvariantLinear:
    """The products of `trifocal.ops.decode.linear`."""

    def embedding(self, tokens: Tensor, table: Tensor) -> Residual:
        """See `decode_linear.embedding`."""
        return decode_linear.embedding(tokens, table)

    def normed_linear(
        self,
        residual: Residual,
        norm: Norm | None,
        weight: Tensor,
        bias: Tensor | None = None,
        num_sigmoids: int = 0,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See `decode_linear.normed_linear`."""
        return decode_linear.normed_linear(residual, norm, weight, bias, num_sigmoids=num_sigmoids, out_dtype=out_dtype)

    def normed_swiglu(self, residual: Residual, norm: Norm, weight: Tensor) -> Tensor:
        """See `decode_linear.normed_swiglu`."""
        return decode_linear.normed_swiglu(residual, norm, weight)

    def residual_linear(self, x: Tensor, weight: Tensor, residual: Residual, bias: Tensor | None = None) -> Residual:
        """See `decode_linear.residual_linear`."""
        return decode_linear.residual_linear(x, weight, residual, bias)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x W^T + bias`, [..., inputs] -> [..., outputs]."""
        return decode_linear.linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])

    def by_row(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply a function that treats the rows of its argument alike, [rows, *] -> [rows, *]."""
        return decode_linear.by_row(function, x)


class PyTorchLinear:
    """PyTorch's products, whose sums depend on the number of rows; `Residual.sum_of_squares` stays empty."""

    def embedding(self, tokens: Tensor, table: Tensor) -> Residual:
        """See `BatchInvariantLinear.embedding`."""
        return self._residual(functional.embedding(tokens, table))

    def normed_linear(
        self,
        residual: Residual,
        norm: Norm | None,
        weight: Tensor,
        bias: Tensor | None = None,
        num_sigmoids: int = 0,
        out_dtype: torch.dtype | None = None,
        padding: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """See `BatchInvariantLinear.normed_linear`; the last `padding` columns are left out."""
        out = functional.linear(self._normed(residual, norm, weight.dtype), weight, bias)
        out = out[:, : len(weight) - padding]
        gates = None
        if num_sigmoids:
            gates = out[:, -num_sigmoids:].to(torch.promote_types(out.dtype, torch.float32)).sigmoid()
            out = out[:, :-num_sigmoids]
        return out.to(out_dtype or out.dtype), gates

    def normed_swiglu(self, residual: Residual, norm: Norm, weight: Tensor) -> Tensor:
        """See `BatchInvariantLinear.normed_swiglu`."""
        gate, up = functional.linear(self._normed(residual, norm, weight.dtype), weight).chunk(2, dim=-1)
        return functional.silu(gate) * up

    def residual_linear(self, x: Tensor, weight: Tensor, residual: Residual, bias: Tensor | None = None) -> Residual:
        """See `BatchInvariantLinear.residual_linear`."""
        return self._residual(residual.x + functional.linear(x, weight, bias))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `BatchInvariantLinear.linear`."""
        return functional.linear(x, weight, bias)

    def by_row(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """See `BatchInvariantLinear.by_row`, all rows at once."""
        return function(x)

    @staticmethod
    def _residual(x: Tensor) -> Residual:
        return Residual(x, x[:, :0])

    @staticmethod
    def _normed(residual: Residual, norm: Norm | None, dtype: torch.dtype) -> Tensor:
        if norm is None:
            return residual.x.to(dtype)
        return functional.rms_norm(residual.x, norm.weight.shape, norm.weight, norm.eps).to(dtype)


Products = BatchInvariantLinear | PyTorchLinear
"""Either of them."""
