"""What the Hopper kernels of selected attention share: copies of blocks and of queries, numbers of rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

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
def load_block(x, shared, in_block, num_rows, row_stride, columns, FOR_NEIGHBOURS: gl.constexpr = False):
    """Copy the rows of a block into shared memory; zero behind the last."""
    pointers = x + in_block[:, None] * row_stride + columns[None, :]
    values = gl.load(pointers, mask=(in_block < num_rows)[:, None], other=0.0)
    shared.store(neighbours(values) if FOR_NEIGHBOURS else values)


@gluon.jit
def ask_for(x, query, head, shared, columns, time_stride, head_stride):
    """Start copying the heads of queries, rows of x, into shared memory."""
    offsets = query.to(gl.int64) * time_stride + head * head_stride
    async_copy.async_copy_global_to_shared(shared, x + offsets[:, None] + columns[None, :])
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


@gluon.jit
def neighbours(x):
    """The columns of x in another order, in which a product's accumulator has 8 neighbours of x's in each thread.

    Of the columns of a product a thread holds 8 i + 2 c and 8 i + 2 c + 1 for every i, c being its place in a quad. In
    this order those of four i were columns 32 j + 8 c to 32 j + 8 c + 7 of x. Doing it again undoes it: so the right
    factor's columns are put into this order once a block, and the product leaves for memory 16 bytes at a time, without
    a way through shared memory.
    """
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    quads = x.reshape([rows, columns // 32, 4, 4, 2]).permute([0, 1, 3, 2, 4])
    return quads.reshape([rows, columns])


@gluon.constexpr_function
def neighbours_layout(columns):
    """The layout of `neighbours` of an accumulator [64, columns], by register, lane and warp."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *([0, 2**n] for n in range(5, columns.bit_length() - 1))],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )
