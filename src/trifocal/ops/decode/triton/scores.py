"""Decoding over compressed blocks: their partial attention, and what the choice needs of their scores.

A program holds the rows of a group (its heads for all new tokens) and goes through compressed blocks, in tiles that
hold whole selection blocks as in `scoring`. The keys are read once: their probabilities weigh the values, and are
added up over the compressed blocks of each selection block. What is written for a selection block and head is two
numbers, as in `scoring`: from compressed blocks that start in it (`direct`), and from those that reach over from the
block before (`overflow`). They are relative to a maximum that is written for every tile. The last program of a sequence
and group to arrive then makes the choice, unless that is a kernel of its own (`attention` says when).
"""

import triton
import triton.language as tl

from trifocal.ops.decode.triton.append import due_block, write_mean_block, write_tokens
from trifocal.ops.decode.triton.choice import choose_blocks
from trifocal.ops.decode.triton.common import (
    add_softmax,
    attend_tile,
    count_compressed,
    count_tiles,
    is_last,
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
def prefetch_part(
    k_cmp, v_cmp, length, block_table, first_tile, k_page_stride, k_row_stride, v_page_stride, v_row_stride,
    D: tl.constexpr, V: tl.constexpr, HAS_V: tl.constexpr, COMPRESSION: tl.constexpr, STRIDE: tl.constexpr,
    STEP: tl.constexpr, PAGE_ROWS: tl.constexpr, TAPS: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Bring a part's compressed keys and values into the L2 cache; as in `attend`."""
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
    part_maximum, part_total, part_o, selected_blocks, places, arrivals,
    rows, k_raw, v_raw, k_slc, v_slc, k_win, v_win, k_raw_ring, v_raw_ring, k_pages, v_pages, k_win_ring, v_win_ring,
    q_batch_stride, q_time_stride, q_head_stride, k_page_stride, k_group_stride, k_row_stride,
    v_page_stride, v_group_stride, v_row_stride,
    k_raw_batch, k_raw_time, k_raw_head, v_raw_batch, v_raw_time, v_raw_head,
    k_slc_batch, k_slc_time, k_slc_head, v_slc_batch, v_slc_time, v_slc_head,
    k_win_batch, k_win_time, k_win_head, v_win_batch, v_win_time, v_win_head,
    k_raw_ring_row, k_raw_ring_head, k_raw_ring_time, v_raw_ring_row, v_raw_ring_head, v_raw_ring_time,
    k_pages_page, k_pages_head, k_pages_time, v_pages_page, v_pages_head, v_pages_time,
    k_win_ring_row, k_win_ring_head, k_win_ring_time, v_win_ring_row, v_win_ring_head, v_win_ring_time,
    table_columns, block_lines, num_tiles, num_parts, num_rows, score_scale,
    NEW: tl.constexpr, GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    HAS_V: tl.constexpr, COMPRESSION: tl.constexpr, STRIDE: tl.constexpr, SELECTION: tl.constexpr,
    PAGE_ROWS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, UNIT_TILES: tl.constexpr,
    UNITS: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr, SUMS: tl.constexpr, CHOOSES: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr, UNROLL: tl.constexpr, COLUMNS: tl.constexpr,
    APPENDS: tl.constexpr, D_HALF: tl.constexpr, V_HALF: tl.constexpr, TOKENS: tl.constexpr,
    RAW_RING: tl.constexpr, WINDOW_RING: tl.constexpr, HAS_V_CMP: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Every so many parts of a sequence's compressed blocks, UNITS units each, for one tile of rows.

    SUMS: whether the choice needs block sums; an index needs none. CHOOSES: whether the last program of a sequence and
    group makes the choice of the one new token. APPENDS: whether one more program of a sequence and group writes the
    new tokens into the caches; compressed blocks that they end are written by the programs that read them next.
    """
    release_next(DEPENDENT)
    STEP: tl.constexpr = SELECTION // STRIDE
    # Then no loop is worth a pipeline, and keys are asked for before the rows are made ready.
    ONE_TILE: tl.constexpr = UNITS * UNIT_TILES == 1
    group = tl.program_id(1) % GROUPS
    batch = tl.program_id(2).to(tl.int64)
    k_cmp += group.to(tl.int64) * k_group_stride
    v_cmp += group.to(tl.int64) * v_group_stride
    block_table += batch * table_columns
    column = tl.arange(0, BLOCKS * TAPS)
    tap = column % TAPS
    if DEPENDENT and UNITS == 1:
        prefetch_part(
            k_cmp, v_cmp, lengths + batch, block_table, tl.program_id(0) * UNIT_TILES,
            k_page_stride, k_row_stride, v_page_stride, v_row_stride,
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
        q_1, q_2 = load_rotated_parts(q, offsets, position, exists, cos, sin, D, D_1, D_2)
    row = (batch * NEW + token) * (GROUPS * Q_PER_KV) + head
    num_parts_here = tl.cdiv(tiles, UNITS * UNIT_TILES)
    programs = tl.num_programs(0)
    if APPENDS:
        programs -= 1
        ring_row = tl.load(rows + batch).to(tl.int64)
        long_group = group.to(tl.int64)
        if (tl.program_id(0) == programs) & (tl.program_id(1) < GROUPS):
            write_tokens(
                k_raw, v_raw, k_slc, v_slc, k_win, v_win, k_raw_ring, v_raw_ring, k_pages, v_pages,
                k_win_ring, v_win_ring, cos, sin, block_table, batch, long_group, ring_row, length, new,
                k_raw_batch, k_raw_time, k_raw_head, v_raw_batch, v_raw_time, v_raw_head,
                k_slc_batch, k_slc_time, k_slc_head, v_slc_batch, v_slc_time, v_slc_head,
                k_win_batch, k_win_time, k_win_head, v_win_batch, v_win_time, v_win_head,
                k_raw_ring_row, k_raw_ring_head, k_raw_ring_time, v_raw_ring_row, v_raw_ring_head, v_raw_ring_time,
                k_pages_page, k_pages_head, k_pages_time, v_pages_page, v_pages_head, v_pages_time,
                k_win_ring_row, k_win_ring_head, k_win_ring_time, v_win_ring_row, v_win_ring_head, v_win_ring_time,
                D, D_HALF, V, V_HALF, PAGE_ROWS * STRIDE, RAW_RING, WINDOW_RING, HAS_V_CMP, TOKENS,
            )  # fmt: skip
        for number in tl.static_range((NEW + STRIDE - 1) // STRIDE):
            ended, is_ended = due_block(length, new, number, COMPRESSION, STRIDE)
            reads = ended // (STEP * BLOCKS * UNITS * UNIT_TILES) % programs == tl.program_id(0)
            if is_ended & reads:
                write_mean_block(
                    k_raw, v_raw, k_raw_ring, v_raw_ring, k_cmp, v_cmp, cos, sin, block_table, batch, long_group,
                    ring_row, ended, length, k_raw_batch, k_raw_time, k_raw_head, v_raw_batch, v_raw_time, v_raw_head,
                    k_raw_ring_row, k_raw_ring_head, k_raw_ring_time, v_raw_ring_row, v_raw_ring_head, v_raw_ring_time,
                    k_page_stride, k_row_stride, v_page_stride, v_row_stride,
                    D, D_HALF, V, V_HALF, PAGE_ROWS, RAW_RING, HAS_V_CMP, COMPRESSION, LEVELS, STRIDE,
                )  # fmt: skip
                # Other threads of the program read what this one wrote.
                tl.debug_barrier()
        num_parts_here = tl.where(tl.program_id(0) < programs, num_parts_here, 0)

    # Overlaps in units of the stride: with the block that the compressed one starts in, and the next.
    direct_weight = tl.minimum(COMPRESSION, SELECTION - tap * STRIDE).to(tl.float32) / STRIDE
    overflow_weight = COMPRESSION / STRIDE - direct_weight
    for part in range(tl.program_id(0), num_parts_here, programs):
        whole_maximum, whole_total, whole_1, whole_2 = nothing_yet(ROWS, V_1, V_2, HAS_V)
        maximum, total, o_1, o_2 = nothing_yet(ROWS, V_1, V_2, HAS_V)
        first_tile = part * (UNITS * UNIT_TILES)
        for tile in tl.range(
            first_tile, tl.minimum(first_tile + UNITS * UNIT_TILES, tiles), num_stages=1 if ONE_TILE else STAGES
        ):
            if UNITS > 1:  # noqa: SIM102
                if tile % UNIT_TILES == 0:
                    whole_maximum, whole_total, whole_1, whole_2 = add_softmax(
                        whole_maximum, whole_total, whole_1, whole_2, maximum, total, o_1, o_2, V_2, HAS_V
                    )
                    maximum, total, o_1, o_2 = nothing_yet(ROWS, V_1, V_2, HAS_V)
            index = (tile * BLOCKS + column // TAPS) * STEP + tap
            is_block = (tap < STEP) & (index < compressed)
            slot = index + (COMPRESSION // STRIDE - 1)
            page = tl.load(block_table + slot // PAGE_ROWS, mask=is_block, other=0).to(tl.int64)
            page_row = slot % PAGE_ROWS
            k_1, k_2, v_1, v_2 = load_keys(
                k_cmp, v_cmp, page * k_page_stride + page_row * k_row_stride,
                page * v_page_stride + page_row * v_row_stride, is_block, D, D_1, D_2, V, V_1, V_2, HAS_V,
            )  # fmt: skip
            if ONE_TILE:
                q_1, q_2 = load_rotated_parts(q, offsets, position, exists, cos, sin, D, D_1, D_2)
            visible = is_block[None, :] & ((index * STRIDE + (COMPRESSION - 1))[None, :] <= position[:, None])
            maximum, total, o_1, o_2, p = attend_tile(
                q_1, q_2, k_1, k_2, v_1, v_2, visible, score_scale, maximum, total, o_1, o_2, D_2, V_2, HAS_V
            )
            if SUMS:
                tl.store(tile_maximum + row * num_tiles + tile, maximum, mask=exists)
                tl.store(tile_total + row * num_tiles + tile, total, mask=exists)
                of_blocks = row[:, None] * (block_lines * LINE) + (tile * BLOCKS + tl.arange(0, BLOCKS))[None, :]
                direct = tl.sum(tl.reshape(p * direct_weight[None, :], [ROWS, BLOCKS, TAPS]), 2)
                tl.store(sums + of_blocks, direct, mask=exists[:, None])
                if COMPRESSION > STRIDE:
                    # The next block's, so that the choice reads both of a block at one place.
                    overflow = tl.sum(tl.reshape(p * overflow_weight[None, :], [ROWS, BLOCKS, TAPS]), 2)
                    of_blocks += num_rows.to(tl.int64) * (block_lines * LINE) + 1
                    tl.store(sums + of_blocks, overflow, mask=exists[:, None])
        if HAS_V:
            if UNITS > 1:
                maximum, total, o_1, o_2 = add_softmax(
                    whole_maximum, whole_total, whole_1, whole_2, maximum, total, o_1, o_2, V_2, HAS_V
                )
            store_part(
                part_maximum, part_total, part_o, row * num_parts + part, exists, maximum, total, o_1, o_2,
                V, V_1, V_2,
            )  # fmt: skip
    if CHOOSES and new > 0:
        # Without any part, the first programs of the grid choose.
        arriving = tl.maximum(tl.minimum(tl.cdiv(tiles, UNITS * UNIT_TILES), programs), 1)
        if tl.program_id(0) < arriving:  # noqa: SIM102
            if is_last(arrivals + batch * GROUPS + group, arriving * (tl.num_programs(1) // GROUPS)):
                choose_blocks(
                    sums, tile_maximum, tile_total, block_table, selected_blocks, places, batch, 0, group, length, new,
                    block_lines, num_tiles, num_rows, NEW, GROUPS, Q_PER_KV, COMPRESSION, STRIDE, SELECTION,
                    NUM_SELECTED, NUM_SELECTED_PAD, INITIAL, LOCAL, PAGE_BLOCKS, BLOCKS, UNIT_TILES, UNROLL, COLUMNS,
                    False,
                )  # fmt: skip
