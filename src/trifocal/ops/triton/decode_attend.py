"""Decoding over tokens: the partial attention of the selected and the window branch, and of dense attention.

A program of `decode_attend_kernel` holds the heads of a group for one new token, and goes through the tokens of its
chosen blocks or of its window: both branches are parts of one launch, since both are read once and neither waits for
the other. A program of `decode_dense_kernel` holds the rows of a group for all new tokens, which see nearly the same
keys. What the parts are: `decode_common`.
"""

import triton
import triton.language as tl

from trifocal.ops.triton.decode_common import (
    UNIT,
    add_softmax,
    attend_tile,
    load_rotated,
    nothing_yet,
    place_rows,
    store_part,
)
from trifocal.ops.triton.launch import Kernel

UNIT_KEYS = tl.constexpr(UNIT)
# A dense row has at most so many units; in longer pasts they are longer. Their length depends on the row's past alone.
MOST_UNITS = tl.constexpr(64)


@triton.jit
def count_chosen(position, SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr):
    """Keys of all blocks that a token chooses."""
    return tl.minimum(position // SELECTION + 1, NUM_SELECTED) * SELECTION


@triton.jit
def count_window(position, window_size):
    """Keys of a token's window."""
    return tl.minimum(window_size, position + 1)


@triton.jit
def dense_unit(num_keys):
    """Keys of a unit of dense attention: 256, and twice as many until MOST_UNITS of them are enough."""
    unit = UNIT_KEYS + num_keys * 0
    while unit * MOST_UNITS < num_keys:
        unit *= 2
    return unit


@Kernel
@triton.jit(do_not_specialize=["table_columns", "num_parts", "first_part", "chosen_parts", "window_size"])
def decode_attend_kernel(
    q, k, v, k_win, v_win, cos, sin, rows, lengths, num_new, block_table, selected_blocks, places,
    part_maximum, part_total, part_o,
    q_batch_stride, q_time_stride, q_head_stride, k_page_stride, k_group_stride, k_row_stride,
    v_page_stride, v_group_stride, v_row_stride, k_ring_stride, k_ring_group_stride, k_ring_row_stride,
    v_ring_stride, v_ring_group_stride, v_ring_row_stride,
    table_columns, num_parts, first_part, chosen_parts, window_size, score_scale,
    NEW: tl.constexpr, GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr, PAGE_ROWS: tl.constexpr, RING: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, UNIT_TILES: tl.constexpr, UNITS: tl.constexpr,
    STAGES: tl.constexpr, WINDOW_STAGES: tl.constexpr,
):  # fmt: skip
    """One part of the chosen blocks, or of the window, of one token and group. RING: tokens of a ring; 0: no rings."""
    PART_TILES: tl.constexpr = UNITS * UNIT_TILES
    part = tl.program_id(0)
    group, token = tl.program_id(1) % GROUPS, tl.program_id(1) // GROUPS
    batch = tl.program_id(2).to(tl.int64)
    length, new = tl.load(lengths + batch), tl.load(num_new + batch)
    position = length + token
    in_window = part >= chosen_parts
    num_keys = count_chosen(position, SELECTION, NUM_SELECTED)
    first_tile = part * PART_TILES
    if in_window:
        num_keys = count_window(position, window_size)
        first_tile = (part - chosen_parts) * PART_TILES
    if token < new and first_tile * KEYS < num_keys:
        head = tl.arange(0, ROWS)
        exists = head < Q_PER_KV
        head += group * Q_PER_KV
        offsets = batch * q_batch_stride + token.to(tl.int64) * q_time_stride + head * q_head_stride
        positions = position + head * 0
        q_1 = load_rotated(q, offsets, positions, exists, cos, sin, 0, D_1, D)
        q_2 = q_1
        if D_2 > 0:
            q_2 = load_rotated(q, offsets, positions, exists, cos, sin, D_1, D_2, D)
        block_table += batch * table_columns
        k += group.to(tl.int64) * k_group_stride
        v += group.to(tl.int64) * v_group_stride
        whole_maximum, whole_total, whole_1, whole_2 = nothing_yet(ROWS, V_1, V_2, True)
        maximum, total, o_1, o_2 = nothing_yet(ROWS, V_1, V_2, True)
        end_tile = tl.minimum(first_tile + PART_TILES, tl.cdiv(num_keys, KEYS))
        if in_window:
            window_k, window_v = k, v
            if RING > 0:
                ring = tl.load(rows + batch).to(tl.int64)
                window_k = k_win + ring * k_ring_stride + group.to(tl.int64) * k_ring_group_stride
                window_v = v_win + ring * v_ring_stride + group.to(tl.int64) * v_ring_group_stride
            for tile in tl.range(first_tile, end_tile, num_stages=WINDOW_STAGES):
                if tile % UNIT_TILES == 0:
                    whole_maximum, whole_total, whole_1, whole_2 = add_softmax(
                        whole_maximum, whole_total, whole_1, whole_2, maximum, total, o_1, o_2, V_2, True
                    )
                    maximum, total, o_1, o_2 = nothing_yet(ROWS, V_1, V_2, True)
                key = tile * KEYS + tl.arange(0, KEYS)
                is_key = key < num_keys
                key += position + 1 - num_keys
                if RING > 0:
                    k_offsets = (key % RING).to(tl.int64) * k_ring_row_stride
                    v_offsets = (key % RING).to(tl.int64) * v_ring_row_stride
                else:
                    page = tl.load(block_table + key // PAGE_ROWS, mask=is_key, other=0).to(tl.int64)
                    k_offsets = page * k_page_stride + key % PAGE_ROWS * k_row_stride
                    v_offsets = page * v_page_stride + key % PAGE_ROWS * v_row_stride
                maximum, total, o_1, o_2, _ = attend_tile(
                    q_1, q_2, window_k, window_v, k_offsets, v_offsets, is_key, is_key[None, :], score_scale,
                    maximum, total, o_1, o_2, D, D_1, D_2, V, V_1, V_2, True,
                )  # fmt: skip
        else:
            chosen = ((batch * NEW + token) * GROUPS + group) * NUM_SELECTED
            PAGE_BLOCKS: tl.constexpr = PAGE_ROWS // SELECTION
            for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
                if tile % UNIT_TILES == 0:
                    whole_maximum, whole_total, whole_1, whole_2 = add_softmax(
                        whole_maximum, whole_total, whole_1, whole_2, maximum, total, o_1, o_2, V_2, True
                    )
                    maximum, total, o_1, o_2 = nothing_yet(ROWS, V_1, V_2, True)
                key = tile * KEYS + tl.arange(0, KEYS)
                if SELECTION % KEYS == 0:
                    # The tile lies in one block.
                    slot = tile // (SELECTION // KEYS)
                    block = tl.load(selected_blocks + chosen + slot)
                    place = tl.load(places + chosen + slot)
                    is_key = key < num_keys
                else:
                    is_key = key < num_keys
                    slot = key // SELECTION
                    block = tl.load(selected_blocks + chosen + slot, mask=is_key, other=0)
                    place = tl.load(places + chosen + slot, mask=is_key, other=0)
                in_block = key % SELECTION
                is_key = is_key & (block * SELECTION + in_block <= position)
                page_row = place % PAGE_BLOCKS * SELECTION + in_block
                maximum, total, o_1, o_2, _ = attend_tile(
                    q_1, q_2, k, v, place // PAGE_BLOCKS * k_page_stride + page_row * k_row_stride,
                    place // PAGE_BLOCKS * v_page_stride + page_row * v_row_stride, is_key, is_key[None, :],
                    score_scale, maximum, total, o_1, o_2, D, D_1, D_2, V, V_1, V_2, True,
                )  # fmt: skip
        whole_maximum, whole_total, whole_1, whole_2 = add_softmax(
            whole_maximum, whole_total, whole_1, whole_2, maximum, total, o_1, o_2, V_2, True
        )
        row = (batch * NEW + token) * (GROUPS * Q_PER_KV) + head
        store_part(
            part_maximum, part_total, part_o, row * num_parts + first_part + part, exists,
            whole_maximum, whole_total, whole_1, whole_2, V, V_1, V_2,
        )  # fmt: skip


@Kernel
@triton.jit(do_not_specialize=["table_columns", "num_parts"])
def decode_dense_kernel(
    q, k, v, cos, sin, lengths, num_new, block_table, part_maximum, part_total, part_o,
    q_batch_stride, q_time_stride, q_head_stride, k_page_stride, k_group_stride, k_row_stride,
    v_page_stride, v_group_stride, v_row_stride, table_columns, num_parts, score_scale,
    NEW: tl.constexpr, GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    PAGE_ROWS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so many parts of a sequence's past, UNITS units each, for one tile of rows."""
    group = tl.program_id(1) % GROUPS
    batch = tl.program_id(2).to(tl.int64)
    length, new = tl.load(lengths + batch), tl.load(num_new + batch)
    token, head, position, exists = place_rows(tl.program_id(1) // GROUPS * ROWS, length, new, Q_PER_KV, ROWS)
    num_keys = tl.where(new > 0, length + new, 0)
    unit_tiles = dense_unit(num_keys) // KEYS
    tiles = tl.cdiv(num_keys, KEYS)
    head += group * Q_PER_KV
    offsets = batch * q_batch_stride + token.to(tl.int64) * q_time_stride + head * q_head_stride
    q_1 = load_rotated(q, offsets, position, exists, cos, sin, 0, D_1, D)
    q_2 = q_1
    if D_2 > 0:
        q_2 = load_rotated(q, offsets, position, exists, cos, sin, D_1, D_2, D)
    k += group.to(tl.int64) * k_group_stride
    v += group.to(tl.int64) * v_group_stride
    block_table += batch * table_columns
    row = (batch * NEW + token) * (GROUPS * Q_PER_KV) + head
    for part in range(tl.program_id(0), tl.cdiv(tiles, UNITS * unit_tiles), tl.num_programs(0)):
        whole_maximum, whole_total, whole_1, whole_2 = nothing_yet(ROWS, V_1, V_2, True)
        maximum, total, o_1, o_2 = nothing_yet(ROWS, V_1, V_2, True)
        first_tile = part * (UNITS * unit_tiles)
        for tile in tl.range(first_tile, tl.minimum(first_tile + UNITS * unit_tiles, tiles), num_stages=STAGES):
            if tile % unit_tiles == 0:
                whole_maximum, whole_total, whole_1, whole_2 = add_softmax(
                    whole_maximum, whole_total, whole_1, whole_2, maximum, total, o_1, o_2, V_2, True
                )
                maximum, total, o_1, o_2 = nothing_yet(ROWS, V_1, V_2, True)
            key = tile * KEYS + tl.arange(0, KEYS)
            is_key = key < num_keys
            if PAGE_ROWS % KEYS == 0:
                # The tile lies in one page.
                page = tl.load(block_table + tile // (PAGE_ROWS // KEYS)).to(tl.int64)
            else:
                page = tl.load(block_table + key // PAGE_ROWS, mask=is_key, other=0).to(tl.int64)
            visible = key[None, :] <= position[:, None]
            maximum, total, o_1, o_2, _ = attend_tile(
                q_1, q_2, k, v, page * k_page_stride + key % PAGE_ROWS * k_row_stride,
                page * v_page_stride + key % PAGE_ROWS * v_row_stride, is_key, visible,
                score_scale, maximum, total, o_1, o_2, D, D_1, D_2, V, V_1, V_2, True,
            )  # fmt: skip
        whole_maximum, whole_total, whole_1, whole_2 = add_softmax(
            whole_maximum, whole_total, whole_1, whole_2, maximum, total, o_1, o_2, V_2, True
        )
        store_part(
            part_maximum, part_total, part_o, row * num_parts + part, exists,
            whole_maximum, whole_total, whole_1, whole_2, V, V_1, V_2,
        )  # fmt: skip
