"""Kernels of the loss that teaches the choice; `trifocal.ops.choice_loss` says what the loss is.

Teacher. The masses of blocks are sums of a softmax over the whole past. The kernel of `index_scoring` makes, for every
head, log2 of each block's sum of exponentials, in one pass over the keys; the second kernel here adds a row of them to
the log-sum-exp and the heads' shares to masses. At 65,536 tokens, 64/4 heads of 128 and one query in 64 that is 0.55
TFLOP, 2.1e9 exponentials and 0.27 GB of block sums written and read, 0.09 ms on an H100. A second pass over the keys
instead would be another 0.55 TFLOP, 0.75 ms, and would make a long past one program's work. Sums exist for a chunk of
queries at a time.

Student with an index. Forward keeps the token that has a block's largest score; its products alone have a gradient.

| kernel | a program holds | it loops over | in and out of memory |
|---|---|---|---|
| d_q | d_q of a row (query, group) | blocks: the gradient times the key of its token | a key, 8 bytes a row and block |
| d_k | d_k of a tile of keys | rows: their gradients at their tokens, a matrix, times q | q, 8 bytes a row and block |

Rows are added in their order: equal bits in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents
from trifocal.ops.tiles import cdiv, next_power_of_2
from trifocal.ops.triton.common import LOG2_E, LOWEST, strides, unit_stride
from trifocal.ops.triton.index_scoring import launch_block_scores
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.scoring import LINE, Chunk, query_chunks

# Blocks that the masses and d_q take at a time.
BLOCKS = 64
# Keys and rows of a tile of d_k.
KEYS = 64
ROWS = 64

# fmt: off

@Kernel
@triton.jit(do_not_specialize=["first_query", "end_query", "num_queries", "num_blocks", "block_lines"])
def block_masses_kernel(
    log_sums, masses, sampled, starts, first_query, end_query, num_queries, num_blocks, block_lines,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, HEADS: tl.constexpr, SELECTION: tl.constexpr,
    NUM_SELECTED: tl.constexpr, BLOCKS: tl.constexpr,
):
    """Masses [B, M, G, J] of one query and group of a chunk; zeros if the query may take all its candidates."""
    chunk_queries = end_query - first_query
    row = tl.program_id(0).to(tl.int64)
    query = (row // GROUPS // chunk_queries) * num_queries + first_query + (row // GROUPS) % chunk_queries
    position = (tl.load(sampled + query) - tl.load(starts + query)).to(tl.int32)
    candidates = position // SELECTION + 1
    candidates = tl.where(candidates > NUM_SELECTED, candidates, 0)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCKS)[None, :]
    log_sums += (row * Q_PER_KV + head) * (block_lines * LINE) + column
    running_max = tl.full([HEADS], LOWEST, tl.float32)
    running_sum = tl.zeros([HEADS], tl.float32)
    for first_block in range(0, candidates, BLOCKS):
        seen = (head < Q_PER_KV) & (column < candidates - first_block)
        log_sum = tl.load(log_sums + first_block, mask=seen, other=float("-inf"))
        new_max = tl.maximum(running_max, tl.max(log_sum, 1))
        running_sum = running_sum * tl.exp2(running_max - new_max) + tl.sum(tl.exp2(log_sum - new_max[:, None]), 1)
        running_max = new_max
    lse = running_max + tl.log2(tl.where(running_sum > 0, running_sum, 1.0))
    masses += (query * GROUPS + row % GROUPS) * num_blocks
    block = tl.arange(0, BLOCKS)
    for first_block in range(0, num_blocks, BLOCKS):
        seen = (head < Q_PER_KV) & (column < candidates - first_block)
        log_sum = tl.load(log_sums + first_block, mask=seen, other=float("-inf"))
        mass = tl.sum(tl.exp2(log_sum - lse[:, None]), 0) / Q_PER_KV
        tl.store(masses + first_block + block, mass, mask=block < num_blocks - first_block)


@Kernel
@triton.jit(do_not_specialize=["num_blocks"])
def index_d_q_kernel(
    d_scores, places, k, d_q, sampled, starts, k_batch_stride, k_time_stride, num_queries, num_blocks,
    GROUPS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SELECTION: tl.constexpr, BLOCKS: tl.constexpr,
):
    """d_q of one row (batch, query, group)."""
    row = tl.program_id(0).to(tl.int64)
    query = row // GROUPS
    start = tl.load(starts + query)
    position = tl.load(sampled + query) - start
    k += (query // num_queries) * k_batch_stride
    column = tl.arange(0, D_PAD)
    total = tl.zeros([D_PAD], tl.float32)
    for first_block in range(0, num_blocks, BLOCKS):
        block = first_block + tl.arange(0, BLOCKS)
        in_past = (block < num_blocks) & (block * SELECTION <= position)
        d_score = tl.load(d_scores + row * num_blocks + block, mask=in_past, other=0.0)
        taught = d_score != 0
        token = start + block * SELECTION + tl.load(places + row * num_blocks + block, mask=taught, other=0)
        keys = tl.load(
            k + token[:, None] * k_time_stride + column[None, :], mask=taught[:, None] & (column < D)[None, :],
            other=0.0)
        total += tl.sum(d_score[:, None] * keys.to(tl.float32), 0)
    tl.store(d_q + row * D + column, total.to(d_q.dtype.element_ty), mask=column < D)


@Kernel
@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_blocks"])
def index_d_k_kernel(
    d_scores, places, q, d_k, sampled, starts, q_batch_stride, q_time_stride, q_head_stride,
    num_queries, num_keys, num_blocks,
    GROUPS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SELECTION: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):
    """d_k of a tile of keys. A tile overlaps `KEYS // SELECTION + 2` blocks of a document at most."""
    first_key = tl.program_id(0) * KEYS
    batch = tl.program_id(1).to(tl.int64)
    key = tl.arange(0, KEYS)
    column = tl.arange(0, D_PAD)
    q += batch * q_batch_stride
    d_scores += batch * num_queries * GROUPS * num_blocks
    places += batch * num_queries * GROUPS * num_blocks
    total = tl.zeros([KEYS, D_PAD], tl.float32)
    for first_row in range(0, num_queries * GROUPS, ROWS):
        row = first_row + tl.arange(0, ROWS)
        query = row // GROUPS
        exists = query < num_queries
        start = tl.load(starts + batch * num_queries + query, mask=exists, other=0).to(tl.int32)
        token = tl.load(sampled + batch * num_queries + query, mask=exists, other=-1).to(tl.int32)
        if (tl.max(token) >= first_key) & (tl.min(start) < first_key + KEYS):
            weights = tl.zeros([KEYS, ROWS], tl.float32)
            for number in tl.static_range((KEYS + SELECTION - 2) // SELECTION + 1):
                # The first block that reaches behind the tile's first key, and those after it.
                block = tl.maximum(first_key - start, 0) // SELECTION + number
                there = exists & (block < num_blocks) & (
                    start + block * SELECTION <= tl.minimum(token, first_key + KEYS - 1))
                place = row.to(tl.int64) * num_blocks + block
                d_score = tl.load(d_scores + place, mask=there, other=0.0)
                best = start + block * SELECTION + tl.load(places + place, mask=there & (d_score != 0), other=0)
                weights += tl.where((best - first_key)[None, :] == key[:, None], d_score[None, :], 0.0)
            rows = tl.load(
                q + (query * q_time_stride + (row % GROUPS) * q_head_stride)[:, None] + column[None, :],
                mask=exists[:, None] & (column < D)[None, :], other=0.0)
            total = tl.dot(weights, rows.to(tl.float32), total, input_precision=PRECISION)
    out = d_k + (batch * num_keys + first_key + key)[:, None] * D + column[None, :]
    tl.store(
        out, total.to(d_k.dtype.element_ty),
        mask=(key < num_keys - first_key)[:, None] & (column < D)[None, :])

# fmt: on


def teacher_masses_forward(
    q: Tensor,
    k: Tensor,
    sampled: Tensor,
    starts: Tensor,
    geometry: Geometry,
    num_blocks: int,
    documents: Documents | None,
) -> Tensor:
    """Attention of sampled queries over their whole past by selection block, the mean over a group's heads.

    Args:
        q: The sampled queries, [B, M, H, D].
        k: Keys, [B, S, G, D].
        sampled: The queries' tokens, [B, M], int64, ascending.
        starts: The first token of each one's document, [B, M], int64.
        geometry: Block sizes, in tokens.
        num_blocks: J, blocks that a document can have.
        documents: Packed documents; None for one sequence a batch entry.

    Returns:
        [B, M, G, J], fp32; zeros for queries that may take all their candidates.
    """
    q, k = unit_stride(q), unit_stride(k)
    batch, num_queries, num_heads, dim = q.shape
    groups, q_per_kv = k.shape[2], num_heads // k.shape[2]
    block_lines = cdiv(num_blocks, LINE.value)
    row_numbers = batch * num_heads * block_lines * LINE.value
    masses = q.new_empty(batch, num_queries, groups, num_blocks, dtype=torch.float32)
    chunks = query_chunks(num_queries, 4 * row_numbers, 1)
    log_sums = q.new_empty(chunks[0][1] * row_numbers, dtype=torch.float32)
    for first_query, end_query in chunks:
        chunk = Chunk(first_query, end_query, 0, num_blocks, block_lines)
        scale = dim**-0.5 * LOG2_E
        launch_block_scores(q, k, log_sums, log_sums, sampled, geometry, documents, chunk, scale, "teacher")
        block_masses_kernel[(batch * (end_query - first_query) * groups,)](
            log_sums, masses, sampled, starts, first_query, end_query, num_queries, num_blocks, block_lines,
            GROUPS=groups, Q_PER_KV=q_per_kv, HEADS=next_power_of_2(q_per_kv), SELECTION=geometry.selection_block_size,
            NUM_SELECTED=geometry.num_selected_blocks, BLOCKS=BLOCKS,
        )  # fmt: skip
    return masses


def index_scores_forward(
    q_idx: Tensor,
    k_idx: Tensor,
    sampled: Tensor,
    starts: Tensor,
    geometry: Geometry,
    num_blocks: int,
    documents: Documents | None,
) -> tuple[Tensor, Tensor]:
    """The largest index score of each block of sampled queries' pasts, and the token that has it.

    Args:
        q_idx: Index queries of the sample, [B, M, G, Di].
        k_idx: Index keys, [B, S, Di].
        sampled, starts, geometry, num_blocks, documents: As in `teacher_masses_forward`.

    Returns:
        Scores, fp32, and the place in its block of the first such token, int32, both [B, M, G, J]; 0 for queries that
        may take all their candidates, and whatever number for blocks behind a query's own.
    """
    q_idx, k_idx = unit_stride(q_idx), unit_stride(k_idx[:, :, None])
    block_lines = cdiv(num_blocks, LINE.value)
    scores = q_idx.new_zeros(*q_idx.shape[:3], block_lines * LINE.value, dtype=torch.float32)
    places = torch.zeros_like(scores, dtype=torch.int32)
    chunk = Chunk(0, q_idx.shape[1], 0, num_blocks, block_lines)
    launch_block_scores(q_idx, k_idx, scores, places, sampled, geometry, documents, chunk, 1.0, "student")
    return scores[..., :num_blocks].contiguous(), places[..., :num_blocks].contiguous()


def index_scores_backward(
    d_scores: Tensor, places: Tensor, q_idx: Tensor, k_idx: Tensor, sampled: Tensor, starts: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """Gradients of the index queries and keys of `index_scores_forward`.

    Args:
        d_scores: Gradient of the scores, [B, M, G, J], fp32; not read for blocks behind a query's own.
        places: From forward.
        q_idx, k_idx, sampled, starts, geometry: As given to forward.
    """
    q_idx, k_idx, d_scores = unit_stride(q_idx), unit_stride(k_idx[:, :, None])[:, :, 0], d_scores.contiguous()
    batch, num_queries, groups, dim = q_idx.shape
    num_keys, num_blocks = k_idx.shape[1], d_scores.shape[-1]
    d_q, d_k = q_idx.new_empty(q_idx.shape), k_idx.new_empty(k_idx.shape)
    sizes = {"GROUPS": groups, "D": dim, "D_PAD": max(16, next_power_of_2(dim))}
    index_d_q_kernel[(batch * num_queries * groups,)](
        d_scores, places, k_idx, d_q, sampled, starts, *k_idx.stride()[:2], num_queries, num_blocks,
        **sizes, SELECTION=geometry.selection_block_size, BLOCKS=BLOCKS,
    )  # fmt: skip
    index_d_k_kernel[cdiv(num_keys, KEYS), batch](
        d_scores, places, q_idx, d_k, sampled, starts, *strides(q_idx), num_queries, num_keys, num_blocks,
        **sizes, SELECTION=geometry.selection_block_size, KEYS=KEYS, ROWS=ROWS,
        # 16-bit numbers are exact in TF32, and gradients keep their range.
        PRECISION="ieee" if q_idx.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return d_q, d_k
