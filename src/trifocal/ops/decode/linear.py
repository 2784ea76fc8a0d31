"""The linear layers of a decode step: a row's bits do not depend on the other rows, nor on how many there are.

M rows are the new tokens of all sequences; E is the width of the residual stream. Weights have the type of the
products; the residual stream, norms and gates are in fp32. The kernels take what `dispatch` lets them; the reference
takes each row by itself.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trifocal.ops import dispatch


class Residual(NamedTuple):
    """The residual stream x [M, E] between two kernels, in fp32 (fp64 on the reference for fp64 weights).

    `sum_of_squares` of each row is in parts that the next norm adds up, [M, parts]. `scaled` is x times the next norm's
    weight in the type of the products, [M, E], where a kernel was told that norm.
    """

    x: Tensor
    sum_of_squares: Tensor
    scaled: Tensor | None = None


class Norm(NamedTuple):
    """An RMS norm: its weight [E], and the epsilon that is added to the mean square."""

    weight: Tensor
    eps: float


def embedding(
    tokens: Tensor,
    table: Tensor,
    backend: dispatch.Backend = "auto",
    *,
    next_norm: Norm | None = None,
    dtype: torch.dtype | None = None,
) -> Residual:
    """The residual stream of tokens [M] from a table [vocab, E], with what the next norm's product reads, in `dtype`,
    as of `residual_linear`. An unknown token gives a row of NaN on the kernels and an IndexError on the reference.
    """
    if _runs_kernels(table, backend):
        return Residual(*_kernels().embedding(tokens, table, next_norm and (next_norm.weight, dtype or table.dtype)))
    x = functional.embedding(tokens, table).to(_exact(table.dtype))
    return Residual(x, _squares(x))


def normed_linear(
    residual: Residual,
    norm: Norm | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    num_sigmoids: int = 0,
    out_dtype: torch.dtype | None = None,
    backend: dispatch.Backend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`norm(x) W^T + bias`, for the stream [M, E] and weight [N, E] -> [M, N - num_sigmoids] and, in fp32, the gates
    [M, num_sigmoids] or None.

    Without a norm the stream goes into the product as it is, in the weights' type. The gates are the last columns,
    after a sigmoid in fp32. The result is rounded to the weights' type first, then to `out_dtype`.
    """
    if _runs_kernels(weight, backend):
        return _kernels().linear(  # type: ignore[no-any-return]
            _scaled(residual, norm, weight.dtype),
            weight,
            bias,
            norm=norm and (residual.sum_of_squares, norm.eps),
            num_sigmoids=num_sigmoids,
            out_dtype=out_dtype,
        )[:2]
    out = _linear(_normed(residual, norm, weight.dtype), weight, bias)
    gates = None
    if num_sigmoids:
        gates = by_row(torch.sigmoid, out[:, -num_sigmoids:].to(_exact(out.dtype)))
        out = out[:, :-num_sigmoids].contiguous()
    return out.to(out_dtype or out.dtype), gates


def normed_swiglu(residual: Residual, norm: Norm, weight: Tensor, backend: dispatch.Backend = "auto") -> Tensor:
    """`silu(norm(x) W_gate^T) * norm(x) W_up^T`: weight [2 * hidden, E], the gate's rows first -> [M, hidden]."""
    if _runs_kernels(weight, backend):
        return _kernels().linear(
            _scaled(residual, norm, weight.dtype), weight, None, norm=(residual.sum_of_squares, norm.eps), swiglu=True
        )[0]  # type: ignore[no-any-return]
    gate, up = _linear(_normed(residual, norm, weight.dtype), weight, None).chunk(2, dim=-1)
    return by_row(functional.silu, gate) * up


def residual_linear(
    x: Tensor,
    weight: Tensor,
    residual: Residual,
    bias: Tensor | None = None,
    *,
    next_norm: Norm | None = None,
    backend: dispatch.Backend = "auto",
) -> Residual:
    """The residual stream plus `x W^T + bias`, x [M, K], weight [E, K]; the kernel writes what `next_norm` reads."""
    if _runs_kernels(weight, backend):
        scale = next_norm and (next_norm.weight, weight.dtype)
        return Residual(*_kernels().linear(x, weight, bias, residual=residual.x, next_norm=scale))
    out = residual.x + _linear(x, weight, bias)
    return Residual(out, _squares(out))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, backend: dispatch.Backend = "auto") -> Tensor:
    """Only `x W^T + bias`: x [M, K], weight [N, K] -> [M, N] in the weights' type."""
    if _runs_kernels(weight, backend):
        return _kernels().linear(x, weight, bias)[0]  # type: ignore[no-any-return]
    return _linear(x, weight, bias)


def by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of alike rows, [M, *] -> [M, *], on a CPU row by row: PyTorch rounds otherwise where a vector ends."""
    return function(x) if x.is_cuda else torch.cat([function(row) for row in x.split(1)])


def _runs_kernels(weight: Tensor, backend: dispatch.Backend) -> bool:
    return dispatch.resolve("decode_linear", backend, weight, None, None) == "triton"


def _kernels():  # type: ignore[no-untyped-def]
    # Importing it imports Triton.
    from trifocal.ops.decode.triton import linear as kernels

    return kernels


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _scaled(residual: Residual, norm: Norm | None, dtype: torch.dtype) -> Tensor:
    """What the kernel of a product behind a norm reads; it multiplies by the root of the mean square itself."""
    if norm is None:
        return residual.x.to(dtype)
    return (residual.x * norm.weight).to(dtype) if residual.scaled is None else residual.scaled


def _squares(x: Tensor) -> Tensor:
    return _row_by_row(lambda row: row.square().sum(-1, keepdim=True), x)


def _normed(residual: Residual, norm: Norm | None, dtype: torch.dtype) -> Tensor:
    if norm is None:
        return residual.x.to(dtype)
    mean = _row_by_row(lambda row: row.sum(-1, keepdim=True), residual.sum_of_squares) / residual.x.shape[1]
    return (residual.x * (mean + norm.eps).rsqrt() * norm.weight.to(residual.x.dtype)).to(dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _row_by_row(lambda row: functional.linear(row, weight, bias), x)


def _row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function with sums, row by row, each in its own memory: their order in a library depends on the number of
    rows and on where they begin."""
    return torch.cat([function(row.clone()) for row in x.split(1)])
