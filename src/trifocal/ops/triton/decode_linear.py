"""Products of a few rows with a layer's weights, for decoding: a row's bits do not depend on the other rows.

A library of products chooses its kernel by the number of rows, and with it the order of each sum. Here a tile has 16
rows, the least that a matrix instruction takes, whether one or all of them are used. Rows that are missing cost little,
because a product of few rows takes as long as reading its weights; of many rows, programs with the same weights run
next to one another.

A decode step is a chain of short kernels, so each of them takes its neighbours along:

| call | reads | before the product | after it |
|---|---|---|---|
| `normed_linear` | the residual stream | RMS norm | bias; the last columns through a sigmoid, in fp32 |
| `normed_swiglu` | the residual stream | RMS norm | `silu(gate) * up` of two products |
| `residual_linear` | a branch's output | | bias, sum with the residual stream, sums of squares |

A norm needs the mean square of a whole row, which no tile of columns has. So the kernel that writes the residual stream
also writes the sum of squares of each of its tiles, and the next one adds them up, in order. It scales the product by
the root, not the row before the product: what a program needs after its loop it asks for before it, and the weights do
not wait for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import devices
from trifocal.ops.triton.common import add_product, nothing_lost
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.tiles import cdiv, next_power_of_2

_ROWS = 16
_WARPS = 2
# From this number of rows on a tile is wide in any case.
_MANY_ROWS = 64
# Tiles of columns get wider from this number of programs on: two for each multiprocessor of the largest devices.
_ENOUGH_PROGRAMS = 264
_WIDTHS = (16, 32, 64, 128)


@triton.jit
def load_columns(pointers, inside, MASKED: tl.constexpr):
    """Load a tile; zero where not inside, if it can reach beyond."""
    if MASKED:
        tile = tl.load(pointers, mask=inside, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@Kernel
@triton.jit(do_not_specialize=["num_rows"])
def decode_linear_kernel(
    x, squares, norm_weight, weight, bias, residual, out, sigmoids, out_squares, x_stride, num_rows, eps,
    K: tl.constexpr, N: tl.constexpr, SIGMOIDS_FROM: tl.constexpr, SQUARES: tl.constexpr, SQUARES_PAD: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One tile of `x W^T`: ROWS rows and COLUMNS columns; with SWIGLU of both halves of W."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_exists, column_exists = row < num_rows, column < N
    # Short code starts sooner: what does not exist reads a neighbour instead of being masked, and is not stored.
    known_row, known_column = tl.minimum(row, num_rows - 1), tl.minimum(column, N - 1)
    x_rows = x + known_row.to(tl.int64)[:, None] * x_stride
    # W^T: consecutive numbers of a row of W are consecutive along K.
    weights = weight + known_column.to(tl.int64)[None, :] * K
    keep_out = row_exists[:, None] & column_exists[None, :]
    place = row.to(tl.int64)[:, None] * N + column[None, :]
    parts = tl.zeros([ROWS, SQUARES_PAD], tl.float32)
    if NORM:
        part = tl.arange(0, SQUARES_PAD)
        parts = tl.load(
            squares + known_row[:, None] * SQUARES + part[None, :], mask=(part < SQUARES)[None, :], other=0.0
        )
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    before = total
    if RESIDUAL:
        before = tl.load(residual + place, mask=keep_out, other=0.0).to(tl.float32)
    if BIAS:
        added = tl.load(bias + known_column).to(tl.float32)
    total_up = total
    lost = nothing_lost(total, tl.zeros([1], weight.dtype.element_ty))
    lost_up = lost
    for first in tl.range(0, K, STEP):
        k = first + tl.arange(0, STEP)
        tile = load_columns(x_rows + k[None, :], (k < K)[None, :], K % STEP > 0)
        if NORM:
            scale = load_columns(norm_weight + k, k < K, K % STEP > 0).to(tl.float32)
            tile = (tile.to(tl.float32) * scale[None, :]).to(weight.dtype.element_ty)
        columns = load_columns(weights + k[:, None], (k < K)[:, None], K % STEP > 0)
        total, lost = add_product(total, lost, tile, columns)
        if SWIGLU:
            columns = load_columns(weights + N * K + k[:, None], (k < K)[:, None], K % STEP > 0)
            total_up, lost_up = add_product(total_up, lost_up, tile, columns)
    if NORM:
        root = tl.rsqrt(tl.sum(parts, 1) / K + eps)[:, None]
        total *= root
        total_up *= root
    if BIAS:
        total += added[None, :]
    # Rounded where PyTorch rounds: the output of a product has the type of its weights.
    product = total.to(weight.dtype.element_ty).to(tl.float32)
    if SWIGLU:
        gated = (product / (1.0 + tl.exp(-product))).to(weight.dtype.element_ty).to(tl.float32)
        product = gated * total_up.to(weight.dtype.element_ty).to(tl.float32)
    if RESIDUAL:
        product += before
        tile_squares = tl.sum(tl.where(keep_out, product * product, 0.0), 1)
        tl.store(out_squares + row * tl.num_programs(1) + tl.program_id(1), tile_squares, mask=row_exists)
    if SIGMOIDS_FROM < N:
        is_sigmoid = (column >= SIGMOIDS_FROM)[None, :]
        gate_place = row[:, None] * (N - SIGMOIDS_FROM) + (column - SIGMOIDS_FROM)[None, :]
        tl.store(sigmoids + gate_place, 1.0 / (1.0 + tl.exp(-product)), mask=keep_out & is_sigmoid)
        keep_out = keep_out & (is_sigmoid == 0)
        place = row.to(tl.int64)[:, None] * SIGMOIDS_FROM + column[None, :]
    tl.store(out + place, product.to(out.dtype.element_ty), mask=keep_out)


@Kernel
@triton.jit
def decode_embedding_kernel(tokens, table, out, out_squares, vocab_size, E: tl.constexpr, E_PAD: tl.constexpr):
    """One token's embedding in the residual stream's type, and its sum of squares."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, E_PAD)
    token = tl.load(tokens + row).to(tl.int64)
    # A token outside of the table would read beyond it; the caller sees NaN instead.
    exists = (token >= 0) & (token < vocab_size)
    x = tl.load(table + token * E + column, mask=exists & (column < E), other=float("nan")).to(tl.float32)
    x = tl.where(column < E, x, 0.0)
    tl.store(out + row * E + column, x, mask=column < E)
    tl.store(out_squares + row, tl.sum(x * x, 0))


