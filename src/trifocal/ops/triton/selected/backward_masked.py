"""Backward of the selected branch, masked: dense tiles of neighbouring queries over all blocks that one of them
chose.

One kernel holds a tile of queries and makes d_q, the other a block of keys and makes d_k and d_v; of few programs the
latter is cut into parts of the queries, which are added up in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import devices, dispatch, tiles
from trifocal.ops.layout import longest_document
from trifocal.ops.tiles import cdiv, next_power_of_2
from trifocal.ops.triton.common import (
    add_product,
    load_and_multiply,
    load_tile,
    nothing_lost,
    store_parts,
    zeros_in_parts,
)
from trifocal.ops.triton.documents import documents_of_blocks
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.selected.block_csr import block_of_program, choice_bits, count_blocks
from trifocal.ops.triton.selected.common import SelectedProblem, add_d_q, load_block, load_rows, row_numbers
from trifocal.ops.triton.selected.forward import blocks_of_document, blocks_of_word, hopper_sizes, place_tile


@triton.jit
def _d_q_of_blocks(
    d_q, queries, d_o, k, v, k_time_stride, v_time_stride, numbers,
    bits, tile_bits, position, document_start, document_end, first_block, end_block, score_scale,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Add the shares of a run of blocks, all in the word `bits`, to d_q of the rows that chose them."""
    in_block = tl.arange(0, KEYS)
    for block in tl.range(first_block, end_block):
        first_position = block * BLOCK
        first_token = document_start + first_position
        keep = (in_block >= 0) & (((tile_bits >> (block & 31)) & 1) != 0)
        if MASKED:
            keep = keep & (in_block < BLOCK) & (first_token + in_block < document_end)
        k_base = k + first_token.to(tl.int64) * k_time_stride
        v_base = v + first_token.to(tl.int64) * v_time_stride
        scores, keys = load_and_multiply(queries, k_base, in_block * k_time_stride, keep, D, D_1, D_2, True)
        d_p, _values = load_and_multiply(d_o, v_base, in_block * v_time_stride, keep, V, V_1, V_2, True)
        chosen = ((bits >> (block & 31)) & 1) != 0
        d_q = add_d_q(
            d_q, keys, scores, d_p, chosen, keep, first_position, position, numbers, score_scale,
            D_2, KEYS, MASKED, GATED,
        )  # fmt: skip
    return d_q


