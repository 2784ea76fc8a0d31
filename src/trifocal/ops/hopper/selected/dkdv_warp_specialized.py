"""Selected attention, d_k and d_v of tiles, warp-specialized for Hopper, in Gluon.

The results of `block_major_backward_kernel` in `triton.selected.backward_block_major` without d_q. Four warps make p,
d_scores, d_k and d_v of a piece from tiles of 64 rows (slots x heads of the group); one warp starts the copies of k and
v, and of each slot's q and d_o; one brings lse, delta and gate of the rows. Two programs share a multiprocessor: one's
products run under the other's arithmetic. A box of the copy engine (TMA) is the group's heads of one query, 64 columns
wide; the boxes of a tile stack to the layout that the matrix units read. Every sum has one order.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from trifocal.ops import devices
from trifocal.ops.hopper.common import allocate_barriers, reinterpret, tile_descriptor, tma_load
from trifocal.ops.triton.common import LOG2_E_KERNEL
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.selected.block_csr import BlockCSR, block_place
from trifocal.ops.triton.selected.common import SelectedProblem

ROWS = tl.constexpr(64)
# Tiles of rows in shared memory.
STAGES = tl.constexpr(2)
# A piece's numbers in the table: first slot, end, end of those that need a mask, batch, group, first token of keys.
FIELDS = tl.constexpr(8)
LINE = tl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
TILE = tl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))

# fmt: off

@Kernel
@triton.jit(do_not_specialize=["num_queries", "query_shift", "num_blocks", "keys_per_chunk", "num_of_keys"])
def piece_table_kernel(
    table, slots, starts, first_pieces, piece_keys, ids, cu_seqlens,
    num_queries, query_shift, num_blocks, keys_per_chunk, num_of_keys,
    GROUPS: tl.constexpr, SLOTS_OF_ROW: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, STEP: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The numbers of one piece; pieces past the last are left as they are."""
    piece = tl.program_id(0)
    key = tl.load(piece_keys + piece)
    if key < num_of_keys:
        start = tl.load(starts + key)
        key_end = tl.load(starts + key + 1)
        # A block's pieces are of one length, up to a tile: programs take as many pieces each, and should end together.
        first = tl.load(first_pieces + key)
        length = tl.cdiv(tl.cdiv(key_end - start, tl.load(first_pieces + key + 1) - first), STEP) * STEP
        begin = start + (piece - first) * length
        end = tl.minimum(begin + length, key_end)
        batch_group = (key % keys_per_chunk) // num_blocks
        batch = batch_group // GROUPS
        first_token, _ = block_place(
            (key % keys_per_chunk) % num_blocks, slots, begin, num_queries, query_shift, ids, cu_seqlens,
            SLOTS_OF_ROW, BLOCK, PACKED)
        place = begin + tl.arange(0, PIECE)
        slot = tl.load(slots + place, mask=place < end, other=0).to(tl.int32)
        # Slots come in the order of their queries: those that do not see the whole block are the first ones.
        token = slot // SLOTS_OF_ROW - batch * num_queries + query_shift
        masked = tl.sum(((place < end) & (token < first_token + (BLOCK - 1))).to(tl.int32))
        row = table + piece * FIELDS
        tl.store(row, begin)
        tl.store(row + 1, end)
        tl.store(row + 2, begin + masked)
        tl.store(row + 3, batch)
        tl.store(row + 4, batch_group % GROUPS)
        tl.store(row + 5, first_token)


@gluon.jit
def load_piece(table, piece):
    """First slot of a piece, end, end of those that need a mask; batch, group and first token of its block."""
    row = table + piece * FIELDS
    return gl.load(row), gl.load(row + 1), gl.load(row + 2), gl.load(row + 3), gl.load(row + 4), gl.load(row + 5)


