"""Decoding's scores of an index: for each new token and group, the largest score of a block's visible tokens.

The rows of a program are (token, group) pairs of one sequence, which share the index keys. A tile of keys holds whole
selection blocks, each padded to a power of two, or is a part of a larger one. A maximum has the same bits in any order,
so that tiles go to programs as it suits. The choice from these scores is that of `choice`.
"""

import triton
import triton.language as tl

from trifocal.ops.decode.triton.common import load_once, load_rotated_parts, place_rows, prefetch_rows
from trifocal.ops.triton.dependent_launch import release_next, wait_for_inputs
from trifocal.ops.triton.index_scoring import as_importance
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.scoring import LINE


@Kernel
@triton.jit(do_not_specialize=["table_columns", "block_lines"])
def decode_index_kernel(
    q_idx, k_idx, cos, sin, lengths, num_new, block_table, scores,
    q_batch_stride, q_time_stride, q_head_stride, k_page_stride, k_row_stride, table_columns, block_lines,
    NEW: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr,
    SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr, PAGE_ROWS: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, TAPS: tl.constexpr, ONE_TILE: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Scores [B, T, G, blocks] of some tiles of BLOCKS blocks; none where all candidates are taken.

    ONE_TILE: every program has one at most, of one part.
    """
    release_next(DEPENDENT)
    batch = tl.program_id(2).to(tl.int64)
    block_table += batch * table_columns
    column = tl.arange(0, BLOCKS * TAPS)
    if DEPENDENT:
        # Keys of the past into the L2 cache; as in `attend`.
        past, first = tl.load(lengths + batch, volatile=True), tl.program_id(0) * (BLOCKS * SELECTION)
        if first < past:
            key = tl.minimum(first + column // TAPS * SELECTION + tl.minimum(column % TAPS, SELECTION - 1), past - 1)
            page = tl.load(block_table + key // PAGE_ROWS, volatile=True).to(tl.int64)
            prefetch_rows(k_idx, page * k_page_stride + key % PAGE_ROWS * k_row_stride, D)
    wait_for_inputs(DEPENDENT)
    length, new = tl.load(lengths + batch), tl.load(num_new + batch)
    token, group, position, exists = place_rows(tl.program_id(1) * ROWS, length, new, GROUPS, ROWS)
    num_keys = tl.where(new > 0, length + new, 0)
    blocks = tl.cdiv(num_keys, SELECTION)
    offsets = batch * q_batch_stride + token.to(tl.int64) * q_time_stride + group * q_head_stride
    if not ONE_TILE:
        q_1, q_2 = load_rotated_parts(q_idx, offsets, position, exists, cos, sin, D, D_1, D_2)
    out = scores + ((batch * NEW + token) * GROUPS + group)[:, None] * (block_lines * LINE)
    tiles = tl.where(blocks > NUM_SELECTED, tl.cdiv(blocks, BLOCKS), 0)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        largest = tl.full([ROWS, BLOCKS], float("-inf"), tl.float32)
        for part in tl.range(0, tl.cdiv(SELECTION, TAPS), num_stages=STAGES):
            in_block = part * TAPS + column % TAPS
            key = (tile * BLOCKS + column // TAPS) * SELECTION + in_block
            is_key = (in_block < SELECTION) & (key < num_keys)
            page = tl.load(block_table + key // PAGE_ROWS, mask=is_key, other=0).to(tl.int64)
            k_offsets = page * k_page_stride + key % PAGE_ROWS * k_row_stride
            k_1 = load_once(k_idx, k_offsets, is_key, 0, D_1, D)
            k_2 = k_1
            if D_2 > 0:
                k_2 = load_once(k_idx, k_offsets, is_key, D_1, D_2, D)
            if ONE_TILE:
                # Keys are asked for before the rows are made ready.
                q_1, q_2 = load_rotated_parts(q_idx, offsets, position, exists, cos, sin, D, D_1, D_2)
            found = tl.dot(q_1, tl.trans(k_1), input_precision="ieee")
            if D_2 > 0:
                found = tl.dot(q_2, tl.trans(k_2), found, input_precision="ieee")
            found = tl.where(is_key[None, :] & (key[None, :] <= position[:, None]), found, float("-inf"))
            largest = tl.maximum(largest, tl.max(tl.reshape(found, [ROWS, BLOCKS, TAPS]), 2))
        places = out + (tile * BLOCKS + tl.arange(0, BLOCKS))[None, :]
        tl.store(places, as_importance(largest), mask=exists[:, None])
