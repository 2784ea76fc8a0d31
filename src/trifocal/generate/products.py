"""The products of a layer with its weights, with the norm before, SwiGLU or the sum with the residual stream after.

`RowProducts` gives a row the same bits whatever other rows there are: decoding runs on it. `MatrixProducts` runs a
prompt, whose rows belong to one sequence anyway.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


class MatrixProducts:
    """PyTorch's products: the fastest for many rows, with sums whose order depends on their number.

    Weights are in the type of the products, [outputs, inputs]. Norms and the residual stream are in fp32, or fp64.
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b, [..., inputs] -> [..., outputs], in the type of `weight`."""
        return functional.linear(x, weight, bias)

    def by_row(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply a function that treats the rows of its argument alike, [rows, *] -> [rows, *]."""
        return function(x)

    def norm_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """The product of the normed residual stream."""
        return self.linear(_normed(x, norm_weight, eps, weight.dtype), weight, bias)

    def norm_swiglu(self, x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> Tensor:
        """`silu(gate) * up` of the normed residual stream; the weight holds gate and up, one above the other."""
        gate_up = self.linear(_normed(x, norm_weight, eps, gate_up_weight.dtype), gate_up_weight)
        return self.by_row(_swiglu, gate_up.flatten(0, -2)).view(*x.shape[:-1], -1)

    def add_linear(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The residual stream plus a product."""
        return residual + self.linear(x, weight)


class RowProducts(MatrixProducts):
    """Products whose bits do not depend on the number of rows: PyTorch's, one row at a time."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `MatrixProducts.linear`."""
        rows = [functional.linear(row, weight, bias) for row in x.flatten(0, -2)]
        return torch.stack(rows).view(*x.shape[:-1], -1)

    def by_row(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """As `MatrixProducts.by_row`: where a vector ends, PyTorch's functions round differently on a CPU."""
        return torch.cat([function(row) for row in x.split(1)])


def _normed(x: Tensor, norm_weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return functional.rms_norm(x, norm_weight.shape, norm_weight, eps).to(dtype)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
