"""Hopper version of `triton.selected.tile_d_q`, in Gluon; `interval.d_q` divides its programs in the same way.

Each half of the warps holds 64 rows of q, d_o and d_q, the heads of a few neighbouring queries. The loader brings the
blocks of a tile's list; a half leaves out those that none of its own queries chose. From memory, per tile of rows: q
and d_o once, k and v of the listed blocks, d_q out. Where a group's heads are no power of two, the rows behind them
take the next group's heads, and are not stored.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from trifocal.ops import devices
from trifocal.ops.hopper.common import PART_ROWS, tile_descriptor
from trifocal.ops.hopper.interval.common import make_barriers
from trifocal.ops.hopper.selected.common import BLOCK, load_tile
from trifocal.ops.tiles import cdiv
from trifocal.ops.triton.common import LOG2_E_KERNEL
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.selected.common import SelectedProblem
from trifocal.ops.triton.selected.tile_lists import TileLists

# Blocks of keys, and of values, in shared memory.
STAGES = gl.constexpr(3)

# fmt: off

@gluon.jit
def place_tile(slot, lists, counts, GROUPS: gl.constexpr):
    """Batch, group and number of the slot-th tile, late ones first; its list; entries to mask, and all."""
    tokens, members, entries, width = lists
    slots, row_tiles, batch_groups, num_queries = counts
    tile = row_tiles - 1 - slot // batch_groups
    batch_group = slot % batch_groups
    number = batch_group.to(gl.int64) * row_tiles + tile
    masked = gl.load(entries + number * 2)
    end = gl.load(entries + number * 2 + 1)
    first = number * width
    return batch_group // GROUPS, batch_group % GROUPS, tile, tokens + first, members + first, masked, end


@gluon.jit
def load_blocks(
    descriptors, buffers, barriers, lists, counts,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, HEADS: gl.constexpr,
):
    """The loader: all that each tile reads."""
    QUERIES: gl.constexpr = PART_ROWS // HEADS
    count = 0
    visit = 0
    for slot in range(gl.program_id(0), counts[0], gl.num_programs(0)):
        batch, group, tile, tokens, _members, _masked, end = place_tile(slot, lists, counts, GROUPS)
        count = load_tile(
            count, visit, batch, group, tile, tokens, end, descriptors, buffers, barriers,
            Q_PER_KV, QUERIES, STAGES, True)
        visit += 1


@gluon.jit
def gather_rows(
    d_q, count, rows, buffers, barriers, tokens, members, start, stop, end, score_scale,
    PART: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr,
    MASKED: gl.constexpr, SCORES: gl.constexpr, OUTPUT: gl.constexpr,
):
    """Add the shares of the entries from start to stop to d_q."""
    QUERIES: gl.constexpr = PART_ROWS // HEADS
    row_bit, row_token, row_lse, row_delta, row_gate = rows
    q_tiles, k_tiles, v_tiles, d_o_tiles = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    q_tile = q_tiles.index(PART).reshape([PART_ROWS, D])
    d_o_tile = d_o_tiles.index(PART).reshape([PART_ROWS, V])
    following = gl.load(members + gl.minimum(start, end - 1))
    for entry in range(start, stop):
        chosen = following
        if MASKED:
            first_key = gl.load(tokens + entry)
        following = gl.load(members + gl.minimum(entry + 1, end - 1))
        stage = count % STAGES
        phase = count // STAGES & 1
        mbarrier.wait(k_ready.index(stage), phase)
        if ((chosen >> (PART * QUERIES)) & ((1 << QUERIES) - 1)) == 0:
            mbarrier.wait(v_ready.index(stage), phase)
            mbarrier.arrive(v_free.index(stage), count=1)
            mbarrier.arrive(k_free.index(stage), count=1)
        else:
            k_tile = k_tiles.index(stage).reshape([BLOCK, D])
            v_tile = v_tiles.index(stage).reshape([BLOCK, V])
            zeros = gl.zeros([PART_ROWS, BLOCK], gl.float32, SCORES)
            scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_ready.index(stage), phase)
            d_p = warpgroup_mma(d_o_tile, v_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, [scores])
            lse_here = gl.where(((chosen >> row_bit) & 1) != 0, row_lse, float("inf"))
            p = gl.exp2(scores * score_scale - lse_here[:, None])
            if GATED:
                p = p * row_gate[:, None]
            d_p = warpgroup_mma_wait(0, [d_p])
            mbarrier.arrive(v_free.index(stage), count=1)
            d_scores = p * (d_p - row_delta[:, None])
            if MASKED:
                key = first_key + gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
                d_scores = gl.where(key[None, :] <= row_token[:, None], d_scores, 0.0)
            operand = gl.convert_layout(d_scores.to(v_tiles.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
            d_q = warpgroup_mma(operand, k_tile, d_q, is_async=True)
            d_q = warpgroup_mma_wait(0, [d_q])
            mbarrier.arrive(k_free.index(stage), count=1)
        count += 1
    return d_q, count


@gluon.jit
def sum_rows(
    PART: gl.constexpr, lse, delta, gate, d_q_target, buffers, barriers, lists, counts, query_shift, scale, score_scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
    GATED: gl.constexpr,
):
    """d_q of one half of each tile of rows."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    QUERIES: gl.constexpr = PART_ROWS // HEADS
    slots, row_tiles, batch_groups, num_queries = counts
    q_tiles, k_tiles, v_tiles, d_o_tiles = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    row = gl.arange(0, PART_ROWS, gl.SliceLayout(1, SCORES))
    count = 0
    visit = 0
    for slot in range(gl.program_id(0), slots, gl.num_programs(0)):
        batch, group, tile, tokens, members, masked, end = place_tile(slot, lists, counts, GROUPS)
        first_query = (2 * tile + PART) * QUERIES
        query = gl.minimum(first_query + row // HEADS, num_queries - 1)
        head = gl.minimum(row % HEADS, Q_PER_KV - 1)
        place = (batch * num_queries + query).to(gl.int64) * (GROUPS * Q_PER_KV) + group * Q_PER_KV + head
        row_lse = gl.load(lse + place)
        nothing = (row_lse == float("-inf")) | (row % HEADS >= Q_PER_KV)
        row_lse = gl.where(nothing, float("inf"), row_lse * LOG2_E_KERNEL)
        row_delta = gl.load(delta + place)
        row_gate = row_delta
        if GATED:
            row_gate = gl.load(gate + place).to(gl.float32)
        rows = (PART * QUERIES + row // HEADS, query + query_shift, row_lse, row_delta, row_gate)
        d_q = gl.zeros([PART_ROWS, D], gl.float32, OUTPUT)
        mbarrier.wait(q_ready.index(PART), visit & 1)
        bounds = (0, masked, end)
        for run in gl.static_range(2):
            d_q, count = gather_rows(
                d_q, count, rows, buffers, barriers, tokens, members, bounds[run], bounds[run + 1], end, score_scale,
                PART, HEADS, D, V, GATED, run == 0, SCORES, OUTPUT)
        mbarrier.arrive(q_free.index(PART), count=1)
        out_row = gl.arange(0, PART_ROWS, gl.SliceLayout(1, OUTPUT))
        exists = (first_query + out_row // HEADS < num_queries) & (out_row % HEADS < Q_PER_KV)
        target = d_q_target + ((batch.to(gl.int64) * num_queries + first_query) * GROUPS + group) * Q_PER_KV * D
        out_place = ((out_row // HEADS) * (GROUPS * Q_PER_KV) + out_row % HEADS) * D
        columns = gl.arange(0, D, gl.SliceLayout(0, OUTPUT))
        gl.store(target + out_place[:, None] + columns[None, :], (d_q * scale).to(q_tiles.dtype), mask=exists[:, None])
        visit += 1


@Kernel
@gluon.jit(do_not_specialize=["slots", "row_tiles", "num_queries", "query_shift", "width"])
def tile_d_q_hopper_kernel(
    q_source, k_source, v_source, d_o_source, lse, delta, gate, d_q_target, tokens, members, entries,
    slots, row_tiles, batch_groups, num_queries, query_shift, width, scale, score_scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
    GATED: gl.constexpr,
):
    """d_q of every tile of rows that falls to this program."""
    q_tiles = gl.allocate_shared_memory(q_source.dtype, [2] + q_source.block_type.shape, q_source.layout)
    d_o_tiles = gl.allocate_shared_memory(d_o_source.dtype, [2] + d_o_source.block_type.shape, d_o_source.layout)
    k_tiles = gl.allocate_shared_memory(k_source.dtype, [STAGES] + k_source.block_type.shape, k_source.layout)
    v_tiles = gl.allocate_shared_memory(v_source.dtype, [STAGES] + v_source.block_type.shape, v_source.layout)
    descriptors = (q_source, k_source, v_source, d_o_source)
    buffers = (q_tiles, k_tiles, v_tiles, d_o_tiles)
    barriers = make_barriers(STAGES)
    lists = (tokens, members, entries, width)
    counts = (slots, row_tiles, batch_groups, num_queries)
    gl.warp_specialize([
        (sum_rows, (0, lse, delta, gate, d_q_target, buffers, barriers, lists, counts, query_shift, scale, score_scale,
                    GROUPS, Q_PER_KV, HEADS, D, V, GATED)),
        (sum_rows, (1, lse, delta, gate, d_q_target, buffers, barriers, lists, counts, query_shift, scale, score_scale,
                    GROUPS, Q_PER_KV, HEADS, D, V, GATED)),
        (load_blocks, (descriptors, buffers, barriers, lists, counts, GROUPS, Q_PER_KV, HEADS)),
    ], [4, 1], [240, 24])

# fmt: on


def launch_tile_d_q(problem: SelectedProblem, d_q: Tensor, lists: TileLists) -> None:
    """Write d_q [B, T, H, D], contiguous."""
    p = problem
    batch, num_queries, _, dim = p.q.shape
    num_keys, groups, value_dim = p.v.shape[1:]
    queries = lists.queries // 2
    heads = PART_ROWS.value // queries
    row_tiles = cdiv(num_queries, lists.queries)
    batch_groups = batch * groups
    slots = row_tiles * batch_groups
    tile_d_q_hopper_kernel[(min(slots, devices.multiprocessors(p.q.device)),)](
        tile_descriptor(p.q, queries, heads, dim), tile_descriptor(p.k, BLOCK.value, 1, dim),
        tile_descriptor(p.v, BLOCK.value, 1, value_dim), tile_descriptor(p.d_o, queries, heads, value_dim),
        *p.rows()[-3:], d_q, lists.tokens, lists.members, lists.counts,
        slots, row_tiles, batch_groups, num_queries, num_keys - num_queries, lists.tokens.shape[-1], p.scale,
        p.score_scale, GROUPS=groups, Q_PER_KV=p.q_per_kv, HEADS=heads, D=dim, V=value_dim,
        GATED=p.gate is not None, num_warps=4, maxnreg=168,
    )  # fmt: skip
