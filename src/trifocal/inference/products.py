"""PyTorch's products of a layer with its weights, with the calls of `trifocal.ops.decode.linear`.

They are the fastest for many rows. A prompt runs on them, whose rows belong to one sequence; decoding runs on the
others, whose sums do not depend on the number of rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from trifocal.ops.decode.linear import Norm, Residual


def embedding(tokens: Tensor, table: Tensor) -> Residual:
    """See `trifocal.ops.decode.linear.embedding`; `Residual.sum_of_squares` stays empty in all of these."""
    return _residual(functional.embedding(tokens, table))


def normed_linear(
    residual: Residual,
    norm: Norm | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    num_sigmoids: int = 0,
    out_dtype: torch.dtype | None = None,
    padding: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """See `trifocal.ops.decode.linear.normed_linear`; the last `padding` columns are left out."""
    out = functional.linear(_normed(residual, norm, weight.dtype), weight, bias)
    out = out[:, : out.shape[1] - padding]
    gates = None
    if num_sigmoids:
        gates = out[:, -num_sigmoids:].to(torch.promote_types(out.dtype, torch.float32)).sigmoid()
        out = out[:, :-num_sigmoids]
    return out.to(out_dtype or out.dtype), gates


def normed_swiglu(residual: Residual, norm: Norm, weight: Tensor) -> Tensor:
    """See `trifocal.ops.decode.linear.normed_swiglu`.

    Two products, not halves of one: with gaps between its rows the activation takes more than twice as long.
    """
    x = _normed(residual, norm, weight.dtype)
    gate, up = (functional.linear(x, half) for half in weight.chunk(2))
    return functional.silu(gate, inplace=True).mul_(up)


def residual_linear(
    x: Tensor, weight: Tensor, residual: Residual, bias: Tensor | None = None, *, next_norm: Norm | None = None
) -> Residual:
    """See `trifocal.ops.decode.linear.residual_linear`; the next norm waits for its own product."""
    return _residual(residual.x + functional.linear(x, weight, bias))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `trifocal.ops.decode.linear.linear`."""
    return functional.linear(x, weight, bias)


def by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function that treats the rows of its argument alike, to all at once."""
    return function(x)


def _residual(x: Tensor) -> Residual:
    return Residual(x, x[:, :0])


def _normed(residual: Residual, norm: Norm | None, dtype: torch.dtype) -> Tensor:
    if norm is None:
        return residual.x.to(dtype)
    return functional.rms_norm(residual.x, norm.weight.shape, norm.weight, norm.eps).to(dtype)
