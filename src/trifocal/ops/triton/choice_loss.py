"""Kernels of the loss that teaches the choice; `trifocal.ops.choice_loss` says what the loss is.

`index_scoring` makes log2 of each block's sum of exponentials for every head of the teacher, for a chunk of queries at
a time. The loss kernel has all blocks of some rows in registers, up to 16,384 of a row before it spills, and writes the
gradient of the loss over the products. Backward only carries that to queries and keys: a block's product is that of one
token, which forward kept. Rows are added in their order: equal bits in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents, place_type
from trifocal.ops.tiles import cdiv, next_power_of_2
from trifocal.ops.triton.common import LOG2_E, LOG2_E_KERNEL, LOWEST, strides, unit_stride
from trifocal.ops.triton.index_scoring import as_importance, launch_block_scores
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.scoring import LINE, Chunk, most_important, query_chunks

# Blocks that d_q takes at a time, and tokens that it fills with zeros.
BLOCKS = 64
# Blocks that a program of the loss has at least, those of several rows if need be, so few since a small
# call takes the time of one program; and those of each warp.
LEAST_BLOCKS = 64
BLOCKS_OF_WARP = 256
MAX_WARPS = 16
# Keys and rows of a tile of d_k.
KEYS = 64
ROWS = 64

# fmt: off

@triton.jit
def rows_of_program(
    sampled, starts, first_query, end_query, num_queries, num_rows,
    GROUPS: tl.constexpr, SELECTION: tl.constexpr, ROWS: tl.constexpr,
):
    """The rows (batch, query of the chunk, group) of a program, whether they exist, their queries and candidates."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    row = tl.where(exists, row, 0)
    chunk_queries = end_query - first_query
    query = (row // GROUPS // chunk_queries) * num_queries + first_query + (row // GROUPS) % chunk_queries
    position = (tl.load(sampled + query) - tl.load(starts + query)).to(tl.int32)
    return row, exists, query, position // SELECTION + 1


@triton.jit
def in_lines(block, candidates):
    """Whether a block lies in a line that has candidates. Whole lines are read, in vectors, and then masked."""
    return block // LINE < tl.cdiv(candidates, LINE)[:, None]


@triton.jit
def masses_of_rows(
    log_sums, row, candidates, width, Q_PER_KV: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Masses [ROWS, BLOCKS]: the share of each block of the past, the mean over the heads of a group; else 0."""
    mass = tl.zeros([ROWS, BLOCKS], tl.float32)
    block = tl.arange(0, BLOCKS)[None, :]
    past = block < candidates[:, None]
    place = log_sums + (row * Q_PER_KV)[:, None] * width + block
    for head in range(Q_PER_KV):
        log_sum = tl.load(place + head * width, mask=in_lines(block, candidates), other=LOWEST)
        log_sum = tl.where(past, log_sum, LOWEST)
        weight = tl.exp2(log_sum - tl.max(log_sum, 1)[:, None])
        mass += weight * (1.0 / (tl.sum(weight, 1) * Q_PER_KV))[:, None]
    return tl.where(past, mass, 0.0)


@Kernel
@triton.jit(do_not_specialize=["first_query", "end_query", "num_queries", "num_rows", "block_lines"])
def index_loss_kernel(
    log_sums, products, places, losses, recalls, sampled, starts, eligible,
    first_query, end_query, num_queries, num_rows, block_lines, scale, share_floor, least_mass,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):
    """Loss and recall [B, M, G] of some rows of a chunk, and over their products the gradient of the loss by them.

    What belongs to no free block of an eligible query becomes 0, places too.
    """
    width = block_lines * LINE
    row, exists, query, candidates = rows_of_program(
        sampled, starts, first_query, end_query, num_queries, num_rows, GROUPS, SELECTION, ROWS)
    taught = exists & (tl.load(eligible + query) != 0) & (candidates > NUM_SELECTED)
    candidates = tl.where(taught, candidates, 0)
    block = tl.arange(0, BLOCKS)[None, :]
    free = (block >= INITIAL) & (block < candidates[:, None] - LOCAL)
    mass = tl.where(free, masses_of_rows(log_sums, row, candidates, width, Q_PER_KV, ROWS, BLOCKS), 0.0)
    out_row = query * GROUPS + row % GROUPS
    out = out_row[:, None] * width + block

    # The recall. A row that teaches nothing has no free block and wants none.
    wanted = tl.where(taught, NUM_SELECTED - INITIAL - LOCAL, 0)
    best = tl.sum(tl.where(most_important(mass, free, wanted, ROWS), mass, 0.0), 1)
    product = tl.where(free, tl.load(products + out, mask=in_lines(block, candidates), other=LOWEST), LOWEST)
    held = tl.sum(tl.where(most_important(as_importance(product), free, wanted, ROWS), mass, 0.0), 1)
    recall = tl.where(best > least_mass, held / tl.maximum(best, least_mass), 0.0)
    tl.store(recalls + out_row, recall, mask=exists)

    # The loss. The products are read again, so that registers are free for the choices.
    product = tl.where(free, tl.load(products + out, mask=in_lines(block, candidates), other=LOWEST), LOWEST)
    weight = tl.exp2((product - tl.max(product, 1)[:, None]) * (scale * LOG2_E_KERNEL))
    weight = tl.where(free, weight, 0.0)
    total = tl.sum(weight, 1)
    share = weight / tl.where(total > 0, total, 1.0)[:, None]
    floored = share + share_floor
    sum_floored = tl.sum(tl.where(free, floored, 0.0), 1)
    total = tl.sum(mass, 1)
    # With too little mass on the free blocks a query teaches nothing.
    mass = tl.where((total > least_mass)[:, None], mass / tl.maximum(total, least_mass)[:, None], 0.0)
    ratio = mass / floored
    loss = tl.sum(mass * tl.log(tl.where(mass > 0, ratio * sum_floored[:, None], 1.0)), 1)
    tl.store(losses + out_row, loss, mask=exists)
    pull = share * ratio
    d_product = (share * tl.sum(pull, 1)[:, None] - pull) * scale
    inside = exists[:, None] & (block < width)
    tl.store(products + out, d_product, mask=inside)
    tl.store(places + out, tl.zeros([ROWS, BLOCKS], tl.int32), mask=inside & (free == 0))


@triton.jit
def d_q_of_row(
    d_losses, d_products, places, k, d_q, sampled, starts, d_query_stride, d_group_stride, k_time_stride,
    row, num_queries, num_tokens, query_shift, num_blocks,
    GROUPS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SELECTION: tl.constexpr, BLOCKS: tl.constexpr,
):
    """d_q of the token of one row (query, group) of a batch entry; and zeros up to the next query's token.

    The first one of queries with the same token writes the sum of all.
    """
    query = row // GROUPS
    column = tl.arange(0, D_PAD)
    d_q += row % GROUPS * D + column
    token_of_query = tl.load(sampled + query)
    first = tl.where(query > 0, token_of_query, query_shift)
    end = tl.load(sampled + query + 1, mask=query + 1 < num_queries, other=num_tokens + query_shift)
    for first_token in range(first, end, BLOCKS):
        token = first_token + tl.arange(0, BLOCKS)
        tl.store(
            d_q + (token - query_shift)[:, None] * (GROUPS * D), tl.zeros([BLOCKS, D_PAD], d_q.dtype.element_ty),
            mask=((token < end) & (token != token_of_query))[:, None] & (column < D)[None, :])

    is_first = tl.load(sampled + query - 1, mask=query > 0, other=-1) != token_of_query
    end_query = tl.where(is_first, query + 1, query)
    while tl.load(sampled + end_query, mask=is_first & (end_query < num_queries), other=-1) == token_of_query:
        end_query += 1
    total = tl.zeros([D_PAD], tl.float32)
    for same_query in range(query, end_query):
        start = tl.load(starts + same_query)
        of_query = same_query * GROUPS + row % GROUPS
        sum_of_query = tl.zeros([D_PAD], tl.float32)
        for first_block in range(0, num_blocks, BLOCKS):
            block = first_block + tl.arange(0, BLOCKS)
            in_past = (block < num_blocks) & (block * SELECTION <= token_of_query - start)
            d_product = tl.load(d_products + of_query * num_blocks + block, mask=in_past, other=0.0)
            taught = d_product != 0
            token = start + block * SELECTION + tl.load(
                places + of_query * num_blocks + block, mask=taught, other=0)
            keys = tl.load(
                k + token[:, None] * k_time_stride + column[None, :], mask=taught[:, None] & (column < D)[None, :],
                other=0.0)
            sum_of_query += tl.sum(d_product[:, None] * keys.to(tl.float32), 0)
        total += sum_of_query * tl.load(d_losses + same_query * d_query_stride + row % GROUPS * d_group_stride)
    tl.store(
        d_q + (token_of_query - query_shift) * (GROUPS * D), total.to(d_q.dtype.element_ty),
        mask=(column < D) & is_first)


@triton.jit
def d_k_of_tile(
    d_losses, d_products, places, q, d_k, sampled, starts,
    d_query_stride, d_group_stride, q_time_stride, q_head_stride,
    first_key, num_queries, num_keys, query_shift, num_blocks,
    GROUPS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SELECTION: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):
    """d_k of a tile of keys of a batch entry. It overlaps `KEYS // SELECTION + 2` blocks of a document at most."""
    key = tl.arange(0, KEYS)
    column = tl.arange(0, D_PAD)
    total = tl.zeros([KEYS, D_PAD], tl.float32)
    for first_row in range(0, num_queries * GROUPS, ROWS):
        row = first_row + tl.arange(0, ROWS)
        query = row // GROUPS
        exists = query < num_queries
        start = tl.load(starts + query, mask=exists, other=0).to(tl.int32)
        token = tl.load(sampled + query, mask=exists, other=-1).to(tl.int32)
        if (tl.max(token) >= first_key) & (tl.min(start) < first_key + KEYS):
            weights = tl.zeros([KEYS, ROWS], tl.float32)
            for number in tl.static_range((KEYS + SELECTION - 2) // SELECTION + 1):
                # The first block that reaches behind the tile's first key, and those after it.
                block = tl.maximum(first_key - start, 0) // SELECTION + number
                there = exists & (block < num_blocks) & (
                    start + block * SELECTION <= tl.minimum(token, first_key + KEYS - 1))
                place = row.to(tl.int64) * num_blocks + block
                d_product = tl.load(d_products + place, mask=there, other=0.0)
                best = start + block * SELECTION + tl.load(places + place, mask=there & (d_product != 0), other=0)
                weights += tl.where((best - first_key)[None, :] == key[:, None], d_product[None, :], 0.0)
            d_loss = tl.load(d_losses + query * d_query_stride + row % GROUPS * d_group_stride, mask=exists, other=0.0)
            rows = tl.load(
                q + ((token - query_shift).to(tl.int64) * q_time_stride + (row % GROUPS) * q_head_stride)[:, None]
                + column[None, :],
                mask=exists[:, None] & (column < D)[None, :], other=0.0)
            total = tl.dot(weights * d_loss[None, :], rows.to(tl.float32), total, input_precision=PRECISION)
    tl.store(
        d_k + (first_key + key)[:, None] * D + column[None, :], total.to(d_k.dtype.element_ty),
        mask=(key < num_keys - first_key)[:, None] & (column < D)[None, :])


@Kernel
@triton.jit(do_not_specialize=["num_queries", "num_tokens", "num_keys", "num_blocks"])
def index_gradients_kernel(
    d_losses, d_products, places, q, k, d_q, d_k, sampled, starts,
    d_batch_stride, d_query_stride, d_group_stride, q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, num_queries, num_tokens, num_keys, num_blocks,
    GROUPS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SELECTION: tl.constexpr, BLOCKS: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):
    """d_k of a tile of keys, by the first programs of a batch entry, or d_q of a row."""
    batch = tl.program_id(1).to(tl.int64)
    d_losses += batch * d_batch_stride
    d_products += batch * num_queries * GROUPS * num_blocks
    places += batch * num_queries * GROUPS * num_blocks
    sampled += batch * num_queries
    starts += batch * num_queries
    tiles = tl.cdiv(num_keys, KEYS)
    if tl.program_id(0) < tiles:
        d_k_of_tile(
            d_losses, d_products, places, q + batch * q_batch_stride, d_k + batch * num_keys * D, sampled, starts,
            d_query_stride, d_group_stride, q_time_stride, q_head_stride,
            tl.program_id(0) * KEYS, num_queries, num_keys, num_keys - num_tokens, num_blocks,
            GROUPS, D, D_PAD, SELECTION, KEYS, ROWS, PRECISION)
    else:
        d_q_of_row(
            d_losses, d_products, places, k + batch * k_batch_stride, d_q + batch * num_tokens * (GROUPS * D),
            sampled, starts, d_query_stride, d_group_stride, k_time_stride,
            (tl.program_id(0) - tiles).to(tl.int64), num_queries, num_tokens, num_keys - num_tokens, num_blocks,
            GROUPS, D, D_PAD, SELECTION, BLOCKS)

# fmt: on


def index_loss_forward(
    q_idx: Tensor,
    k_idx: Tensor,
    q: Tensor,
    k: Tensor,
    sampled: Tensor,
    starts: Tensor,
    eligible: Tensor,
    geometry: Geometry,
    num_blocks: int,
    share_floor: float,
    least_mass: float,
    documents: Documents | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and recall, [2, B, M, G], fp32, of an index q_idx [B, T, G, Di], k_idx [B, S, Di], taught by q [B, T, H, D]
    and k [B, S, G, D] on a `choice_loss.Sample`; and for backward the gradient of the loss by the largest product of
    each block, fp32, and the place in its block of the first token that has it, `place_type`, both [B, M, G, whole
    lines of 16 blocks]. All are 0 where a query is not eligible, the latter two where a block is not free.
    """
    q, k, q_idx, keys = unit_stride(q), unit_stride(k), unit_stride(q_idx), unit_stride(k_idx[:, :, None])
    sampled, starts, eligible = sampled.contiguous(), starts.contiguous(), eligible.contiguous()
    batch, num_queries = sampled.shape
    num_heads, groups, block_lines = q.shape[2], k.shape[2], cdiv(num_blocks, LINE.value)
    width = block_lines * LINE.value
    products = q.new_empty(*sampled.shape, groups, width, dtype=torch.float32)
    places = torch.empty_like(products, dtype=place_type(geometry.selection_block_size))
    figures = q.new_empty(2, *sampled.shape, groups, dtype=torch.float32)
    # The teacher's sums of some queries at a time, [B, queries of the chunk, H, whole lines of blocks].
    chunks = query_chunks(num_queries, 4 * batch * num_heads * width, 1)
    log_sums = q.new_empty(chunks[0][1] * batch * num_heads * width, dtype=torch.float32)
    blocks = next_power_of_2(width)
    rows = max(1, LEAST_BLOCKS // blocks)
    for first_query, end_query in chunks:
        chunk = Chunk(first_query, end_query, k.shape[1] - q.shape[1], num_blocks, block_lines)
        student = q_idx, keys, products, places
        scale = q.shape[3] ** -0.5 * LOG2_E
        launch_block_scores(q, k, log_sums, sampled, geometry, documents, chunk, scale, student)
        num_rows = batch * (end_query - first_query) * groups
        index_loss_kernel[(cdiv(num_rows, rows),)](
            log_sums, products, places, *figures, sampled, starts, eligible, first_query, end_query, num_queries,
            num_rows, block_lines, q_idx.shape[-1] ** -0.5, share_floor, least_mass,
            GROUPS=groups, Q_PER_KV=num_heads // groups, SELECTION=geometry.selection_block_size,
            NUM_SELECTED=geometry.num_selected_blocks, INITIAL=geometry.num_initial_blocks,
            LOCAL=geometry.num_local_blocks, ROWS=rows, BLOCKS=blocks,
            num_warps=max(1, min(MAX_WARPS, rows * blocks // BLOCKS_OF_WARP)),
        )  # fmt: skip
    return figures, products, places


def index_loss_backward(
    d_figures: Tensor,
    d_products: Tensor,
    places: Tensor,
    q_idx: Tensor,
    k_idx: Tensor,
    sampled: Tensor,
    starts: Tensor,
    geometry: Geometry,
) -> tuple[Tensor, Tensor]:
    """Gradients of the index queries and keys, from what `index_loss_forward` returned and the gradients of its loss
    and recall, [2, B, M, G]; the recall's is not read.
    """
    q_idx, k_idx = unit_stride(q_idx), unit_stride(k_idx[:, :, None])[:, :, 0]
    sampled, starts = sampled.contiguous(), starts.contiguous()
    batch, num_tokens, groups, dim = q_idx.shape
    num_keys, d_losses = k_idx.shape[1], d_figures[0]
    num_queries, num_blocks = d_products.shape[1], d_products.shape[3]
    d_q, d_k = q_idx.new_empty(q_idx.shape), k_idx.new_empty(k_idx.shape)
    index_gradients_kernel[cdiv(num_keys, KEYS) + num_queries * groups, batch](
        d_losses, d_products, places, q_idx, k_idx, d_q, d_k, sampled, starts,
        *d_losses.stride(), *strides(q_idx), *k_idx.stride()[:2], num_queries, num_tokens, num_keys, num_blocks,
        GROUPS=groups, D=dim, D_PAD=max(16, next_power_of_2(dim)), SELECTION=geometry.selection_block_size,
        BLOCKS=BLOCKS, KEYS=KEYS, ROWS=ROWS,
        # 16-bit numbers are exact in TF32, and gradients keep their range.
        PRECISION="ieee" if q_idx.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return d_q, d_k
