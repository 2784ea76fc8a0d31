"""Shared by the Hopper kernels of selected attention: copies of blocks and of queries, numbers of rows, a loader."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from trifocal.ops.hopper.common import async_load, tma_load
from trifocal.ops.triton.common import LOG2_E_KERNEL

# Tokens of a block, the only size that these kernels take.
BLOCK = gl.constexpr(64)


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


@gluon.jit
def load_tile(
    count, visit, batch, group, tile, tokens, entries, sources, buffers, barriers,
    Q_PER_KV: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr, WITH_D_O: gl.constexpr,
):  # fmt: skip
    """The loader of a tile of 128 rows: k of its first block, q, in backward d_o, then v and k by turns."""
    q_source, k_source, v_source, d_o_source = sources
    q_tiles, k_tiles, v_tiles, d_o_tiles = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    following = gl.load(tokens)
    for entry in range(entries):
        token = following
        following = gl.load(tokens + gl.minimum(entry + 1, entries - 1))
        stage = count % STAGES
        free = (count // STAGES & 1) ^ 1
        mbarrier.wait(k_free.index(stage), free)
        mbarrier.expect(k_ready.index(stage), k_source.block_type.nbytes)
        tma_load(k_source, [batch, token, group, 0], k_ready.index(stage), k_tiles.index(stage))
        if entry == 0:
            for part in gl.static_range(2):
                query = (2 * tile + part) * QUERIES
                ready = q_ready.index(part)
                mbarrier.wait(q_free.index(part), (visit & 1) ^ 1)
                if WITH_D_O:
                    mbarrier.expect(ready, q_source.block_type.nbytes + d_o_source.block_type.nbytes)
                else:
                    mbarrier.expect(ready, q_source.block_type.nbytes)
                tma_load(q_source, [batch, query, group * Q_PER_KV, 0], ready, q_tiles.index(part))
                if WITH_D_O:
                    tma_load(d_o_source, [batch, query, group * Q_PER_KV, 0], ready, d_o_tiles.index(part))
        mbarrier.wait(v_free.index(stage), free)
        mbarrier.expect(v_ready.index(stage), v_source.block_type.nbytes)
        tma_load(v_source, [batch, token, group, 0], v_ready.index(stage), v_tiles.index(stage))
        count += 1
    return count