@Kernel
@triton.jit(do_not_specialize=["num_queries", "query_shift", "num_keys", "num_words"])
def masked_d_q_kernel(
    q, k, v, d_o, lse, delta, gate, d_q, bits, ids, positions, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    d_batch_stride, d_time_stride, d_head_stride,
    num_queries, query_shift, num_keys, num_words, score_scale, scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """d_q of one tile of rows, in the order of the forward kernel."""
    batch_group, query, head, exists, position, document_of_row, first_document, last_document = place_tile(
        num_queries, query_shift, ids, positions, Q_PER_KV, PACKED, ROWS
    )
    batch = (batch_group // GROUPS).to(tl.int64)
    group = batch_group % GROUPS
    place = (batch * num_queries + query) * (GROUPS * Q_PER_KV) + group * Q_PER_KV + head
    numbers = row_numbers(lse, delta, gate, place, exists, GATED)
    q += batch * q_batch_stride + group * Q_PER_KV * q_head_stride
    d_o += batch * d_batch_stride + group * Q_PER_KV * d_head_stride
    k += batch * k_batch_stride + group * k_head_stride
    v += batch * v_batch_stride + group * v_head_stride
    q_offsets = query.to(tl.int64) * q_time_stride + head * q_head_stride
    d_offsets = query.to(tl.int64) * d_time_stride + head * d_head_stride
    queries, d_o_rows = load_rows(q, d_o, q_offsets, d_offsets, exists, D, D_1, D_2, V, V_1, V_2)
    d_q_sum = zeros_in_parts(ROWS, D_1, D_2)
    for document in range(first_document, last_document + 1):
        in_document, document_start, document_end, first_masked, end_block = blocks_of_document(
            document, exists, document_of_row, position, num_keys, cu_seqlens, PACKED, BLOCK, KEYS
        )
        for word in range(tl.minimum((end_block + 31) // 32, num_words)):
            chosen_bits, tile_bits, bounds = blocks_of_word(
                bits, batch_group, word, num_words, num_queries, query, in_document, first_masked, end_block
            )
            for MASKED in tl.static_range(2):
                d_q_sum = _d_q_of_blocks(
                    d_q_sum, queries, d_o_rows, k, v, k_time_stride, v_time_stride, numbers,
                    chosen_bits, tile_bits, position,
                    document_start, document_end, bounds[MASKED], bounds[MASKED + 1], score_scale,
                    D, D_1, D_2, V, V_1, V_2, BLOCK, KEYS, MASKED, GATED,
                )  # fmt: skip
    store_parts(d_q, place * D, exists, scale, d_q_sum, D, D_1, D_2)


@Kernel
@triton.jit(do_not_specialize=["num_queries", "query_shift", "num_keys", "num_words", "num_blocks", "part_queries"])
def masked_dkdv_kernel(
    q, k, v, d_o, lse, delta, gate, d_k, d_v, bits, block_documents, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    d_batch_stride, d_time_stride, d_head_stride,
    num_queries, query_shift, num_keys, num_words, num_blocks, part_queries, score_scale, scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """d_k and d_v of one block, over the rows of all queries behind it; the blocks with most queries start first.

    With SPLIT over only those of one part: into [parts, B, S, G, D] and [.., V], nothing where a part has no rows.
    """
    block, first_token, document_end, part, begin_query, end_query = block_of_program(
        num_blocks, part_queries, num_keys, query_shift, block_documents, cu_seqlens, BLOCK, PACKED, SPLIT
    )
    batch = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    if (first_token < document_end) & ((begin_query < end_query) | (not SPLIT)):
        in_block = tl.arange(0, KEYS)
        key_exists = (in_block < BLOCK) & (first_token + in_block < document_end)
        q += batch * q_batch_stride + group * Q_PER_KV * q_head_stride
        d_o += batch * d_batch_stride + group * Q_PER_KV * d_head_stride
        k += batch * k_batch_stride + first_token.to(tl.int64) * k_time_stride + group * k_head_stride
        v += batch * v_batch_stride + first_token.to(tl.int64) * v_time_stride + group * v_head_stride
        keys, values = load_block(k, v, k_time_stride, v_time_stride, in_block, key_exists, D, D_1, D_2, V, V_1, V_2)
        d_k_1, d_k_2 = zeros_in_parts(KEYS, D_1, D_2)
        d_v_1, d_v_2 = zeros_in_parts(KEYS, V_1, V_2)
        lost_k_1, lost_k_2 = nothing_lost(d_k_1, keys[0]), nothing_lost(d_k_2, keys[0])
        lost_v_1, lost_v_2 = nothing_lost(d_v_1, keys[0]), nothing_lost(d_v_2, keys[0])
        word_place = (tl.program_id(0).to(tl.int64) * num_words + tl.minimum(block // 32, num_words - 1)) * num_queries
        end_row = end_query * Q_PER_KV
        for first_row in tl.range(begin_query * Q_PER_KV, end_row, ROWS):
            row = first_row + tl.arange(0, ROWS)
            query = row // Q_PER_KV
            head = row % Q_PER_KV
            in_tile = row < end_row
            query = tl.where(in_tile, query, begin_query)
            word = tl.load(bits + word_place + query, mask=in_tile, other=0)
            exists = ((word >> (block & 31)) & 1) != 0
            place = (batch * num_queries + query) * (GROUPS * Q_PER_KV) + group * Q_PER_KV + head
            lse_2, delta_row, gate_row = row_numbers(lse, delta, gate, place, exists, GATED)
            q_offsets = query.to(tl.int64) * q_time_stride + head * q_head_stride
            d_offsets = query.to(tl.int64) * d_time_stride + head * d_head_stride
            # Keys are rows here, so that p and d_scores go from registers into the products for d_v and d_k.
            scores, queries = load_and_multiply(keys, q, q_offsets, in_tile, D, D_1, D_2, True)
            # A query of the block's own document sits as far behind the key as its token does.
            visible = key_exists[:, None] & (first_token + in_block[:, None] <= (query + query_shift)[None, :])
            p = tl.where(visible, tl.exp2(scores * score_scale - lse_2[None, :]), 0.0)
            if GATED:
                p = p * gate_row[None, :]
            d_o_1 = load_tile(d_o, d_offsets, in_tile, 0, V_1, V, True)
            d_v_1, lost_v_1 = add_product(d_v_1, lost_v_1, p.to(d_o_1.dtype), d_o_1)
            d_p = tl.dot(values[0], tl.trans(d_o_1), input_precision="ieee")
            if V_2 > 0:
                d_o_2 = load_tile(d_o, d_offsets, in_tile, V_1, V_2, V, True)
                d_v_2, lost_v_2 = add_product(d_v_2, lost_v_2, p.to(d_o_1.dtype), d_o_2)
                d_p = tl.dot(values[1], tl.trans(d_o_2), d_p, input_precision="ieee")
            d_scores = (p * (d_p - delta_row[None, :])).to(queries[0].dtype)
            d_k_1, lost_k_1 = add_product(d_k_1, lost_k_1, d_scores, queries[0])
            if D_2 > 0:
                d_k_2, lost_k_2 = add_product(d_k_2, lost_k_2, d_scores, queries[1])
        # d_k and d_v are contiguous, [B, S, G, *] or, split, [parts, B, S, G, *].
        if SPLIT:
            batch += part.to(tl.int64) * (tl.num_programs(0) // GROUPS)
        key_place = (batch * num_keys + first_token + in_block) * GROUPS + group
        store_parts(d_k, key_place * D, key_exists, scale, (d_k_1, d_k_2), D, D_1, D_2)
        store_parts(d_v, key_place * V, key_exists, 1.0, (d_v_1, d_v_2), V, V_1, V_2)


@triton.jit
def _sum_parts_of_rows(
    parts, total, row, exists, begin, end, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr
):
    """Add rows of parts [parts, count, WIDTH] in order, each from its first part to its last."""
    columns = tl.arange(0, WIDTH_PAD)
    inside = exists[:, None] & (columns < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    value = tl.zeros([ROWS, WIDTH_PAD], tl.float32)
    first_part = tl.min(tl.where(exists, begin, 2**30))
    for part in tl.range(first_part, tl.max(tl.where(exists, end, 0)), loop_unroll_factor=4):
        keep = inside & ((begin <= part) & (part < end))[:, None]
        value += tl.load(parts + part * count.to(tl.int64) * WIDTH + place, mask=keep, other=0.0)
    tl.store(total + place, value.to(total.dtype.element_ty), mask=inside)


@Kernel
@triton.jit(do_not_specialize=["query_shift", "num_keys", "part_queries", "parts", "count"])
def sum_parts_of_blocks_kernel(
    d_k_parts, d_v_parts, d_k, d_v, ids, cu_seqlens, query_shift, num_keys, part_queries, parts, count,
    GROUPS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """d_k, or d_v, of some keys: the sum, in order, of the parts with queries behind the key's block."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < count
    token = tl.where(exists, row, 0) // GROUPS % num_keys
    document_start = token * 0
    document_end = document_start + num_keys
    if PACKED:
        document = tl.load(ids + token)
        document_start = tl.load(cu_seqlens + document)
        document_end = tl.load(cu_seqlens + document + 1)
    block_start = token - (token - document_start) % BLOCK
    first_query = tl.maximum(document_start - query_shift, 0)
    begin = tl.minimum((tl.maximum(block_start - query_shift, 0) - first_query) // part_queries, parts - 1)
    end = tl.minimum(tl.cdiv(tl.maximum(document_end - query_shift, 0) - first_query, part_queries), parts)
    if tl.program_id(1) == 0:
        _sum_parts_of_rows(d_k_parts, d_k, row, exists, begin, end, count, ROWS, D, D_PAD)
    else:
        _sum_parts_of_rows(d_v_parts, d_v, row, exists, begin, end, count, ROWS, V, V_PAD)


def masked_backward(problem: SelectedProblem) -> tuple[Tensor, Tensor, Tensor]:
    """d_q, d_k and d_v."""
    bits = choice_bits(problem.selected_blocks, problem.block_size, problem.k.shape[1], problem.documents)
    return _launch_d_q(problem, bits), *_launch_dkdv(problem, bits)


def _launch_d_q(problem: SelectedProblem, bits: Tensor) -> Tensor:
    q = problem.q
    tile = tiles.selected_tile("masked d_q", q, problem.v, problem.q_per_kv, on_hopper=False)
    d_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    masked_d_q_kernel[(q.shape[0] * problem.k.shape[2], cdiv(q.shape[1] * problem.q_per_kv, tile.BLOCK_M))](
        *problem.rows(), d_q, bits, *problem.documents_or_lse(), *problem.sizes(),
        bits.shape[2], problem.score_scale, problem.scale,
        **problem.constants(), ROWS=tile.BLOCK_M, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return d_q


def _launch_dkdv(problem: SelectedProblem, bits: Tensor) -> tuple[Tensor, Tensor]:
    p, q_per_kv = problem, problem.q_per_kv
    (batch, num_queries), (num_keys, groups, value_dim), dim = p.q.shape[:2], p.v.shape[1:], p.q.shape[3]
    on_hopper = dispatch.selected_on_hopper(p.q, p.k, p.v, p.d_o, block_size=p.block_size)
    tile = tiles.selected_tile("masked dkdv", p.q, p.v, q_per_kv, on_hopper=on_hopper)
    ids, _, cu_seqlens = p.documents_or_lse()
    num_blocks, block_documents = count_blocks(num_keys, p.block_size, p.documents), p.lse
    if p.documents is not None:
        block_documents = documents_of_blocks(cu_seqlens, num_blocks, p.block_size)
    most_queries = min(num_queries, longest_document(num_keys, p.documents))
    part_queries = dispatch.masked_part_queries(
        most_queries, q_per_kv, batch * groups * num_blocks, devices.multiprocessors(p.q.device)
    )
    parts = cdiv(most_queries, part_queries)
    d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (p.k, p.v))
    sums = d_k, d_v
    if parts > 1:
        sums = tuple(torch.empty(parts, *x.shape, dtype=torch.float32, device=x.device) for x in (p.k, p.v))
    kernel, constants = masked_dkdv_kernel, p.constants()
    if on_hopper:
        kernel = dispatch.hopper("selected.backward_masked").masked_dkdv_hopper_kernel
        constants = hopper_sizes(constants)
    else:
        constants["ROWS"] = tile.BLOCK_M
    kernel[(batch * groups, num_blocks * parts)](
        *p.rows(), *sums, bits, block_documents, cu_seqlens, *p.sizes(),
        bits.shape[2], num_blocks, part_queries, p.score_scale, p.scale,
        **constants, SPLIT=parts > 1, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    if parts > 1:
        count = batch * num_keys * groups
        columns = [next_power_of_2(width) for width in (dim, value_dim)]
        rows = max(1, 1024 // max(columns))
        sum_parts_of_blocks_kernel[(cdiv(count, rows), 2)](
            *sums, d_k, d_v, ids, cu_seqlens, num_keys - num_queries, num_keys, part_queries, parts, count,
            GROUPS=groups, D=dim, D_PAD=columns[0], V=value_dim, V_PAD=columns[1],
            BLOCK=p.block_size, PACKED=p.documents is not None, ROWS=rows,
        )  # fmt: skip
    return d_k, d_v
