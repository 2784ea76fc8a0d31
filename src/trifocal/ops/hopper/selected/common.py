"""Shared by the Hopper kernels of selected attention: copies of blocks and of queries, numbers of rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from trifocal.ops.hopper.common import async_load
from trifocal.ops.triton.common import LOG2_E_KERNEL


@gluon.jit
def exists_in(row, first, end, Q_PER_KV: gl.constexpr):
    """Whether rows of a tile have a slot: not behind the last, nor behind the last that fits into the tile."""
    STEP: gl.constexpr = 64 // Q_PER_KV
    exists = first + row // Q_PER_KV < end
    if STEP * Q_PER_KV < 64:
        exists = exists & (row < STEP * Q_PER_KV)
    return exists


@gluon.jit
def load_block(x, shared, in_block, num_rows, row_stride, columns):
    """Copy the rows of a block into shared memory; zero behind the last."""
    pointers = x + in_block[:, None] * row_stride + columns[None, :]
    values = gl.load(pointers, mask=(in_block < num_rows)[:, None], other=0.0)
    shared.store(values)


@gluon.jit
def ask_for(x, query, head, shared, columns, time_stride, head_stride):
    """Start copying the heads of queries, rows of x, into shared memory."""
    offsets = query.to(gl.int64) * time_stride + head * head_stride
    async_load(shared, x + offsets[:, None] + columns[None, :])
    async_copy.commit_group()


@gluon.jit
def row_numbers(lse, delta, gate, place, exists, GATED: gl.constexpr):
    """lse in base 2 (infinite where the row adds nothing), delta and gate of rows."""
    lse_2 = gl.load(lse + place) * LOG2_E_KERNEL
    lse_2 = gl.where((lse_2 == float("-inf")) | (exists == 0), float("inf"), lse_2)
    delta_row = gl.load(delta + place)
    gate_row = delta_row
    if GATED:
        gate_row = gl.load(gate + place).to(gl.float32)
    return lse_2, delta_row, gate_row
