"""Scores of selection blocks by their tokens: one number a block from the products of a query and its visible keys.

| purpose | rows | number |
|---|---|---|
| choice | every query; one index query a group, one index key a token for all groups | the largest product |
| teacher | the loss's sampled queries; the selected branch's own heads and keys | log2 of the sum of exponentials |
| student | the same queries, in the same launch; heads of the choice | the largest product, and which token has it |
"""

import dataclasses
import math

import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import tiles
from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents
from trifocal.ops.tiles import cdiv, named_widths, next_power_of_2
from trifocal.ops.triton.common import LOWEST, load_and_multiply, load_parts, strides, unit_stride
from trifocal.ops.triton.documents import default_documents
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.scoring import LINE, Chunk, choose_in_chunks

# Pieces that a program goes through, and blocks of a piece. The first are enough that a program's start is small beside
# it; the others are for calls in which that makes fewer programs than four for each multiprocessor of a Hopper GPU:
# what such a call takes is the time of one program.
PIECES_OF_PROGRAM = ((4, 16), (1, 16), (1, 4))
ENOUGH_PROGRAMS = 512

# fmt: off

@triton.jit
def as_importance(score):
    """A non-negative number with the order of the scores, for the choice, which compares the bits of such numbers.

    The last bit of a score is lost: scores that differ only in it count as equal.
    """
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((ordered >> 1) + 0x40000000).to(tl.float32, bitcast=True)


