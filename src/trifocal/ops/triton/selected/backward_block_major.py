"""Backward of the selected branch by blocks: a block's keys stay put, and the queries that chose it pass by.

A piece of a block's slots makes its part of d_k and d_v and, in the block-major order, which only small groups take,
d_q of each slot; reductions add up a row's slots and a block's pieces, in order. Slots and parts exist for a chunk of
rows at a time.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import dispatch, tiles
from trifocal.ops.tiles import SelectedTile, cdiv, next_power_of_2
from trifocal.ops.triton.common import (
    add_product,
    load_and_multiply_left,
    nothing_lost,
    store_parts,
    store_tile,
    strides,
    zeros_in_parts,
)
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.selected.block_csr import BlockCSR, block_place, build_block_csr, find_piece
from trifocal.ops.triton.selected.common import SelectedProblem, load_block, row_numbers
from trifocal.ops.triton.selected.forward import hopper_sizes, load_slots, reduce_slots, rows_of_chunk


@Kernel
@triton.jit(
    do_not_specialize=[
        "num_queries", "query_shift", "num_keys", "chunk", "chunk_rows", "num_blocks", "keys_per_chunk"
    ]
)  # fmt: skip
def block_major_backward_kernel(
    q, k, v, d_o, lse, delta, gate, d_q_slots, d_k_parts, d_v_parts,
    slots, starts, first_pieces, piece_keys, ids, positions, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    d_batch_stride, d_time_stride, d_head_stride,
    num_queries, query_shift, num_keys, chunk, chunk_rows, num_blocks, keys_per_chunk, score_scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, NUM_SELECTED: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, PIECE: tl.constexpr, PACKED: tl.constexpr, GATED: tl.constexpr,
    WITH_D_Q: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One piece's part of d_k and d_v and, if asked for, d_q of its slots, all but for the factor `scale`."""
    begin, end, batch, group, block = find_piece(
        tl.program_id(0), chunk, 1, starts, first_pieces, piece_keys, keys_per_chunk, num_blocks, GROUPS, PIECE
    )
    if begin < end:
        first_slot_of_chunk = chunk * chunk_rows * (GROUPS * NUM_SELECTED)
        first_token, first_position = block_place(
            block, slots, begin, num_queries, query_shift, ids, cu_seqlens, GROUPS * NUM_SELECTED, BLOCK, PACKED
        )
        in_block = tl.arange(0, KEYS)
        key_exists = (in_block < BLOCK) & (first_token + in_block < num_keys)
        q += batch.to(tl.int64) * q_batch_stride + group * Q_PER_KV * q_head_stride
        d_o += batch.to(tl.int64) * d_batch_stride + group * Q_PER_KV * d_head_stride
        k += batch.to(tl.int64) * k_batch_stride + first_token.to(tl.int64) * k_time_stride + group * k_head_stride
        v += batch.to(tl.int64) * v_batch_stride + first_token.to(tl.int64) * v_time_stride + group * v_head_stride
        keys, values = load_block(k, v, k_time_stride, v_time_stride, in_block, key_exists, D, D_1, D_2, V, V_1, V_2)
        d_k_1, d_k_2 = zeros_in_parts(KEYS, D_1, D_2)
        d_v_1, d_v_2 = zeros_in_parts(KEYS, V_1, V_2)
        lost_k_1, lost_k_2 = nothing_lost(d_k_1, keys[0]), nothing_lost(d_k_2, keys[0])
        lost_v_1, lost_v_2 = nothing_lost(d_v_1, keys[0]), nothing_lost(d_v_2, keys[0])

        head = tl.arange(0, ROWS) % Q_PER_KV
        for first in tl.range(begin, end, ROWS // Q_PER_KV):
            exists, slot = load_slots(slots, first, end, Q_PER_KV, ROWS)
            row = slot // (GROUPS * NUM_SELECTED)
            query = row - batch * num_queries
            position = query + query_shift
            if PACKED:
                position = tl.load(positions + position, mask=exists, other=0)
            lse_2, delta_row, gate_row = row_numbers(
                lse, delta, gate, (row.to(tl.int64) * GROUPS + group) * Q_PER_KV + head, exists, GATED
            )
            q_offsets = query.to(tl.int64) * q_time_stride + head * q_head_stride
            d_offsets = query.to(tl.int64) * d_time_stride + head * d_head_stride
            scores, queries = load_and_multiply_left(keys, q, q_offsets, exists, D, D_1, D_2)
            visible = key_exists[None, :] & (first_position + in_block[None, :] <= position[:, None])
            p = tl.where(visible, tl.exp2(scores * score_scale - lse_2[:, None]), 0.0)
            if GATED:
                p = p * gate_row[:, None]
            d_p, d_o_rows = load_and_multiply_left(values, d_o, d_offsets, exists, V, V_1, V_2)
            d_scores = (p * (d_p - delta_row[:, None])).to(queries[0].dtype)
            if WITH_D_Q:
                place = ((slot - first_slot_of_chunk).to(tl.int64) * Q_PER_KV + head) * D
                store_tile(d_q_slots, place, exists, tl.dot(d_scores, keys[0], input_precision="ieee"), 0, D_1, D)
                if D_2 > 0:
                    d_q_2 = tl.dot(d_scores, keys[1], input_precision="ieee")
                    store_tile(d_q_slots, place, exists, d_q_2, D_1, D_2, D)
            p = p.to(d_o_rows[0].dtype)
            d_v_1, lost_v_1 = add_product(d_v_1, lost_v_1, tl.trans(p), d_o_rows[0])
            if V_2 > 0:
                d_v_2, lost_v_2 = add_product(d_v_2, lost_v_2, tl.trans(p), d_o_rows[1])
            d_k_1, lost_k_1 = add_product(d_k_1, lost_k_1, tl.trans(d_scores), queries[0])
            if D_2 > 0:
                d_k_2, lost_k_2 = add_product(d_k_2, lost_k_2, tl.trans(d_scores), queries[1])

        part = tl.program_id(0).to(tl.int64) * BLOCK + in_block
        in_part = in_block < BLOCK
        store_parts(d_k_parts, part * D, in_part, 1.0, (d_k_1, d_k_2), D, D_1, D_2)
        store_parts(d_v_parts, part * V, in_part, 1.0, (d_v_1, d_v_2), V, V_1, V_2)


@Kernel
@triton.jit(do_not_specialize=["num_queries", "query_shift", "num_keys", "chunk", "num_blocks", "keys_per_chunk"])
def reduce_pieces_kernel(
    parts, d_x, slots, starts, first_pieces, ids, cu_seqlens,
    x_batch_stride, x_time_stride, x_head_stride,
    num_queries, query_shift, num_keys, chunk, num_blocks, keys_per_chunk, factor,
    GROUPS: tl.constexpr, SLOTS_OF_ROW: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, ADD: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Some keys of one block: the sum of its pieces' parts in one chunk, added to the sum of the chunks before."""
    number = tl.program_id(0)
    first_key = chunk * keys_per_chunk
    first_piece = tl.load(first_pieces + first_key + number)
    end_piece = tl.load(first_pieces + first_key + number + 1)
    if first_piece < end_piece:
        batch_group = number // num_blocks
        begin = tl.load(starts + first_key + number)
        first_token, _ = block_place(
            number % num_blocks, slots, begin, num_queries, query_shift, ids, cu_seqlens, SLOTS_OF_ROW, BLOCK, PACKED
        )
        in_block = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
        token = first_token + in_block
        # Keys behind the document's end belong to the next document's first block.
        end_token = num_keys
        if PACKED:
            document = tl.load(ids + first_token)
            end_token = tl.load(cu_seqlens + document + 1)
        columns = tl.arange(0, WIDTH_PAD)
        inside = (in_block < BLOCK)[:, None] & (columns < WIDTH)[None, :]
        exists = inside & (token < end_token)[:, None]
        d_x += (batch_group // GROUPS).to(tl.int64) * x_batch_stride + (batch_group % GROUPS) * x_head_stride
        target = d_x + token.to(tl.int64)[:, None] * x_time_stride + columns[None, :]
        total = tl.zeros([KEYS, WIDTH_PAD], tl.float32)
        if ADD:
            total = tl.load(target, mask=exists, other=0.0)
        chunk_piece = tl.load(first_pieces + first_key)
        for piece in range(first_piece - chunk_piece, end_piece - chunk_piece):
            source = (piece * BLOCK + in_block).to(tl.int64) * WIDTH
            total += tl.load(parts + source[:, None] + columns[None, :], mask=inside, other=0.0)
        tl.store(target, (total * factor).to(d_x.dtype.element_ty), mask=exists)


def block_major_backward(problem: SelectedProblem, *, with_d_q: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    """d_q if asked for, d_k and d_v."""
    p, q, q_per_kv = problem, problem.q, problem.q_per_kv
    rows, dim, (num_keys, groups, value_dim) = q.shape[0] * q.shape[1], q.shape[3], p.v.shape[1:]
    on_hopper = dispatch.selected_on_hopper(q, p.k, p.v, p.d_o, block_size=p.block_size)
    tile = tiles.selected_tile("block_major backward", q, p.v, q_per_kv, on_hopper=on_hopper)
    row_slots = groups * p.num_selected
    d_q_type = dispatch.partial_d_q_type(q.dtype, p.num_selected, on_hopper=on_hopper)
    if with_d_q:
        chunk_rows = rows_of_chunk(row_slots * q_per_kv * dim * d_q_type.itemsize, rows)
    else:
        bytes_of_row = q_per_kv * (dim + value_dim) * q.element_size()
        chunk_rows = dispatch.gathered_rows(bytes_of_row, cdiv(num_keys, p.block_size), p.num_selected)
    index = build_block_csr(
        p.selected_blocks, p.block_size, num_keys, p.documents, chunk_rows=chunk_rows, piece_slots=tile.piece_slots
    )
    d_q, d_q_slots = None, p.lse
    if with_d_q:
        d_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        d_q_slots = torch.empty(index.chunk_rows * row_slots * q_per_kv, dim, dtype=d_q_type, device=q.device)
    parts_of_keys = index.pieces_per_chunk * p.block_size
    d_k_parts = torch.empty(parts_of_keys, dim, dtype=torch.float32, device=q.device)
    d_v_parts = torch.empty(parts_of_keys, value_dim, dtype=torch.float32, device=q.device)
    # Blocks that nobody chose have no piece. Sums of several chunks stay exact as they come.
    several = index.num_chunks > 1
    d_k, d_v = (torch.zeros(x.shape, dtype=torch.float32 if several else x.dtype, device=x.device) for x in (p.k, p.v))

    if on_hopper and not with_d_q and dispatch.dkdv_is_warp_specialized(q_per_kv, q, p.k, p.v, p.d_o):
        kernels = dispatch.hopper("selected.dkdv_warp_specialized")
        compute = kernels.block_major_dkdv_of_chunk(problem, index, d_k_parts, d_v_parts)
    else:
        compute = _kernel_of_pieces(p, index, tile, on_hopper, with_d_q, d_q_slots, d_k_parts, d_v_parts)
    for chunk in range(index.num_chunks):
        compute(chunk)
        if d_q is not None:
            first_row = chunk * index.chunk_rows
            end_row = min(first_row + index.chunk_rows, rows)
            reduce_slots(
                d_q_slots, None, index.keys, d_q, None, first_row, end_row, index.unused, p.scale, q_per_kv,
                p.num_selected,
            )  # fmt: skip
        _reduce_pieces(p, index, chunk, d_k_parts, d_k, 1.0 if several else p.scale, add=several)
        _reduce_pieces(p, index, chunk, d_v_parts, d_v, 1.0, add=several)
    if several:
        # Scaled and rounded in one pass.
        d_k = torch.mul(d_k, p.scale, out=torch.empty_like(d_k, dtype=p.k.dtype))
        d_v = d_v.to(p.v.dtype)
    return d_q, d_k, d_v


def _kernel_of_pieces(
    problem: SelectedProblem, index: BlockCSR, tile: SelectedTile, on_hopper: bool, with_d_q: bool, *targets: Tensor
) -> Callable[[int], None]:
    """A function that computes d_k, d_v of a chunk's pieces and, if asked for, d_q of its slots, without `scale`."""
    # The same for every chunk.
    arguments = (
        *problem.rows(), *targets, index.slots, index.starts, index.first_pieces, index.piece_keys,
        *problem.documents_or_lse(), *problem.sizes(),
    )  # fmt: skip
    kernel, constants = block_major_backward_kernel, {**problem.constants(), "ROWS": tile.BLOCK_M}
    if on_hopper:
        kernel = dispatch.hopper("selected.backward_block_major").block_major_backward_hopper_kernel
        constants = hopper_sizes(problem.constants())

    def compute(chunk: int) -> None:
        kernel[(index.pieces_per_chunk,)](
            *arguments, chunk, index.chunk_rows, index.num_blocks, index.keys_per_chunk, problem.score_scale,
            **constants, NUM_SELECTED=problem.num_selected, PIECE=tile.piece_slots, WITH_D_Q=with_d_q,
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        )  # fmt: skip

    return compute


def _reduce_pieces(
    problem: SelectedProblem, index: BlockCSR, chunk: int, parts: Tensor, d_x: Tensor, factor: float, *, add: bool
) -> None:
    """Add one chunk's parts into d_x [B, S, G, *], times the factor."""
    ids, _, cu_seqlens = problem.documents_or_lse()
    width, groups, block_size = d_x.shape[-1], d_x.shape[2], problem.block_size
    num_queries, num_keys = problem.q.shape[1], d_x.shape[1]
    keys_of_program = min(16, next_power_of_2(block_size))
    reduce_pieces_kernel[(index.keys_per_chunk, cdiv(block_size, keys_of_program))](
        parts, d_x, index.slots, index.starts, index.first_pieces, ids, cu_seqlens, *strides(d_x),
        num_queries, num_keys - num_queries, num_keys, chunk, index.num_blocks, index.keys_per_chunk, factor,
        GROUPS=groups, SLOTS_OF_ROW=groups * problem.num_selected, BLOCK=block_size,
        PACKED=problem.documents is not None,
        ADD=add, WIDTH=width, WIDTH_PAD=next_power_of_2(width), KEYS=keys_of_program, num_warps=4,
    )  # fmt: skip