def embedding(tokens: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings [M, E] of tokens [M] in fp32, and their sums of squares [M, 1]; see `ops.decode_linear`."""
    rows, width = tokens.shape[0], table.shape[1]
    out = torch.empty(rows, width, dtype=torch.float32, device=table.device)
    squares = torch.empty(rows, 1, dtype=torch.float32, device=table.device)
    decode_embedding_kernel[(rows,)](
        tokens, table, out, squares, table.shape[0], E=width, E_PAD=next_power_of_2(width), num_warps=4
    )
    return out, squares


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: tuple[Tensor, Tensor, float] | None = None,
    residual: Tensor | None = None,
    num_sigmoids: int = 0,
    swiglu: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`x W^T` and what goes with it; see the table above.

    Args:
        x: [M, K], rows contiguous.
        weight: [N, K], contiguous; with `swiglu` [2 N, K], the gate's rows first.
        bias: [N], or None.
        norm: The norm's weight [K], the sums of squares [M, parts] of x, and epsilon.
        residual: [M, N], fp32; the result is added to it.
        num_sigmoids: Last columns that go through a sigmoid.
        swiglu: Whether to multiply two products.

    Returns:
        The result, [M, N - num_sigmoids], in the weights' type, fp32 with `residual`; then the sigmoids
        [M, num_sigmoids] or the sums of squares [M, tiles] in fp32, or None.
    """
    rows, depth = x.shape
    width = weight.shape[0] // (2 if swiglu else 1)
    narrow = next((size for size in _WIDTHS if cdiv(width, size) <= _ENOUGH_PROGRAMS), _WIDTHS[-1])
    # With many rows wide tiles read x less often. The sums of squares are of tiles, so their width stays.
    columns = narrow if rows <= _MANY_ROWS or residual is not None else max(narrow, 64)
    tiles = cdiv(width, columns)
    dtype = weight.dtype if residual is None else torch.float32
    out = torch.empty(rows, width - num_sigmoids, dtype=dtype, device=x.device)
    extra = None
    if residual is not None:
        extra = torch.empty(rows, tiles, dtype=torch.float32, device=x.device)
    elif num_sigmoids:
        extra = torch.empty(rows, num_sigmoids, dtype=torch.float32, device=x.device)
    norm_weight, squares, eps = norm or (x, x, 0.0)
    parts = squares.shape[1] if norm else 1
    decode_linear_kernel[(cdiv(rows, _ROWS), tiles)](
        x, squares, norm_weight, weight, weight if bias is None else bias, x if residual is None else residual,
        out, out if extra is None else extra, out if extra is None else extra, x.stride(0), rows, eps,
        K=depth, N=width, SIGMOIDS_FROM=width - num_sigmoids, SQUARES=parts, SQUARES_PAD=next_power_of_2(parts),
        NORM=norm is not None, BIAS=bias is not None, SWIGLU=swiglu, RESIDUAL=residual is not None,
        ROWS=_ROWS, COLUMNS=columns, STEP=_step(depth, weight.element_size()),
        num_warps=_WARPS, num_stages=_stages(x.device, columns * (2 if swiglu else 1)),
    )  # fmt: skip
    return out, extra


def _stages(device: torch.device, columns: int) -> int:
    """Depth of the pipeline of loads that fits shared memory beside the tile of x."""
    if devices.architecture(device) == "small":
        return 2
    return 6 if columns <= 32 else 4 if columns <= 128 else 3


def _step(depth: int, element_size: int) -> int:
    """Numbers of K at a time, by the weights alone: long steps that divide it, if any do."""
    longest = 256 // element_size
    return next((step for step in (longest, longest // 2, longest // 4) if depth % step == 0), longest)
