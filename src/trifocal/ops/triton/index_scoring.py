"""Block scores of index heads: for every query and group, the largest score of a block's visible tokens.

Each KV group has one index query; all groups share one index key a token. A tile's rows are (query, group) pairs, so a
tile of keys is loaded once for all groups. A program holds a tile of rows and goes through lines of 16 blocks, a block
at a time: one product, one maximum over the block's tokens, no exponential, and nothing of the size of a score is
written. Blocks wholly in the past of all rows need no mask; they come first.

FLOPs: `T * S * G * Di` (half of the scores are visible). From memory, per program: its keys once; 4 bytes a row and
block out. The choice from these scores is that of `scoring`.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import dispatch
from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents
from trifocal.ops.tiles import cdiv, next_power_of_2, split_width
from trifocal.ops.triton.common import load_tile, strides, unit_stride
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.scoring import LINE, launch_choice
from trifocal.ops.triton.selected.block_csr import default_documents

# Lines of blocks that a program goes through: enough that its start is small beside it.
LINES_OF_PROGRAM = 4
# Most keys of a product.
MOST_KEYS = 64

# fmt: off

@triton.jit
def as_importance(score):
    """A non-negative number with the order of the scores, for the choice, which compares the bits of such numbers.

    The last bit of a score is lost: scores that differ in it alone count as equal.
    """
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((ordered >> 1) + 0x40000000).to(tl.float32, bitcast=True)


@triton.jit
def block_maximum(
    q_1, q_2, k_idx, first_token, row_end, k_time_stride,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, SELECTION: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The largest score of one block's tokens for each row; MASKED: of those before `row_end`."""
    largest = tl.full([q_1.shape[0]], float("-inf"), tl.float32)
    for part in tl.static_range((SELECTION + KEYS - 1) // KEYS):
        in_block = part * KEYS + tl.arange(0, KEYS)
        token = first_token + in_block
        keep = in_block < SELECTION
        if MASKED:
            keep = keep & (token < tl.max(row_end))
        offsets = token.to(tl.int64) * k_time_stride
        k_1 = load_tile(k_idx, offsets, keep, 0, D_1, D, MASKED or (part + 1) * KEYS > SELECTION)
        scores = tl.dot(q_1, tl.trans(k_1), input_precision="ieee")
        if D_2 > 0:
            k_2 = load_tile(k_idx, offsets, keep, D_1, D_2, D, MASKED or (part + 1) * KEYS > SELECTION)
            scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(keep[None, :] & (token[None, :] < row_end[:, None]), scores, float("-inf"))
        elif (part + 1) * KEYS > SELECTION:
            scores = tl.where(keep[None, :], scores, float("-inf"))
        largest = tl.maximum(largest, tl.max(scores, 1))
    return largest


@Kernel
@triton.jit(do_not_specialize=["first_query", "end_query", "query_shift", "block_lines"])
def index_scores_kernel(
    q_idx, k_idx, scores, ids, positions, cu_seqlens,
    q_batch_stride, q_time_stride, q_head_stride, k_batch_stride, k_time_stride,
    first_query, end_query, query_shift, block_lines,
    GROUPS: tl.constexpr, D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, SELECTION: tl.constexpr,
    NUM_SELECTED: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, LINES: tl.constexpr,
):
    """Scores [B, queries of the chunk, G, num_blocks] of some lines of blocks, for one tile of rows.

    Queries that may take all their candidates need no scores; tiles of such queries do nothing.
    """
    # The longest past first.
    first_row = first_query * GROUPS + (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    row = first_row + tl.arange(0, ROWS)
    query = row // GROUPS
    exists = query < end_query
    batch = tl.program_id(2).to(tl.int64)
    token = query + query_shift
    position = token
    first_document = 0
    last_document = 0
    if PACKED:
        position = tl.load(positions + token, mask=exists, other=0)
        document_of_row = tl.load(ids + token, mask=exists, other=-1)
        first_document = tl.load(ids + first_row // GROUPS + query_shift)
        last_document = tl.max(document_of_row)
    q_offsets = query.to(tl.int64) * q_time_stride + (row % GROUPS) * q_head_stride
    q_1 = load_tile(q_idx + batch * q_batch_stride, q_offsets, exists, 0, D_1, D, True)
    q_2 = q_1
    if D_2 > 0:
        q_2 = load_tile(q_idx + batch * q_batch_stride, q_offsets, exists, D_1, D_2, D, True)
    k_idx += batch * k_batch_stride
    out = scores + (batch * (end_query - first_query) * GROUPS + row - first_query * GROUPS)[:, None] * (
        block_lines * LINE) + tl.arange(0, LINE)[None, :]
    column = tl.arange(0, LINE)[None, :]

    for document in range(first_document, last_document + 1):
        in_document = exists
        start = 0 * document
        if PACKED:
            in_document = exists & (document_of_row == document)
            start = tl.load(cu_seqlens + document)
        row_end = tl.where(in_document, start + position + 1, 0)
        candidates = tl.max(tl.where(in_document, position // SELECTION + 1, 0))
        # Blocks that all rows see whole.
        whole = tl.min(tl.where(in_document, position + 1, 2147483647)) // SELECTION
        first_line = tl.program_id(1) * LINES
        end_line = tl.minimum(first_line + LINES, tl.cdiv(candidates, LINE))
        end_line = tl.where(candidates > NUM_SELECTED, end_line, first_line)
        whole_line = tl.maximum(tl.minimum(whole // LINE, end_line), first_line)
        for line in range(first_line, whole_line):
            largest = tl.full([ROWS, LINE], float("-inf"), tl.float32)
            for place in range(LINE):
                of_block = block_maximum(
                    q_1, q_2, k_idx, start + (line * LINE + place) * SELECTION, row_end, k_time_stride,
                    D, D_1, D_2, SELECTION, KEYS, False)
                largest = tl.where(column == place, of_block[:, None], largest)
            tl.store(out + line * LINE, as_importance(largest), mask=in_document[:, None])
        for line in range(whole_line, end_line):
            largest = tl.full([ROWS, LINE], float("-inf"), tl.float32)
            for place in range(tl.minimum(candidates - line * LINE, LINE)):
                of_block = block_maximum(
                    q_1, q_2, k_idx, start + (line * LINE + place) * SELECTION, row_end, k_time_stride,
                    D, D_1, D_2, SELECTION, KEYS, True)
                largest = tl.where(column == place, of_block[:, None], largest)
            tl.store(out + line * LINE, as_importance(largest), mask=in_document[:, None])

# fmt: on


def select_blocks_by_index_forward(
    q_idx: Tensor, k_idx: Tensor, geometry: Geometry, num_keys: int, documents: Documents | None
) -> Tensor:
    """Choose the selection blocks of every query and group by the largest index score of their tokens.

    Args:
        q_idx: Index queries, [B, T, G, Di]; the last T positions of `num_keys` tokens.
        k_idx: Index keys, [B, S, Di].
        geometry: Block sizes, in tokens.
        num_keys: Tokens, S.
        documents: Packed documents; None for one sequence a batch entry.

    Returns:
        Block indices, [B, T, G, N], int32, ascending; -1 pads.
    """
    q_idx = unit_stride(q_idx)
    k_idx = k_idx if k_idx.stride(-1) == 1 else k_idx.contiguous()
    batch, num_queries, groups, dim = q_idx.shape
    selected_blocks = q_idx.new_empty(batch, num_queries, groups, geometry.num_selected_blocks, dtype=torch.int32)
    shift, widths, tile = num_keys - num_queries, split_width(dim), dispatch.index_tile(q_idx)
    ids, positions, cu_seqlens = default_documents(documents, selected_blocks)
    # No block reaches over into the next: the choice reads one part of the importance.
    geometry = dataclasses.replace(geometry, compression_block_size=geometry.compression_stride)
    num_blocks = geometry.num_selection_blocks(num_keys)
    block_lines = cdiv(num_blocks, LINE.value)
    row_bytes = 4 * batch * groups * block_lines * LINE.value
    scored = num_blocks > geometry.num_selected_blocks
    chunk_queries = num_queries
    if scored:
        chunk_queries = min(num_queries, max(tile.BLOCK_M, dispatch.IMPORTANCE_BUFFER_BYTES // row_bytes))
    scores = q_idx.new_empty(chunk_queries * row_bytes // 4 if scored else 1, dtype=torch.float32)
    for first_query in range(0, num_queries, chunk_queries):
        end_query = min(first_query + chunk_queries, num_queries)
        reachable = num_blocks
        if documents is None:
            reachable = min(num_blocks, geometry.num_selection_blocks(shift + end_query))
        if reachable > geometry.num_selected_blocks:
            grid = (
                cdiv((end_query - first_query) * groups, tile.BLOCK_M),
                cdiv(cdiv(reachable, LINE.value), LINES_OF_PROGRAM),
                batch,
            )
            index_scores_kernel[grid](
                q_idx, k_idx, scores, ids, positions, cu_seqlens,
                *strides(q_idx), 0 if batch == 1 else k_idx.stride(0), k_idx.stride(1),
                first_query, end_query, shift, block_lines,
                GROUPS=groups, D=widths.size, D_1=widths.part_1, D_2=widths.part_2,
                SELECTION=geometry.selection_block_size, NUM_SELECTED=geometry.num_selected_blocks,
                PACKED=documents is not None, ROWS=tile.BLOCK_M,
                KEYS=min(MOST_KEYS, next_power_of_2(geometry.selection_block_size)), LINES=LINES_OF_PROGRAM,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        launch_choice(
            scores, scores, selected_blocks, positions, geometry, first_query, end_query, shift, reachable, block_lines,
            packed=documents is not None,
        )  # fmt: skip
    return selected_blocks
