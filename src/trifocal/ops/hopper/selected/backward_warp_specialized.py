"""Block-major selected attention, backward, warp-specialized for Hopper, in Gluon: `dkdv_warp_specialized` with d_q.

A fourth part, the storer, one warp, starts the copies of d_q to the places of its slots; the loader gets a tile's rows
back from it. d_scores go through shared memory, as they are for d_k and transposed for d_q.
"""

from collections.abc import Callable

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trifocal.ops import devices
from trifocal.ops.hopper.common import tile_descriptor, tma_store
from trifocal.ops.hopper.selected.dkdv_warp_specialized import (
    LINE,
    ROWS,
    boxes_of,
    load_numbers,
    load_rows,
    piece_table,
    slots_of,
    span_of,
    work_of,
)
from trifocal.ops.triton.launch import Descriptor, Kernel, describe_tiles
from trifocal.ops.triton.selected.block_csr import BlockCSR
from trifocal.ops.triton.selected.common import SelectedProblem

SLOT_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

# fmt: off

@gluon.jit
def send_rows(target, tile, numbers, first, end, first_slot, Q_PER_KV: gl.constexpr, WIDTH: gl.constexpr):
    """Start the copies of a tile's rows to the places of their slots."""
    STEP: gl.constexpr = ROWS // Q_PER_KV
    boxes = boxes_of(tile, target, WIDTH)
    for s in gl.static_range(STEP):
        if first + s < end:
            place = (numbers[s] - first_slot) * Q_PER_KV
            for half in gl.static_range(WIDTH // 64):
                tma_store(target, [place, half * 64], boxes.index(half * STEP + s))


@gluon.jit
def store_d_q(
    d_q_target, q_tiles, d_q_ready, rows_free, work, first_slot,
    Q_PER_KV: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):
    """The storer: d_q of one tile after the other, out of the tiles of queries, which it gives back."""
    slots, table, first_piece, end_piece = work
    STEP: gl.constexpr = ROWS // Q_PER_KV
    count = 0
    for piece in range(first_piece + gl.program_id(0), end_piece, gl.num_programs(0)):
        begin, end, _masked_end = span_of(table, piece)
        for first in range(begin, end, STEP):
            stage = count % STAGES
            numbers = slots_of(slots, first, end, Q_PER_KV)
            mbarrier.wait(d_q_ready.index(stage), count // STAGES & 1)
            send_rows(d_q_target, q_tiles.index(stage), numbers, first, end, first_slot, Q_PER_KV, D)
            tma.store_wait(0)
            mbarrier.arrive(rows_free.index(stage), count=1)
            count += 1


@gluon.jit
def sum_slots(
    d_k_parts, d_v_parts, buffers, barriers, work, score_scale,
    Q_PER_KV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr,
    GATED: gl.constexpr, STAGES: gl.constexpr,
):
    """d_q of each tile, d_k and d_v of each piece."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OUTPUT_D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OUTPUT_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    q_tiles, k_tiles, v_tiles, d_o_tiles, d_scores_tile, lse_tiles, delta_tiles, gate_tiles, key_tiles = buffers
    kv_ready, kv_free, rows_ready, numbers_ready, rows_free, d_q_ready = barriers
    slots, table, first_piece, end_piece = work
    STEP: gl.constexpr = ROWS // Q_PER_KV
    TYPE: gl.constexpr = q_tiles.dtype
    k_tile = k_tiles.reshape([BLOCK, D])
    v_tile = v_tiles.reshape([BLOCK, V])
    count = 0
    visit = 0
    for piece in range(first_piece + gl.program_id(0), end_piece, gl.num_programs(0)):
        begin, end, masked_end = span_of(table, piece)
        d_k = gl.zeros([BLOCK, D], gl.float32, OUTPUT_D)
        d_v = gl.zeros([BLOCK, V], gl.float32, OUTPUT_V)
        mbarrier.wait(kv_ready, visit & 1)
        for first in range(begin, end, STEP):
            stage = count % STAGES
            phase = count // STAGES & 1
            q_tile = q_tiles.index(stage)
            d_o_tile = d_o_tiles.index(stage)
            zeros = gl.zeros([BLOCK, ROWS], gl.float32, SCORES)
            mbarrier.wait(rows_ready.index(stage), phase)
            scores = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
            d_p = warpgroup_mma(v_tile, d_o_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(numbers_ready.index(stage), phase)
            row_lse = lse_tiles.index(stage).load(ROW)
            scores = warpgroup_mma_wait(1, [scores])
            if first < masked_end:
                key = gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
                visible = key[:, None] <= key_tiles.index(stage).load(ROW)[None, :]
                scores = gl.where(visible, scores, float("-inf"))
            p = gl.exp2(scores * score_scale - row_lse[None, :])
            if GATED:
                p = p * gate_tiles.index(stage).load(ROW)[None, :]
            p_operand = gl.convert_layout(p.to(TYPE), gl.DotOperandLayout(0, OUTPUT_V, 2))
            d_v = warpgroup_mma(p_operand, d_o_tile, d_v, is_async=True)
            row_delta = delta_tiles.index(stage).load(ROW)
            d_p = warpgroup_mma_wait(1, [d_p])
            d_scores = (p * (d_p - row_delta[None, :])).to(TYPE)
            d_scores_tile.store(d_scores)
            fence_async_shared()
            d_v = warpgroup_mma_wait(0, [d_v])
            d_k = warpgroup_mma(d_scores_tile, q_tile, d_k, is_async=True)
            d_q = gl.zeros([ROWS, D], gl.float32, OUTPUT_D)
            d_q = warpgroup_mma(d_scores_tile.permute((1, 0)), k_tile, d_q, use_acc=False, is_async=True)
            d_q, d_k = warpgroup_mma_wait(0, [d_q, d_k])
            q_tile.store(d_q.to(TYPE))
            fence_async_shared()
            mbarrier.arrive(d_q_ready.index(stage), count=1)
            count += 1
        mbarrier.arrive(kv_free, count=1)
        key_d = (piece - first_piece).to(gl.int64) * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, OUTPUT_D))
        key_v = (piece - first_piece).to(gl.int64) * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, OUTPUT_V))
        columns_d = gl.arange(0, D, gl.SliceLayout(0, OUTPUT_D))
        columns_v = gl.arange(0, V, gl.SliceLayout(0, OUTPUT_V))
        gl.store(d_k_parts + key_d[:, None] * D + columns_d[None, :], d_k)
        gl.store(d_v_parts + key_v[:, None] * V + columns_v[None, :], d_v)
        visit += 1


@Kernel
@gluon.jit(do_not_specialize=["num_queries", "query_shift", "chunk", "chunk_rows", "keys_per_chunk"])
def block_major_backward_warp_specialized_kernel(
    q_source, k_source, v_source, d_o_source, d_q_target, lse, delta, gate, d_k_parts, d_v_parts,
    slots, first_pieces, table, num_queries, query_shift, chunk, chunk_rows, keys_per_chunk, score_scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, SLOTS_OF_ROW: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
    BLOCK: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
):
    """d_q of the slots of one chunk, d_k and d_v of its pieces, all but for the factor `scale`."""
    TYPE: gl.constexpr = q_source.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_tiles = gl.allocate_shared_memory(TYPE, [STAGES, ROWS, D], TILE)
    d_o_tiles = gl.allocate_shared_memory(TYPE, [STAGES, ROWS, V], TILE)
    k_tiles = gl.allocate_shared_memory(TYPE, k_source.block_type.shape, k_source.layout)
    v_tiles = gl.allocate_shared_memory(TYPE, v_source.block_type.shape, v_source.layout)
    d_scores_tile = gl.allocate_shared_memory(TYPE, [BLOCK, ROWS], TILE)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINE)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINE)
    gate_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINE)
    key_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], LINE)
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    rows_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    numbers_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    rows_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    d_q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_ready, count=1)
    mbarrier.init(kv_free, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(rows_ready.index(stage), count=1)
        mbarrier.init(numbers_ready.index(stage), count=1)
        mbarrier.init(rows_free.index(stage), count=1)
        mbarrier.init(d_q_ready.index(stage), count=1)
    descriptors = (q_source, k_source, v_source, d_o_source)
    buffers = (q_tiles, k_tiles, v_tiles, d_o_tiles, d_scores_tile, lse_tiles, delta_tiles, gate_tiles, key_tiles)
    barriers = (kv_ready, kv_free, rows_ready, numbers_ready, rows_free, d_q_ready)
    work = work_of(slots, table, first_pieces, chunk, keys_per_chunk)
    gl.warp_specialize([
        (sum_slots, (d_k_parts, d_v_parts, buffers, barriers, work, score_scale,
                     Q_PER_KV, D, V, BLOCK, GATED, STAGES)),
        (load_rows, (descriptors, (q_tiles, k_tiles, v_tiles, d_o_tiles), (kv_ready, kv_free, rows_ready, rows_free),
                     work, num_queries, Q_PER_KV, SLOTS_OF_ROW, D, V, STAGES)),
        (load_numbers, (lse, delta, gate, (lse_tiles, delta_tiles, gate_tiles, key_tiles), (numbers_ready, rows_free),
                        work, num_queries, query_shift, GROUPS, Q_PER_KV, SLOTS_OF_ROW, GATED, STAGES)),
        (store_d_q, (d_q_target, q_tiles, d_q_ready, rows_free, work, chunk * chunk_rows * SLOTS_OF_ROW,
                     Q_PER_KV, D, STAGES)),
    ], [1, 1, 1], [24, 24, 24])

# fmt: on


def _rows_descriptor(x: Tensor, q_per_kv: int) -> Descriptor:
    """A descriptor of rows [rows, columns] in boxes of one slot's rows and 64 columns."""
    return describe_tiles(x, x.shape, x.stride(), (q_per_kv, 64), SLOT_LAYOUT)


def block_major_backward_of_chunk(
    problem: SelectedProblem, index: BlockCSR, d_q_slots: Tensor, d_k_parts: Tensor, d_v_parts: Tensor
) -> Callable[[int], None]:
    """A function that computes d_q of one chunk's slots and d_k, d_v of its pieces, without the factor `scale`."""
    p, q_per_kv = problem, problem.q_per_kv
    num_queries, dim = p.q.shape[1], p.q.shape[3]
    num_keys, groups, value_dim = p.v.shape[1:]
    table = piece_table(problem, index)
    sources = (
        tile_descriptor(p.q, 1, q_per_kv, 64),
        tile_descriptor(p.k, p.block_size, 1, dim),
        tile_descriptor(p.v, p.block_size, 1, value_dim),
        tile_descriptor(p.d_o, 1, q_per_kv, 64),
        _rows_descriptor(d_q_slots, q_per_kv),
    )
    row_numbers = p.rows()[-3:]

    def compute(chunk: int) -> None:
        block_major_backward_warp_specialized_kernel[(2 * devices.multiprocessors(p.q.device),)](
            *sources, *row_numbers, d_k_parts, d_v_parts, index.slots, index.first_pieces, table,
            num_queries, num_keys - num_queries, chunk, index.chunk_rows, index.keys_per_chunk, p.score_scale,
            GROUPS=groups, Q_PER_KV=q_per_kv, SLOTS_OF_ROW=groups * p.num_selected, D=dim, V=value_dim,
            BLOCK=p.block_size,
            GATED=p.gate is not None, STAGES=2, num_warps=4, maxnreg=128,
        )  # fmt: skip

    return compute
