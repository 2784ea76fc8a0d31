"""Decoding's scores of an index: for each new token and group, the largest score of a block's visible tokens.

The rows of a program are (token, group) pairs of one sequence, which share the index keys. A tile of keys holds whole
selection blocks, each padded to a power of two, or is a part of a larger one. A maximum has the same bits in any order,
so that tiles go to programs as it suits. The choice from these scores is that of `choice`.

These programs are of `append`'s kernel. Blocks that are always chosen need no score: where every new key lies in one,
the launch that writes it scores the past; else another follows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import dispatch, tiles
from trifocal.ops.decode.caches import DecodeBatch
from trifocal.ops.decode.triton.common import load_once, load_rotated_parts, place_rows, prefetch_rows, stages_of_pages
from trifocal.ops.geometry import Geometry
from trifocal.ops.tiles import cdiv, named_widths, next_power_of_2
from trifocal.ops.triton.index_scoring import as_importance
from trifocal.ops.triton.scoring import LINE


@triton.jit
def prefetch_index_keys(
    k_idx, length, block_table, first_tile, page_stride, row_stride,
    D: tl.constexpr, SELECTION: tl.constexpr, PAGE_ROWS: tl.constexpr, BLOCKS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Bring a tile's keys of the past into the L2 cache; as in `attend`."""
    past, first = tl.load(length, volatile=True), first_tile * (BLOCKS * SELECTION)
    if first < past:
        column = tl.arange(0, BLOCKS * TAPS)
        key = tl.minimum(first + column // TAPS * SELECTION + tl.minimum(column % TAPS, SELECTION - 1), past - 1)
        page = tl.load(block_table + key // PAGE_ROWS, volatile=True).to(tl.int64)
        prefetch_rows(k_idx, page * page_stride + key % PAGE_ROWS * row_stride, D)


@triton.jit
def score_tiles(
    q_idx, k_idx, cos, sin, block_table, scores, first_row, first_tile, tile_step, batch, length, new, num_keys,
    q_time_stride, q_head_stride, page_stride, row_stride, block_lines,
    NEW: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr,
    SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr, PAGE_ROWS: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, TAPS: tl.constexpr, ONE_TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scores [B, T, G, blocks] of every `tile_step`-th tile by its keys before `num_keys`, for one tile of rows; none
    where all candidates are taken.
    """
    column = tl.arange(0, BLOCKS * TAPS)
    token, group, position, exists = place_rows(first_row, length, new, GROUPS, ROWS)
    blocks = tl.where(new > 0, tl.cdiv(length + new, SELECTION), 0)
    offsets = token.to(tl.int64) * q_time_stride + group * q_head_stride
    if not ONE_TILE:
        q_1, q_2 = load_rotated_parts(q_idx, offsets, position, exists, cos, sin, D, D_1, D_2)
    out = scores + ((batch * NEW + token) * GROUPS + group)[:, None] * (block_lines * LINE)
    num_tiles = tl.where(blocks > NUM_SELECTED, tl.cdiv(blocks, BLOCKS), 0)
    for tile in range(first_tile, num_tiles, tile_step):
        largest = tl.full([ROWS, BLOCKS], float("-inf"), tl.float32)
        for part in tl.range(0, tl.cdiv(SELECTION, TAPS), num_stages=STAGES):
            in_block = part * TAPS + column % TAPS
            key = (tile * BLOCKS + column // TAPS) * SELECTION + in_block
            is_key = (in_block < SELECTION) & (key < num_keys)
            page = tl.load(block_table + key // PAGE_ROWS, mask=is_key, other=0).to(tl.int64)
            k_offsets = page * page_stride + key % PAGE_ROWS * row_stride
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


class IndexScoring(NamedTuple):
    """Where scores go, [B * T * G, lines of blocks]; programs of a sequence; constants and options of the launch."""

    scores: Tensor
    programs: int
    sizes: dict[str, int]
    options: dict[str, int | None]


def plan_scores(q_idx: Tensor, k_idx: Tensor, batch: DecodeBatch, geometry: Geometry) -> IndexScoring:
    """Scores of the new tokens' queries [B, T, G, Di] and index keys in pages."""
    num_sequences, new, groups, _ = q_idx.shape
    block = geometry.selection_block_size
    tile = tiles.decode_tile(q_idx, k_idx, new * groups, "scores")
    taps = min(tile.BLOCK_N, next_power_of_2(block))
    blocks, row_tiles = tile.BLOCK_N // taps, cdiv(new * groups, tile.BLOCK_M)
    num_tiles = cdiv(batch.block_table.shape[1] * k_idx.shape[2] // block, blocks)
    programs = dispatch.decode_programs(num_sequences * row_tiles, num_tiles, q_idx.device)
    columns = cdiv(num_tiles * blocks, LINE.value) * LINE.value
    scores = torch.empty(num_sequences * new * groups, columns, dtype=torch.float32, device=q_idx.device)
    sizes = named_widths(INDEX=q_idx.shape[3]) | {
        "NEW": new, "SELECTION": block, "NUM_SELECTED": geometry.num_selected_blocks, "ROWS": tile.BLOCK_M,
        "BLOCKS": blocks, "TAPS": taps, "ONE_TILE": programs == num_tiles and block <= taps,
        "STAGES": stages_of_pages(tile.stages),
    }  # fmt: skip
    return IndexScoring(scores, programs * row_tiles, sizes, {"num_warps": tile.warps, "maxnreg": tile.registers})
