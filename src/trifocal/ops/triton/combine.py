"""Gated combination of the branches, `o = sum over branches of gate * o_branch`, and its gradient: memory traffic only.

Backward writes, for each row (batch, position, head) and branch, `sum(d_o * o_branch)`: that number is the gate's
gradient, and the row sum that attention's backward subtracts (`delta`). Tiles are `ROWS` rows by all V.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.tiles import cdiv, next_power_of_2
from trifocal.ops.triton.common import unit_stride
from trifocal.ops.triton.launch import Kernel

ROWS = 32


@triton.jit
def _place(row, num_queries, HEADS: tl.constexpr):
    """Batch, position and head of rows: found in 32 bits, given in 64, for products with strides."""
    position = row // HEADS
    batch = position // num_queries
    query = position - batch * num_queries
    return batch.to(tl.int64), query.to(tl.int64), (row - position * HEADS).to(tl.int64)


@Kernel
@triton.jit(do_not_specialize=["num_rows", "num_queries", "gate_batch_stride", "gate_time_stride"])
def combine_forward_kernel(
    o_cmp, o_slc, o_win, gates, o, gate_batch_stride, gate_time_stride, gate_head_stride, gate_branch_stride, num_rows,
    num_queries, HEADS: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One tile of rows of o."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keep = row < num_rows
    batch, query, head = _place(row, num_queries, HEADS)
    rows = row.to(tl.int64)
    gate = gates + batch * gate_batch_stride + query * gate_time_stride + head * gate_head_stride
    gate_cmp = tl.load(gate, mask=keep, other=0.0).to(tl.float32)
    gate_slc = tl.load(gate + gate_branch_stride, mask=keep, other=0.0).to(tl.float32)
    gate_win = tl.load(gate + 2 * gate_branch_stride, mask=keep, other=0.0).to(tl.float32)
    columns = tl.arange(0, V_PAD)
    places = rows[:, None] * V + columns[None, :]
    inside = keep[:, None] & (columns < V)[None, :]
    mixed = gate_cmp[:, None] * tl.load(o_cmp + places, mask=inside, other=0.0).to(tl.float32)
    mixed += gate_slc[:, None] * tl.load(o_slc + places, mask=inside, other=0.0).to(tl.float32)
    mixed += gate_win[:, None] * tl.load(o_win + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(o + places, mixed.to(o.dtype.element_ty), mask=inside)


@Kernel
@triton.jit(do_not_specialize=["num_rows", "num_queries"])
def combine_backward_kernel(
    d_o, o_cmp, o_slc, o_win, delta, d_gates, d_o_batch_stride, d_o_time_stride, d_o_head_stride, num_rows, num_queries,
    HEADS: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Row sums of one tile of rows: delta, [3, rows], fp32, and the same numbers as d_gates, [rows, 3]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keep = row < num_rows
    batch, query, head = _place(row, num_queries, HEADS)
    rows = row.to(tl.int64)
    columns = tl.arange(0, V_PAD)
    places = rows[:, None] * V + columns[None, :]
    inside = keep[:, None] & (columns < V)[None, :]
    d_o_rows = batch * d_o_batch_stride + query * d_o_time_stride + head * d_o_head_stride
    d_o_tile = tl.load(d_o + d_o_rows[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    delta_cmp = tl.sum(d_o_tile * tl.load(o_cmp + places, mask=inside, other=0.0).to(tl.float32), 1)
    delta_slc = tl.sum(d_o_tile * tl.load(o_slc + places, mask=inside, other=0.0).to(tl.float32), 1)
    delta_win = tl.sum(d_o_tile * tl.load(o_win + places, mask=inside, other=0.0).to(tl.float32), 1)
    tl.store(delta + rows, delta_cmp, mask=keep)
    tl.store(delta + num_rows + rows, delta_slc, mask=keep)
    tl.store(delta + num_rows + (num_rows + rows), delta_win, mask=keep)
    tl.store(d_gates + 3 * rows, delta_cmp.to(d_gates.dtype.element_ty), mask=keep)
    tl.store(d_gates + 3 * rows + 1, delta_slc.to(d_gates.dtype.element_ty), mask=keep)
    tl.store(d_gates + 3 * rows + 2, delta_win.to(d_gates.dtype.element_ty), mask=keep)


@Kernel
@triton.jit(do_not_specialize=["num_rows", "num_queries", "d_lse_batch_stride", "d_lse_time_stride"])
def row_sums_kernel(
    d_o, o, d_lse, delta, d_o_batch_stride, d_o_time_stride, d_o_head_stride, d_lse_batch_stride, d_lse_time_stride,
    d_lse_head_stride, num_rows, num_queries, HAS_D_LSE: tl.constexpr, HEADS: tl.constexpr, V: tl.constexpr,
    V_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Row sums of `d_o * o`, less the gradient of lse, for one tile of rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keep = row < num_rows
    batch, query, head = _place(row, num_queries, HEADS)
    rows = row.to(tl.int64)
    columns = tl.arange(0, V_PAD)
    inside = keep[:, None] & (columns < V)[None, :]
    d_o_rows = batch * d_o_batch_stride + query * d_o_time_stride + head * d_o_head_stride
    d_o_tile = tl.load(d_o + d_o_rows[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    o_tile = tl.load(o + rows[:, None] * V + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(d_o_tile * o_tile, 1)
    if HAS_D_LSE:
        d_lse_rows = batch * d_lse_batch_stride + query * d_lse_time_stride + head * d_lse_head_stride
        total -= tl.load(d_lse + d_lse_rows, mask=keep, other=0.0).to(tl.float32)
    tl.store(delta + rows, total, mask=keep)


def combine_forward(o_cmp: Tensor, o_slc: Tensor, o_win: Tensor, gates: Tensor) -> Tensor:
    """Mix the branches: `gates` [B, T, H, 3] in the order cmp, slc, win; outputs contiguous, [B, T, H, V]."""
    o = torch.empty_like(o_cmp)
    combine_forward_kernel[_grid(o)](o_cmp, o_slc, o_win, gates, o, *gates.stride(), *_rows(o), **_constants(o))
    return o


def combine_backward(
    d_o: Tensor, o_cmp: Tensor, o_slc: Tensor, o_win: Tensor, gate_type: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradient of the gates [B, T, H, 3], and of each branch `sum(d_o * o_branch)`, [3, B, T, H], fp32, from d_o and
    contiguous outputs [B, T, H, V].
    """
    d_o = unit_stride(d_o)
    d_gates = o_cmp.new_empty(*o_cmp.shape[:3], 3, dtype=gate_type)
    delta = o_cmp.new_empty(3, *o_cmp.shape[:3], dtype=torch.float32)
    combine_backward_kernel[_grid(o_cmp)](
        d_o, o_cmp, o_slc, o_win, delta, d_gates, *d_o.stride()[:3], *_rows(o_cmp), **_constants(o_cmp)
    )
    return d_gates, delta


def row_sums(d_o: Tensor, o: Tensor, d_lse: Tensor | None = None) -> Tensor:
    """Row sums of `d_o * o` less `d_lse`, [B, T, H], fp32, which a softmax's gradient subtracts. o is contiguous."""
    d_o = unit_stride(d_o)
    delta = o.new_empty(o.shape[:3], dtype=torch.float32)
    d_lse_strides = (0, 0, 0) if d_lse is None else d_lse.stride()
    row_sums_kernel[_grid(o)](
        d_o, o, d_lse, delta, *d_o.stride()[:3], *d_lse_strides, *_rows(o), HAS_D_LSE=d_lse is not None, **_constants(o)
    )
    return delta


def _grid(o: Tensor) -> tuple[int]:
    return (cdiv(_rows(o)[0], ROWS),)


def _rows(o: Tensor) -> tuple[int, int]:
    """Rows in all, and queries of one batch entry."""
    batch, num_queries, num_heads, _ = o.shape
    return batch * num_queries * num_heads, num_queries


def _constants(o: Tensor) -> dict[str, int]:
    num_heads, value_dim = o.shape[2:]
    return {"HEADS": num_heads, "V": value_dim, "V_PAD": next_power_of_2(value_dim), "ROWS": ROWS}