@triton.jit
def score_block(
    queries, k, first_token, row_end, k_time_stride, score_scale,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, SELECTION: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, PURPOSE: tl.constexpr,
):
    """The score of one block for each row, and the place of the block's first token that has it; MASKED: of the tokens
    before `row_end`."""
    largest = tl.full([queries[0].shape[0]], float("-inf"), tl.float32)
    if PURPOSE == "teacher":
        largest = tl.full([queries[0].shape[0]], LOWEST, tl.float32)
    total = tl.zeros([queries[0].shape[0]], tl.float32)
    place = tl.zeros([queries[0].shape[0]], tl.int32)
    for part in tl.static_range((SELECTION + KEYS - 1) // KEYS):
        in_block = part * KEYS + tl.arange(0, KEYS)
        token = first_token + in_block
        keep = in_block < SELECTION
        if MASKED:
            keep = keep & (token < tl.max(row_end))
        offsets = token.to(tl.int64) * k_time_stride
        scores, _keys = load_and_multiply(
            queries, k, offsets, keep, D, D_1, D_2, MASKED or (part + 1) * KEYS > SELECTION)
        if MASKED:
            scores = tl.where(keep[None, :] & (token[None, :] < row_end[:, None]), scores, float("-inf"))
        elif (part + 1) * KEYS > SELECTION:
            scores = tl.where(keep[None, :], scores, float("-inf"))
        if PURPOSE == "teacher":
            new_max = tl.maximum(largest, tl.max(scores, 1) * score_scale)
            p = tl.exp2(scores * score_scale - new_max[:, None])
            total = total * tl.exp2(largest - new_max) + tl.sum(p, 1)
            largest = new_max
        elif PURPOSE == "student":
            of_part, first = tl.max(scores, 1, return_indices=True)
            place = tl.where(of_part > largest, part * KEYS + first, place)
            largest = tl.maximum(largest, of_part)
        else:
            largest = tl.maximum(largest, tl.max(scores, 1))
    if PURPOSE == "teacher":
        largest += tl.log2(tl.where(total > 0, total, 1.0))
    return largest, place


@triton.jit
def score_piece(
    queries, k, first_token, blocks, row_end, out, places, keep, k_time_stride, score_scale,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, SELECTION: tl.constexpr, KEYS: tl.constexpr,
    PIECE: tl.constexpr, MASKED: tl.constexpr, PURPOSE: tl.constexpr,
):
    """Write the scores of a piece, of which `blocks` exist."""
    column = tl.arange(0, PIECE)[None, :]
    scores = tl.full([queries[0].shape[0], PIECE], float("-inf"), tl.float32)
    best = tl.zeros([queries[0].shape[0], PIECE], tl.int32)
    for number in range(blocks):
        of_block, place = score_block(
            queries, k, first_token + number * SELECTION, row_end, k_time_stride, score_scale,
            D, D_1, D_2, SELECTION, KEYS, MASKED, PURPOSE)
        scores = tl.where(column == number, of_block[:, None], scores)
        if PURPOSE == "student":
            best = tl.where(column == number, place[:, None], best)
    if PURPOSE == "choice":
        scores = as_importance(scores)
    tl.store(out, scores, mask=keep[:, None])
    if PURPOSE == "student":
        tl.store(places, best, mask=keep[:, None])


@triton.jit
def score_tile(
    q, k, scores, places, sampled, ids, positions, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride, k_batch_stride, k_time_stride, k_head_stride,
    first_query, end_query, num_queries, query_shift, block_lines, score_scale, entry_and_group,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr,
    SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr, PACKED: tl.constexpr, PURPOSE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):
    """Scores of some pieces of blocks, for one tile of rows: [B, queries of the chunk, heads, num_blocks].

    The purpose is "choice", or "teacher" or "student": then the queries are those of the tokens `sampled`, [B, M],
    ascending, and M is `num_queries`. The student's scores are those of all M queries, since backward needs them.
    Queries that may take all their candidates need no scores; tiles of such queries, or of none, do nothing.
    """
    # The longest past first.
    first_row = first_query * Q_PER_KV + (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    row = first_row + tl.arange(0, ROWS)
    query = row // Q_PER_KV
    exists = query < end_query
    batch = (entry_and_group // GROUPS).to(tl.int64)
    group = entry_and_group % GROUPS
    token = query + query_shift
    first_token = first_row // Q_PER_KV + query_shift
    if PURPOSE != "choice":
        sampled += batch * num_queries
        token = tl.load(sampled + query, mask=exists, other=0).to(tl.int32)
        first_token = tl.load(sampled + first_row // Q_PER_KV, mask=first_row // Q_PER_KV < end_query, other=0)
        first_token = first_token.to(tl.int32)
    position = token
    first_document = 0
    last_document = 0
    if PACKED:
        position = tl.load(positions + token, mask=exists, other=0)
        document_of_row = tl.load(ids + token, mask=exists, other=-1)
        first_document = tl.load(ids + first_token)
        last_document = tl.max(document_of_row)
    q += batch * q_batch_stride + group * Q_PER_KV * q_head_stride
    q_offsets = (token - query_shift).to(tl.int64) * q_time_stride + (row % Q_PER_KV) * q_head_stride
    queries = load_parts(q, q_offsets, exists, D, D_1, D_2, True)
    k += batch * k_batch_stride + group * k_head_stride
    # Rows [B, queries of the chunk, G, heads of a group].
    out_row = (batch * (end_query - first_query) + query - first_query) * GROUPS + group
    if PURPOSE == "student":
        out_row = (batch * num_queries + query) * GROUPS + group
    place = (out_row * Q_PER_KV + row % Q_PER_KV)[:, None] * (block_lines * LINE) + tl.arange(0, PIECE)[None, :]

    for document in range(first_document, last_document + 1):
        in_document = exists
        start = 0 * document
        if PACKED:
            in_document = exists & (document_of_row == document)
            start = tl.load(cu_seqlens + document)
        row_end = tl.where(in_document, start + position + 1, 0)
        # Not more than there is room for, where the longest document's length was given too small.
        candidates = tl.minimum(tl.max(tl.where(in_document, position // SELECTION + 1, 0)), block_lines * LINE)
        # Blocks that all rows see whole.
        whole = tl.min(tl.where(in_document, position + 1, 2147483647)) // SELECTION
        first_piece = tl.program_id(1) * PIECES
        end_piece = tl.minimum(first_piece + PIECES, tl.cdiv(candidates, PIECE))
        end_piece = tl.where(candidates > NUM_SELECTED, end_piece, first_piece)
        whole_piece = tl.maximum(tl.minimum(whole // PIECE, end_piece), first_piece)
        for piece in range(first_piece, whole_piece):
            score_piece(
                queries, k, start + piece * PIECE * SELECTION, PIECE, row_end, scores + place + piece * PIECE,
                places + place + piece * PIECE, in_document, k_time_stride, score_scale,
                D, D_1, D_2, SELECTION, KEYS, PIECE, False, PURPOSE)
        for piece in range(whole_piece, end_piece):
            score_piece(
                queries, k, start + piece * PIECE * SELECTION, tl.minimum(candidates - piece * PIECE, PIECE),
                row_end, scores + place + piece * PIECE, places + place + piece * PIECE, in_document, k_time_stride,
                score_scale, D, D_1, D_2, SELECTION, KEYS, PIECE, True, PURPOSE)


@Kernel
@triton.jit(do_not_specialize=["first_query", "end_query", "num_queries", "query_shift", "block_lines"])
def block_scores_kernel(
    q, k, scores, sampled, ids, positions, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride, k_batch_stride, k_time_stride, k_head_stride,
    first_query, end_query, num_queries, query_shift, block_lines, score_scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr,
    SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):
    """Scores for the choice."""
    score_tile(
        q, k, scores, scores, sampled, ids, positions, cu_seqlens,
        q_batch_stride, q_time_stride, q_head_stride, k_batch_stride, k_time_stride, k_head_stride,
        first_query, end_query, num_queries, query_shift, block_lines, score_scale, tl.program_id(2),
        GROUPS, Q_PER_KV, D, D_1, D_2, SELECTION, NUM_SELECTED, PACKED, "choice", ROWS, KEYS, PIECE, PIECES)


@Kernel
@triton.jit(do_not_specialize=["first_query", "end_query", "num_queries", "query_shift", "block_lines"])
def loss_scores_kernel(
    q, k, log_sums, q_idx, k_idx, products, places, sampled, ids, positions, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride, k_batch_stride, k_time_stride, k_head_stride,
    q_idx_batch_stride, q_idx_time_stride, q_idx_head_stride, k_idx_batch_stride, k_idx_time_stride,
    first_query, end_query, num_queries, query_shift, block_lines, score_scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr,
    INDEX_D: tl.constexpr, INDEX_D_1: tl.constexpr, INDEX_D_2: tl.constexpr,
    SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):
    """Scores of the teacher, by the first programs, and of the student, whose heads share all keys."""
    teachers = tl.num_programs(2) // (GROUPS + 1) * GROUPS
    if tl.program_id(2) < teachers:
        score_tile(
            q, k, log_sums, log_sums, sampled, ids, positions, cu_seqlens,
            q_batch_stride, q_time_stride, q_head_stride, k_batch_stride, k_time_stride, k_head_stride,
            first_query, end_query, num_queries, query_shift, block_lines, score_scale, tl.program_id(2),
            GROUPS, Q_PER_KV, D, D_1, D_2, SELECTION, NUM_SELECTED, PACKED, "teacher", ROWS, KEYS, PIECE, PIECES)
    else:
        score_tile(
            q_idx, k_idx, products, places, sampled, ids, positions, cu_seqlens,
            q_idx_batch_stride, q_idx_time_stride, q_idx_head_stride, k_idx_batch_stride, k_idx_time_stride, 0,
            first_query, end_query, num_queries, query_shift, block_lines, 1.0, tl.program_id(2) - teachers,
            1, GROUPS, INDEX_D, INDEX_D_1, INDEX_D_2, SELECTION, NUM_SELECTED, PACKED, "student",
            ROWS, KEYS, PIECE, PIECES)

# fmt: on


def launch_block_scores(
    q: Tensor,
    k: Tensor,
    scores: Tensor,
    sampled: Tensor,
    geometry: Geometry,
    documents: Documents | None,
    chunk: Chunk,
    scale: float = 1.0,
    student: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Write the scores of a chunk of queries, [B, queries of the chunk, H, lines of 16 blocks].

    They are those of the choice, or with a student those of the loss: q [B, T, H, D], k [B, S, G, D] and `scale`, in
    base 2, are then the teacher's, and `sampled` the queries' tokens, [B, M], int64, ascending. The student is index
    queries [B, T, G, Di] and keys [B, S, 1, Di], and buffers of all sampled queries for their scores and for the
    block's token of each, [B, M, G, lines of 16 blocks].
    """
    tile = tiles.index_tile(q)
    groups, q_per_kv = k.shape[2], q.shape[2] // k.shape[2]
    heads, sharing = (q_per_kv, groups) if student is None else (max(q_per_kv, groups), groups + 1)
    row_tiles = cdiv((chunk.end_query - chunk.first_query) * heads, tile.BLOCK_M)
    for pieces, piece in PIECES_OF_PROGRAM:
        grid = row_tiles, cdiv(chunk.reachable, pieces * piece), q.shape[0] * sharing
        if math.prod(grid) >= ENOUGH_PROGRAMS:
            break
    where = sampled, *default_documents(documents, sampled), *strides(q), *strides(k)
    numbers = chunk.first_query, chunk.end_query, sampled.shape[-1], chunk.query_shift, chunk.block_lines, scale
    constants = {
        "GROUPS": groups, "Q_PER_KV": q_per_kv, **named_widths(D=q.shape[3]),
        "SELECTION": geometry.selection_block_size, "NUM_SELECTED": geometry.num_selected_blocks,
        "PACKED": documents is not None, "ROWS": tile.BLOCK_M,
        "KEYS": min(tile.BLOCK_N, next_power_of_2(geometry.selection_block_size)), "PIECE": piece, "PIECES": pieces,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    if student is None:
        block_scores_kernel[grid](q, k, scores, *where, *numbers, **constants)
        return
    q_idx, k_idx, products, places = student
    loss_scores_kernel[grid](
        q, k, scores, q_idx, k_idx, products, places, *where, *strides(q_idx), *strides(k_idx)[:2], *numbers,
        **named_widths(INDEX_D=q_idx.shape[3]), **constants,
    )  # fmt: skip


def select_blocks_by_index_forward(
    q_idx: Tensor, k_idx: Tensor, geometry: Geometry, documents: Documents | None
) -> Tensor:
    """The choice, [B, T, G, N], int32, by index queries [B, T, G, Di], the last T positions, and keys [B, S, Di]."""
    q_idx, k_idx = unit_stride(q_idx), unit_stride(k_idx[:, :, None])

    def score(chunk: Chunk, scores: Tensor) -> None:
        launch_block_scores(q_idx, k_idx, scores, scores, geometry, documents, chunk)

    # No block reaches over into the next: the choice reads one part of the importance.
    geometry = dataclasses.replace(geometry, compression_block_size=geometry.compression_stride)
    shape, tile = (*q_idx.shape[:3],), tiles.index_tile(q_idx)
    return choose_in_chunks(score, 1, shape, k_idx.shape[1], geometry, documents, tile.BLOCK_M, q_idx.device)