@gluon.jit
def boxes_of(tile, source, WIDTH: gl.constexpr):
    """A tile [64, WIDTH] as the boxes that it stacks up from: halves of 64 columns, then slots."""
    Q_PER_KV: gl.constexpr = source.block_type.shape[len(source.block_type.shape) - 2]
    return reinterpret(
        tile, source.dtype, [WIDTH // 64 * (ROWS // Q_PER_KV)] + source.block_type.shape, source.layout)


@gluon.jit
def slots_of(slots, first, end, Q_PER_KV: gl.constexpr):
    """The slots of a tile, one by one; past the end, the last again. Loads are issued together and early."""
    numbers = ()
    for s in gl.static_range(ROWS // Q_PER_KV):
        numbers = numbers + (gl.load(slots + gl.minimum(first + s, end - 1)).to(gl.int32),)
    return numbers


@gluon.jit
def ask_for_rows(
    source, ready, tile, numbers, batch, num_queries, group,
    Q_PER_KV: gl.constexpr, SLOTS_OF_ROW: gl.constexpr, WIDTH: gl.constexpr,
):
    """Start the copies of a tile's rows, the heads of its slots."""
    STEP: gl.constexpr = ROWS // Q_PER_KV
    boxes = boxes_of(tile, source, WIDTH)
    for s in gl.static_range(STEP):
        query = numbers[s] // SLOTS_OF_ROW - batch * num_queries
        for half in gl.static_range(WIDTH // 64):
            tma_load(source, [batch, query, group * Q_PER_KV, half * 64], ready, boxes.index(half * STEP + s))


@gluon.jit
def load_rows(
    descriptors, tiles, barriers, work, num_queries,
    Q_PER_KV: gl.constexpr, SLOTS_OF_ROW: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
):
    """The loader: k and v of a piece, then its tiles of q and d_o."""
    q_source, k_source, v_source, d_o_source = descriptors
    q_tiles, k_tiles, v_tiles, d_o_tiles = tiles
    kv_ready, kv_free, rows_ready, rows_free = barriers
    slots, table, first_piece, end_piece = work
    STEP: gl.constexpr = ROWS // Q_PER_KV
    count = 0
    visit = 0
    for piece in range(first_piece + gl.program_id(0), end_piece, gl.num_programs(0)):
        begin, end, _masked_end, batch, group, first_token = load_piece(table, piece)
        mbarrier.wait(kv_free, (visit & 1) ^ 1)
        mbarrier.expect(kv_ready, k_source.block_type.nbytes + v_source.block_type.nbytes)
        tma_load(k_source, [batch, first_token, group, 0], kv_ready, k_tiles)
        tma_load(v_source, [batch, first_token, group, 0], kv_ready, v_tiles)
        for first in range(begin, end, STEP):
            stage = count % STAGES
            ready = rows_ready.index(stage)
            numbers = slots_of(slots, first, end, Q_PER_KV)
            mbarrier.wait(rows_free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(ready, ROWS * (D + V) * 2)
            ask_for_rows(
                q_source, ready, q_tiles.index(stage), numbers, batch, num_queries, group,
                Q_PER_KV, SLOTS_OF_ROW, D)
            ask_for_rows(
                d_o_source, ready, d_o_tiles.index(stage), numbers, batch, num_queries, group,
                Q_PER_KV, SLOTS_OF_ROW, V)
            count += 1
        visit += 1


@gluon.jit
def load_numbers(
    lse, delta, gate, tiles, barriers, work, num_queries, query_shift,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, SLOTS_OF_ROW: gl.constexpr, GATED: gl.constexpr,
):
    """Numbers of the rows of one tile after the other.

    lse in base 2 (infinite where the row adds nothing), delta, gate, and the last key of the block that it sees.
    """
    lse_tiles, delta_tiles, gate_tiles, key_tiles = tiles
    numbers_ready, rows_free = barriers
    slots, table, first_piece, end_piece = work
    STEP: gl.constexpr = ROWS // Q_PER_KV
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    row = gl.arange(0, ROWS, LANES)
    count = 0
    for piece in range(first_piece + gl.program_id(0), end_piece, gl.num_programs(0)):
        begin, end, _masked_end, batch, group, first_token = load_piece(table, piece)
        for first in range(begin, end, STEP):
            stage = count % STAGES
            slot = gl.load(slots + gl.minimum(first + row // Q_PER_KV, end - 1)).to(gl.int32)
            last_key = slot // SLOTS_OF_ROW - batch * num_queries + query_shift - first_token
            place = ((slot // SLOTS_OF_ROW).to(gl.int64) * GROUPS + group) * Q_PER_KV + row % Q_PER_KV
            lse_2 = gl.load(lse + place) * LOG2_E_KERNEL
            delta_row = gl.load(delta + place)
            gate_row = delta_row
            if GATED:
                gate_row = gl.load(gate + place).to(gl.float32)
            nothing = (lse_2 == float("-inf")) | (first + row // Q_PER_KV >= end)
            lse_2 = gl.where(nothing, float("inf"), lse_2)
            mbarrier.wait(rows_free.index(stage), (count // STAGES & 1) ^ 1)
            lse_tiles.index(stage).store(lse_2)
            delta_tiles.index(stage).store(delta_row)
            key_tiles.index(stage).store(last_key)
            if GATED:
                gate_tiles.index(stage).store(gate_row)
            mbarrier.arrive(numbers_ready.index(stage), count=1)
            count += 1


@gluon.jit
def sum_slots(
    d_k_parts, d_v_parts, tiles, numbers, barriers, work, score_scale,
    Q_PER_KV: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr, GATED: gl.constexpr,
):
    """d_k and d_v of each piece."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OUTPUT_D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OUTPUT_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    q_tiles, k_tiles, v_tiles, d_o_tiles = tiles
    lse_tiles, delta_tiles, gate_tiles, key_tiles = numbers
    kv_ready, kv_free, rows_ready, numbers_ready, rows_free = barriers
    slots, table, first_piece, end_piece = work
    STEP: gl.constexpr = ROWS // Q_PER_KV
    TYPE: gl.constexpr = q_tiles.dtype
    k_tile = k_tiles.reshape([BLOCK, D])
    v_tile = v_tiles.reshape([BLOCK, V])
    count = 0
    visit = 0
    for piece in range(first_piece + gl.program_id(0), end_piece, gl.num_programs(0)):
        begin, end, masked_end, _batch, _group, _first_token = load_piece(table, piece)
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
            d_scores = gl.convert_layout(d_scores, gl.DotOperandLayout(0, OUTPUT_D, 2))
            d_k = warpgroup_mma(d_scores, q_tile, d_k, is_async=True)
            d_v, d_k = warpgroup_mma_wait(0, [d_v, d_k])
            mbarrier.arrive(rows_free.index(stage), count=1)
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
@gluon.jit(do_not_specialize=["num_queries", "query_shift", "chunk", "keys_per_chunk"])
def block_major_dkdv_warp_specialized_kernel(
    q_source, k_source, v_source, d_o_source, lse, delta, gate, d_k_parts, d_v_parts,
    slots, first_pieces, table, num_queries, query_shift, chunk, keys_per_chunk, score_scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, SLOTS_OF_ROW: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
    BLOCK: gl.constexpr, GATED: gl.constexpr,
):
    """d_k and d_v of the pieces of one chunk, all but for the factor `scale`."""
    TYPE: gl.constexpr = q_source.dtype
    q_tiles = gl.allocate_shared_memory(TYPE, [STAGES, ROWS, D], TILE)
    d_o_tiles = gl.allocate_shared_memory(TYPE, [STAGES, ROWS, V], TILE)
    k_tiles = gl.allocate_shared_memory(TYPE, k_source.block_type.shape, k_source.layout)
    v_tiles = gl.allocate_shared_memory(TYPE, v_source.block_type.shape, v_source.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINE)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINE)
    gate_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINE)
    key_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], LINE)
    tiles = (q_tiles, k_tiles, v_tiles, d_o_tiles)
    numbers = (lse_tiles, delta_tiles, gate_tiles, key_tiles)
    kv_ready, kv_free = allocate_barriers(1, (1, 1))
    kv_ready, kv_free = kv_ready.index(0), kv_free.index(0)
    rows_ready, numbers_ready, rows_free = allocate_barriers(STAGES, (1, 1, 1))
    descriptors = (q_source, k_source, v_source, d_o_source)
    barriers = (kv_ready, kv_free, rows_ready, numbers_ready, rows_free)
    first_key = chunk * keys_per_chunk
    first_piece = gl.load(first_pieces + first_key)
    work = (slots, table, first_piece, gl.load(first_pieces + first_key + keys_per_chunk))
    gl.warp_specialize([
        (sum_slots, (d_k_parts, d_v_parts, tiles, numbers, barriers, work, score_scale,
                     Q_PER_KV, D, V, BLOCK, GATED)),
        (load_rows, (descriptors, tiles, (kv_ready, kv_free, rows_ready, rows_free),
                     work, num_queries, Q_PER_KV, SLOTS_OF_ROW, D, V)),
        (load_numbers, (lse, delta, gate, numbers, (numbers_ready, rows_free),
                        work, num_queries, query_shift, GROUPS, Q_PER_KV, SLOTS_OF_ROW, GATED)),
    ], [1, 1], [24, 24])

# fmt: on


def piece_table(problem: SelectedProblem, index: BlockCSR) -> Tensor:
    """The numbers of all pieces, [pieces, FIELDS], int32."""
    ids, _, cu_seqlens = problem.documents_or_lse()
    pieces, groups = index.piece_keys.shape[0], problem.k.shape[2]
    num_queries, num_keys = problem.q.shape[1], problem.k.shape[1]
    table = torch.empty(pieces, FIELDS.value, dtype=torch.int32, device=problem.k.device)
    piece_table_kernel[(pieces,)](
        table, index.slots, index.starts, index.first_pieces, index.piece_keys, ids, cu_seqlens,
        num_queries, num_keys - num_queries, index.num_blocks, index.keys_per_chunk, index.unused,
        GROUPS=groups, SLOTS_OF_ROW=groups * problem.num_selected, BLOCK=problem.block_size, PIECE=index.piece_slots,
        STEP=ROWS.value // problem.q_per_kv, PACKED=problem.documents is not None, num_warps=1,
    )  # fmt: skip
    return table


def block_major_dkdv_of_chunk(
    problem: SelectedProblem, index: BlockCSR, d_k_parts: Tensor, d_v_parts: Tensor
) -> Callable[[int], None]:
    """A function that computes d_k and d_v of one chunk's pieces, without the factor `scale`."""
    p, q_per_kv = problem, problem.q_per_kv
    num_queries, dim = p.q.shape[1], p.q.shape[3]
    num_keys, groups, value_dim = p.v.shape[1:]
    arguments = (
        tile_descriptor(p.q, 1, q_per_kv, 64),
        tile_descriptor(p.k, p.block_size, 1, dim),
        tile_descriptor(p.v, p.block_size, 1, value_dim),
        tile_descriptor(p.d_o, 1, q_per_kv, 64),
        *p.rows()[-3:], d_k_parts, d_v_parts, index.slots, index.first_pieces, piece_table(problem, index),
        num_queries, num_keys - num_queries,
    )  # fmt: skip

    def compute(chunk: int) -> None:
        block_major_dkdv_warp_specialized_kernel[(2 * devices.multiprocessors(p.q.device),)](
            *arguments, chunk, index.keys_per_chunk, p.score_scale,
            GROUPS=groups, Q_PER_KV=q_per_kv, SLOTS_OF_ROW=groups * p.num_selected, D=dim, V=value_dim,
            BLOCK=p.block_size, GATED=p.gate is not None, num_warps=4, maxnreg=128,
        )  # fmt: skip

    return compute
