"""Decoding over compressed blocks: their partial attention, and what the choice needs of their scores.

A program holds the rows of a group (its heads for all new tokens) and goes through compressed blocks, in tiles that
hold whole selection blocks as in `scoring`. The keys are read once: their probabilities weigh the values, and are
added up over the compressed blocks of each selection block, into `direct` and `overflow` as in `scoring`, relative to a
maximum that is written for every tile. Where an index chooses, `attend` does the first without the second.
"""

import triton
import triton.language as tl

from trifocal.ops.decode.triton.common import (
    add_softmax,
    attend_tile,
    begin_tile,
    load_keys,
    load_rotated_parts,
    nothing_yet,
    place_rows,
    prefetch_rows,
    store_part,
)
from trifocal.ops.triton.dependent_launch import release_next, wait_for_inputs
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.scoring import LINE


@triton.jit
def count_compressed(num_keys, COMPRESSION: tl.constexpr, STRIDE: tl.constexpr):
    """Compressed blocks of a sequence."""
    return tl.where(num_keys >= COMPRESSION, (num_keys - COMPRESSION) // STRIDE + 1, 0)


@triton.jit
def count_tiles(
    num_keys, COMPRESSION: tl.constexpr, STRIDE: tl.constexpr, SELECTION: tl.constexpr, BLOCKS: tl.constexpr
):
    """Tiles of BLOCKS selection blocks that hold all those in which a compressed block of the sequence starts."""
    return tl.cdiv(tl.cdiv(count_compressed(num_keys, COMPRESSION, STRIDE), SELECTION // STRIDE), BLOCKS)


@triton.jit
def compressed_tile(
    block_table, tile, compressed, strides, COMPRESSION: tl.constexpr, STRIDE: tl.constexpr, SELECTION: tl.constexpr,
    PAGE_ROWS: tl.constexpr, TAPS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compressed blocks of a tile: their numbers, which of them there are, and offsets of their keys and values.

    `strides`: of pages and rows, for keys, then for values.
    """
    k_page_stride, k_row_stride, v_page_stride, v_row_stride = strides
    STEP: tl.constexpr = SELECTION // STRIDE
    column = tl.arange(0, BLOCKS * TAPS)
    tap = column % TAPS
    index = (tile * BLOCKS + column // TAPS) * STEP + tap
    exists = (tap < STEP) & (index < compressed)
    slot = index + (COMPRESSION // STRIDE - 1)
    page = tl.load(block_table + slot // PAGE_ROWS, mask=exists, other=0).to(tl.int64)
    page_row = slot % PAGE_ROWS
    return (
        index, exists, page * k_page_stride + page_row * k_row_stride, page * v_page_stride + page_row * v_row_stride
    )  # fmt: skip


@triton.jit
def prefetch_compressed(
    k_cmp, v_cmp, length, block_table, first_tile, strides,
    D: tl.constexpr, V: tl.constexpr, HAS_V: tl.constexpr, COMPRESSION: tl.constexpr, STRIDE: tl.constexpr,
    STEP: tl.constexpr, PAGE_ROWS: tl.constexpr, TAPS: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Bring a part's compressed keys and values into the L2 cache; as in `attend`."""
    k_page_stride, k_row_stride, v_page_stride, v_row_stride = strides
    compressed = count_compressed(tl.load(length, volatile=True), COMPRESSION, STRIDE)
    if first_tile * (BLOCKS * STEP) < compressed:
        column = tl.arange(0, TILES * BLOCKS * TAPS)
        index = (first_tile * BLOCKS + column // TAPS) * STEP + tl.minimum(column % TAPS, STEP - 1)
        slot = tl.minimum(index, compressed - 1) + (COMPRESSION // STRIDE - 1)
        page = tl.load(block_table + slot // PAGE_ROWS, volatile=True).to(tl.int64)
        page_row = slot % PAGE_ROWS
        prefetch_rows(k_cmp, page * k_page_stride + page_row * k_row_stride, D)
        if HAS_V:
            prefetch_rows(v_cmp, page * v_page_stride + page_row * v_row_stride, V)


@Kernel
@triton.jit(do_not_specialize=["table_columns", "block_lines", "num_tiles", "num_parts", "num_rows"])
def decode_scores_kernel(
    q, k_cmp, v_cmp, cos, sin, lengths, num_new, block_table, sums, tile_maximum, tile_total,
    part_maximum, part_total, part_o,
    q_batch_stride, q_time_stride, q_head_stride, k_page_stride, k_group_stride, k_row_stride,
    v_page_stride, v_group_stride, v_row_stride,
    table_columns, block_lines, num_tiles, num_parts, num_rows, score_scale,
    NEW: tl.constexpr, GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    HAS_V: tl.constexpr, COMPRESSION: tl.constexpr, STRIDE: tl.constexpr, SELECTION: tl.constexpr,
    PAGE_ROWS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, UNIT_TILES: tl.constexpr,
    UNITS: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Every n-th of the parts of a sequence's compressed blocks, UNITS units each, for one tile of rows."""
    release_next(DEPENDENT)
    strides = (k_page_stride, k_row_stride, v_page_stride, v_row_stride)
    STEP: tl.constexpr = SELECTION // STRIDE
    # Then no loop is worth a pipeline, and keys are asked for before the rows are made ready.
    ONE_TILE: tl.constexpr = UNITS * UNIT_TILES == 1
    group = tl.program_id(1) % GROUPS
    batch = tl.program_id(2).to(tl.int64)
    k_cmp += group.to(tl.int64) * k_group_stride
    v_cmp += group.to(tl.int64) * v_group_stride
    block_table += batch * table_columns
    tap = tl.arange(0, BLOCKS * TAPS) % TAPS
    if DEPENDENT and UNITS == 1:
        prefetch_compressed(
            k_cmp, v_cmp, lengths + batch, block_table, tl.program_id(0) * UNIT_TILES, strides,
            D, V, HAS_V, COMPRESSION, STRIDE, STEP, PAGE_ROWS, TAPS, BLOCKS, UNIT_TILES,
        )  # fmt: skip
    wait_for_inputs(DEPENDENT)
    length, new = tl.load(lengths + batch), tl.load(num_new + batch)
    token, head, position, exists = place_rows(tl.program_id(1) // GROUPS * ROWS, length, new, Q_PER_KV, ROWS)
    compressed = count_compressed(length + new, COMPRESSION, STRIDE)
    tiles = tl.where(new > 0, count_tiles(length + new, COMPRESSION, STRIDE, SELECTION, BLOCKS), 0)
    head += group * Q_PER_KV
    offsets = batch * q_batch_stride + token.to(tl.int64) * q_time_stride + head * q_head_stride
    if not ONE_TILE:
        queries = load_rotated_parts(q, offsets, position, exists, cos, sin, D, D_1, D_2)
    row = (batch * NEW + token) * (GROUPS * Q_PER_KV) + head

    # Overlaps in units of the stride: with the block that the compressed one starts in, and the next.
    direct_weight = tl.minimum(COMPRESSION, SELECTION - tap * STRIDE).to(tl.float32) / STRIDE
    overflow_weight = COMPRESSION / STRIDE - direct_weight
    for part in range(tl.program_id(0), tl.cdiv(tiles, UNITS * UNIT_TILES), tl.num_programs(0)):
        whole = nothing_yet(ROWS, V_1, V_2, HAS_V)
        softmax = nothing_yet(ROWS, V_1, V_2, HAS_V)
        first_tile = part * (UNITS * UNIT_TILES)
        for tile in tl.range(
            first_tile, tl.minimum(first_tile + UNITS * UNIT_TILES, tiles), num_stages=1 if ONE_TILE else STAGES
        ):
            if UNITS > 1:
                whole, softmax = begin_tile(tile, UNIT_TILES, whole, softmax, ROWS, V_1, V_2, HAS_V)
            index, is_block, k_offsets, v_offsets = compressed_tile(
                block_table, tile, compressed, strides, COMPRESSION, STRIDE, SELECTION, PAGE_ROWS, TAPS, BLOCKS
            )
            keys = load_keys(k_cmp, v_cmp, k_offsets, v_offsets, is_block, D, D_1, D_2, V, V_1, V_2, HAS_V)
            if ONE_TILE:
                queries = load_rotated_parts(q, offsets, position, exists, cos, sin, D, D_1, D_2)
            visible = is_block[None, :] & ((index * STRIDE + (COMPRESSION - 1))[None, :] <= position[:, None])
            softmax, p = attend_tile(queries, keys, visible, score_scale, softmax, D_2, V_2, HAS_V)
            tl.store(tile_maximum + row * num_tiles + tile, softmax[0], mask=exists)
            tl.store(tile_total + row * num_tiles + tile, softmax[1], mask=exists)
            places = row[:, None] * (block_lines * LINE) + (tile * BLOCKS + tl.arange(0, BLOCKS))[None, :]
            direct = tl.sum(tl.reshape(p * direct_weight[None, :], [ROWS, BLOCKS, TAPS]), 2)
            tl.store(sums + places, direct, mask=exists[:, None])
            if COMPRESSION > STRIDE:
                # The next block's, so that the choice reads both of a block at one place.
                overflow = tl.sum(tl.reshape(p * overflow_weight[None, :], [ROWS, BLOCKS, TAPS]), 2)
                places += num_rows.to(tl.int64) * (block_lines * LINE) + 1
                tl.store(sums + places, overflow, mask=exists[:, None])
        if HAS_V:
            if UNITS > 1:
                softmax = add_softmax(whole, softmax, V_2, HAS_V)
            parts = (part_maximum, part_total, part_o)
            store_part(parts, row * num_parts + part, exists, softmax, V, V_1, V_2)
