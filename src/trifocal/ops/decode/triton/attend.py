"""Decoding over tokens: the partial attention of the selected and the window branch, and of dense attention.

A program of `decode_attend_kernel` holds the heads of a group for one new token, and goes through the tokens of its
chosen blocks or of its window: both branches are parts of one launch, since neither waits for the other. Where an index
chooses, the compressed branch is a part of it too; otherwise `scores` has read it for the choice. A program of
`decode_dense_kernel` holds the rows of a group for all new tokens, which see nearly the same keys. What the parts are:
`common`.
"""

import triton
import triton.language as tl

from trifocal.ops.decode.triton.common import (
    UNIT_KEYS,
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
from trifocal.ops.decode.triton.scores import compressed_tile, count_compressed, count_tiles, prefetch_compressed
from trifocal.ops.triton.dependent_launch import release_next, wait_for_inputs
from trifocal.ops.triton.launch import Kernel

# A dense row has at most this many units; in longer pasts they are longer. Their length depends only on the row's past.
MAX_UNITS = tl.constexpr(64)


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
    """Keys of a unit of dense attention: UNIT_KEYS, and twice as many until MAX_UNITS of them are enough."""
    unit = UNIT_KEYS + num_keys * 0
    while unit * MAX_UNITS < num_keys:
        unit *= 2
    return unit


@triton.jit
def load_choice(
    selected_blocks, places, tile, is_chosen, SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Slot, block and place of each of a tile's keys, or of all if they are the same; where `is_chosen`."""
    if SELECTION % KEYS == 0:
        slot = tile // (SELECTION // KEYS)
    else:
        slot = (tile * KEYS + tl.arange(0, KEYS)) // SELECTION
    mask = is_chosen & (slot < NUM_SELECTED)
    return slot, tl.load(selected_blocks + slot, mask=mask, other=0), tl.load(places + slot, mask=mask, other=0)


@triton.jit
def take_all(slot, block, place, block_table, takes_all, num_slots, PAGE_BLOCKS: tl.constexpr):
    """Block and place of a choice; of every block in turn where a token takes all of them."""
    page = tl.load(block_table + slot // PAGE_BLOCKS, mask=takes_all & (slot < num_slots), other=0).to(tl.int64)
    block = tl.where(takes_all, slot, block)
    return block, tl.where(takes_all, page * PAGE_BLOCKS + slot % PAGE_BLOCKS, place)


@triton.jit
def chosen_offsets(
    block, place, key, is_key, position, strides, SELECTION: tl.constexpr, PAGE_BLOCKS: tl.constexpr
):  # fmt: skip
    """Offsets of chosen keys and of their values, and which are there and not in the token's future."""
    k_page_stride, k_row_stride, v_page_stride, v_row_stride = strides
    in_block = key % SELECTION
    place = place.to(tl.int64)
    page, page_row = place // PAGE_BLOCKS, place % PAGE_BLOCKS * SELECTION + in_block
    k_offsets = page * k_page_stride + page_row * k_row_stride
    v_offsets = page * v_page_stride + page_row * v_row_stride
    return k_offsets, v_offsets, is_key & (block * SELECTION + in_block <= position)


@triton.jit
def window_offsets(
    block_table, key, is_key, strides, ring_strides, PAGE_ROWS: tl.constexpr, RING: tl.constexpr
):  # fmt: skip
    """Offsets of a window's keys and of their values, in a ring or in pages; strides as in `compressed_tile`."""
    k_page_stride, k_row_stride, v_page_stride, v_row_stride = strides
    if RING > 0:
        row = (key % RING).to(tl.int64)
        k_offsets, v_offsets = row * ring_strides[1], row * ring_strides[3]
    else:
        page = tl.load(block_table + key // PAGE_ROWS, mask=is_key, other=0).to(tl.int64)
        k_offsets = page * k_page_stride + key % PAGE_ROWS * k_row_stride
        v_offsets = page * v_page_stride + key % PAGE_ROWS * v_row_stride
    return k_offsets, v_offsets


@triton.jit
def prefetch_part(
    k, v, window_k, window_v, ring, length, block_table, token, in_window, first_tile, strides, ring_strides,
    table_columns, window_size,
    D: tl.constexpr, V: tl.constexpr, SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr, PAGE_ROWS: tl.constexpr,
    RING: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Bring the keys and values of a part into the L2 cache, where they are known before the choice.

    The kernels before this one may still run: a length may be that of the step before, and is read past any cache.
    """
    k_page_stride, k_row_stride, v_page_stride, v_row_stride = strides
    k_ring_stride, k_ring_row_stride, v_ring_stride, v_ring_row_stride = ring_strides
    position = tl.load(length, volatile=True) + token
    num_keys = count_window(position, window_size)
    if not in_window:
        # All blocks are chosen, or it is not known which.
        num_keys = tl.where(position < NUM_SELECTED * SELECTION, position + 1, 0)
    if first_tile * KEYS < num_keys:
        key = first_tile * KEYS + tl.arange(0, TILES * KEYS)
        key = position + 1 - num_keys + tl.minimum(key, num_keys - 1)
        if RING > 0 and in_window:
            row = tl.load(ring, volatile=True).to(tl.int64)
            prefetch_rows(window_k, row * k_ring_stride + (key % RING) * k_ring_row_stride, D)
            prefetch_rows(window_v, row * v_ring_stride + (key % RING) * v_ring_row_stride, V)
        else:
            # A full sequence has no page for another token.
            column = tl.minimum(key // PAGE_ROWS, table_columns - 1)
            page = tl.load(block_table + column, volatile=True).to(tl.int64)
            prefetch_rows(k, page * k_page_stride + key % PAGE_ROWS * k_row_stride, D)
            prefetch_rows(v, page * v_page_stride + key % PAGE_ROWS * v_row_stride, V)


@triton.jit
def attend_compressed(
    q, offsets, positions, exists, cos, sin, k_cmp, v_cmp, block_table, first_tile, end_tile, position, compressed,
    strides, score_scale,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    COMPRESSION: tl.constexpr, STRIDE: tl.constexpr, SELECTION: tl.constexpr, PAGE_ROWS: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, UNIT_TILES: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Partial attention of one token to the compressed blocks of some tiles, whole units but for the last."""
    ONE_TILE: tl.constexpr = UNITS * UNIT_TILES == 1
    whole = nothing_yet(ROWS, V_1, V_2, True)
    softmax = nothing_yet(ROWS, V_1, V_2, True)
    if not ONE_TILE:
        queries = load_rotated_parts(q, offsets, positions, exists, cos, sin, D, D_1, D_2)
    # Without a pipeline, whose registers the other branches need: compressed blocks are few.
    for tile in tl.range(first_tile, end_tile, num_stages=1):
        if UNITS > 1:
            whole, softmax = begin_tile(tile, UNIT_TILES, whole, softmax, ROWS, V_1, V_2, True)
        index, is_block, k_offsets, v_offsets = compressed_tile(
            block_table, tile, compressed, strides, COMPRESSION, STRIDE, SELECTION, PAGE_ROWS, TAPS, BLOCKS
        )
        keys = load_keys(k_cmp, v_cmp, k_offsets, v_offsets, is_block, D, D_1, D_2, V, V_1, V_2, True)
        if ONE_TILE:
            queries = load_rotated_parts(q, offsets, positions, exists, cos, sin, D, D_1, D_2)
        visible = is_block & (index * STRIDE + (COMPRESSION - 1) <= position)
        softmax, _ = attend_tile(queries, keys, visible[None, :], score_scale, softmax, D_2, V_2, True)
    if UNITS > 1:
        softmax = add_softmax(whole, softmax, V_2, True)
    return softmax


@Kernel
@triton.jit(
    do_not_specialize=["table_columns", "num_parts", "first_part", "chosen_parts", "first_compressed", "window_size"]
)
def decode_attend_kernel(
    q, k, v, k_win, v_win, k_cmp, v_cmp, cos, sin, rows, lengths, num_new, block_table, selected_blocks, places,
    part_maximum, part_total, part_o,
    q_batch_stride, q_time_stride, q_head_stride, k_page_stride, k_group_stride, k_row_stride,
    v_page_stride, v_group_stride, v_row_stride, k_ring_stride, k_ring_group_stride, k_ring_row_stride,
    v_ring_stride, v_ring_group_stride, v_ring_row_stride, k_cmp_page_stride, k_cmp_group_stride, k_cmp_row_stride,
    v_cmp_page_stride, v_cmp_group_stride, v_cmp_row_stride,
    table_columns, num_parts, first_part, chosen_parts, first_compressed, window_size, score_scale,
    NEW: tl.constexpr, GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr, PAGE_ROWS: tl.constexpr, RING: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, UNIT_TILES: tl.constexpr, UNITS: tl.constexpr,
    COMPRESSION: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_TILES: tl.constexpr, COMPRESSED_PAGE_ROWS: tl.constexpr,
    STAGES: tl.constexpr, WINDOW_STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One part of the chosen blocks, or of the window, of one token and group; or every n-th compressed part.

    RING: its tokens; 0: no rings. COMPRESSION: tokens of a compressed block; 0: no program takes such blocks. Their
    tiles are of BLOCKS selection blocks, BLOCK_TILES of them a unit.
    """
    release_next(DEPENDENT)
    strides = (k_page_stride, k_row_stride, v_page_stride, v_row_stride)
    ring_strides = (k_ring_stride, k_ring_row_stride, v_ring_stride, v_ring_row_stride)
    cmp_strides = (k_cmp_page_stride, k_cmp_row_stride, v_cmp_page_stride, v_cmp_row_stride)
    parts = (part_maximum, part_total, part_o)
    PART_TILES: tl.constexpr = UNITS * UNIT_TILES
    # See `scores`.
    ONE_TILE: tl.constexpr = PART_TILES == 1
    PAGE_BLOCKS: tl.constexpr = PAGE_ROWS // SELECTION
    part = tl.program_id(0)
    group, token = tl.program_id(1) % GROUPS, tl.program_id(1) // GROUPS
    batch = tl.program_id(2).to(tl.int64)
    block_table += batch * table_columns
    k += group.to(tl.int64) * k_group_stride
    v += group.to(tl.int64) * v_group_stride
    window_k, window_v = k, v
    if RING > 0:
        window_k = k_win + group.to(tl.int64) * k_ring_group_stride
        window_v = v_win + group.to(tl.int64) * v_ring_group_stride
    in_window = part >= chosen_parts
    is_compressed = part >= first_compressed
    first_tile = part * PART_TILES
    if in_window:
        first_tile = (part - chosen_parts) * PART_TILES
    if COMPRESSION > 0:
        k_cmp += group.to(tl.int64) * k_cmp_group_stride
        v_cmp += group.to(tl.int64) * v_cmp_group_stride
    if DEPENDENT and UNITS == 1:
        if is_compressed == 0:
            prefetch_part(
                k, v, window_k, window_v, rows + batch, lengths + batch, block_table, token, in_window, first_tile,
                strides, ring_strides, table_columns, window_size,
                D, V, SELECTION, NUM_SELECTED, PAGE_ROWS, RING, KEYS, UNIT_TILES,
            )  # fmt: skip
        elif COMPRESSION > 0:
            prefetch_compressed(
                k_cmp, v_cmp, lengths + batch, block_table, (part - first_compressed) * BLOCK_TILES, cmp_strides,
                D, V, True, COMPRESSION, STRIDE, SELECTION // STRIDE, COMPRESSED_PAGE_ROWS, TAPS, BLOCKS, BLOCK_TILES,
            )  # fmt: skip
    wait_for_inputs(DEPENDENT)
    length, new = tl.load(lengths + batch), tl.load(num_new + batch)
    chosen = ((batch * NEW + token) * GROUPS + group) * NUM_SELECTED
    selected_blocks += chosen
    places += chosen
    # Asked for with the length, the choice comes with it.
    if ONE_TILE:
        slot, block, place = load_choice(
            selected_blocks, places, first_tile, in_window == 0, SELECTION, NUM_SELECTED, KEYS
        )
    if RING > 0:
        ring = tl.load(rows + batch).to(tl.int64)
        window_k += ring * k_ring_stride
        window_v += ring * v_ring_stride
    position = length + token
    num_keys = count_chosen(position, SELECTION, NUM_SELECTED)
    if in_window:
        num_keys = count_window(position, window_size)
    num_blocks = position // SELECTION + 1
    takes_all = num_blocks <= NUM_SELECTED
    head = tl.arange(0, ROWS)
    exists = head < Q_PER_KV
    head += group * Q_PER_KV
    offsets = batch * q_batch_stride + token.to(tl.int64) * q_time_stride + head * q_head_stride
    positions = position + head * 0
    row = (batch * NEW + token) * (GROUPS * Q_PER_KV) + head
    if (is_compressed == 0) & (token < new) & (first_tile * KEYS < num_keys):
        softmax = nothing_yet(ROWS, V_1, V_2, True)
        if ONE_TILE:
            key = first_tile * KEYS + tl.arange(0, KEYS)
            is_key = key < num_keys
            if in_window:
                k, v = window_k, window_v
                k_offsets, v_offsets = window_offsets(
                    block_table, key + position + 1 - num_keys, is_key, strides, ring_strides, PAGE_ROWS, RING
                )
            else:
                taken, taken_place = take_all(slot, block, place, block_table, takes_all, num_blocks, PAGE_BLOCKS)
                k_offsets, v_offsets, is_key = chosen_offsets(
                    taken, taken_place, key, is_key, position, strides, SELECTION, PAGE_BLOCKS
                )
            keys = load_keys(k, v, k_offsets, v_offsets, is_key, D, D_1, D_2, V, V_1, V_2, True)
            queries = load_rotated_parts(q, offsets, positions, exists, cos, sin, D, D_1, D_2)
            softmax, _ = attend_tile(queries, keys, is_key[None, :], score_scale, softmax, D_2, V_2, True)
        else:
            queries = load_rotated_parts(q, offsets, positions, exists, cos, sin, D, D_1, D_2)
            whole = nothing_yet(ROWS, V_1, V_2, True)
            end_tile = tl.minimum(first_tile + PART_TILES, tl.cdiv(num_keys, KEYS))
            if in_window:
                for tile in tl.range(first_tile, end_tile, num_stages=WINDOW_STAGES):
                    if UNITS > 1:
                        whole, softmax = begin_tile(tile, UNIT_TILES, whole, softmax, ROWS, V_1, V_2, True)
                    key = tile * KEYS + tl.arange(0, KEYS)
                    is_key = key < num_keys
                    k_offsets, v_offsets = window_offsets(
                        block_table, key + position + 1 - num_keys, is_key, strides, ring_strides, PAGE_ROWS, RING
                    )
                    keys = load_keys(window_k, window_v, k_offsets, v_offsets, is_key, D, D_1, D_2, V, V_1, V_2, True)
                    softmax, _ = attend_tile(queries, keys, is_key[None, :], score_scale, softmax, D_2, V_2, True)
            else:
                for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
                    if UNITS > 1:
                        whole, softmax = begin_tile(tile, UNIT_TILES, whole, softmax, ROWS, V_1, V_2, True)
                    key = tile * KEYS + tl.arange(0, KEYS)
                    slot, block, place = load_choice(
                        selected_blocks, places, tile, takes_all == 0, SELECTION, NUM_SELECTED, KEYS
                    )
                    taken, taken_place = take_all(slot, block, place, block_table, takes_all, num_blocks, PAGE_BLOCKS)
                    k_offsets, v_offsets, is_key = chosen_offsets(
                        taken, taken_place, key, key < num_keys, position, strides, SELECTION, PAGE_BLOCKS
                    )
                    keys = load_keys(k, v, k_offsets, v_offsets, is_key, D, D_1, D_2, V, V_1, V_2, True)
                    softmax, _ = attend_tile(queries, keys, is_key[None, :], score_scale, softmax, D_2, V_2, True)
            if UNITS > 1:
                softmax = add_softmax(whole, softmax, V_2, True)
        store_part(parts, row * num_parts + first_part + part, exists, softmax, V, V_1, V_2)
    if COMPRESSION > 0:  # noqa: SIM102
        if is_compressed & (token < new):
            compressed = count_compressed(length + new, COMPRESSION, STRIDE)
            tiles = count_tiles(length + new, COMPRESSION, STRIDE, SELECTION, BLOCKS)
            first, step = part - first_compressed, tl.num_programs(0) - first_compressed
            for compressed_part in range(first, tl.cdiv(tiles, UNITS * BLOCK_TILES), step):
                begin = compressed_part * (UNITS * BLOCK_TILES)
                softmax = attend_compressed(
                    q, offsets, positions, exists, cos, sin, k_cmp, v_cmp, block_table, begin,
                    tl.minimum(begin + UNITS * BLOCK_TILES, tiles), position, compressed,
                    cmp_strides, score_scale,
                    D, D_1, D_2, V, V_1, V_2, COMPRESSION, STRIDE, SELECTION, COMPRESSED_PAGE_ROWS, TAPS, ROWS,
                    BLOCKS, BLOCK_TILES, UNITS,
                )  # fmt: skip
                store_part(parts, row * num_parts + compressed_part, exists, softmax, V, V_1, V_2)


@Kernel
@triton.jit(do_not_specialize=["table_columns", "num_parts"])
def decode_dense_kernel(
    q, k, v, cos, sin, lengths, num_new, block_table, part_maximum, part_total, part_o,
    q_batch_stride, q_time_stride, q_head_stride, k_page_stride, k_group_stride, k_row_stride,
    v_page_stride, v_group_stride, v_row_stride, table_columns, num_parts, score_scale,
    NEW: tl.constexpr, GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    PAGE_ROWS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Every n-th of the parts of a sequence's past, UNITS units each, for one tile of rows."""
    wait_for_inputs(DEPENDENT)
    group = tl.program_id(1) % GROUPS
    batch = tl.program_id(2).to(tl.int64)
    length, new = tl.load(lengths + batch), tl.load(num_new + batch)
    token, head, position, exists = place_rows(tl.program_id(1) // GROUPS * ROWS, length, new, Q_PER_KV, ROWS)
    num_keys = tl.where(new > 0, length + new, 0)
    unit_tiles = dense_unit(num_keys) // KEYS
    tiles = tl.cdiv(num_keys, KEYS)
    head += group * Q_PER_KV
    offsets = batch * q_batch_stride + token.to(tl.int64) * q_time_stride + head * q_head_stride
    queries = load_rotated_parts(q, offsets, position, exists, cos, sin, D, D_1, D_2)
    k += group.to(tl.int64) * k_group_stride
    v += group.to(tl.int64) * v_group_stride
    block_table += batch * table_columns
    row = (batch * NEW + token) * (GROUPS * Q_PER_KV) + head
    for part in range(tl.program_id(0), tl.cdiv(tiles, UNITS * unit_tiles), tl.num_programs(0)):
        whole = nothing_yet(ROWS, V_1, V_2, True)
        softmax = nothing_yet(ROWS, V_1, V_2, True)
        first_tile = part * (UNITS * unit_tiles)
        for tile in tl.range(first_tile, tl.minimum(first_tile + UNITS * unit_tiles, tiles), num_stages=STAGES):
            whole, softmax = begin_tile(tile, unit_tiles, whole, softmax, ROWS, V_1, V_2, True)
            key = tile * KEYS + tl.arange(0, KEYS)
            is_key = key < num_keys
            if PAGE_ROWS % KEYS == 0:
                # The tile lies in one page.
                page = tl.load(block_table + tile // (PAGE_ROWS // KEYS)).to(tl.int64)
            else:
                page = tl.load(block_table + key // PAGE_ROWS, mask=is_key, other=0).to(tl.int64)
            visible = key[None, :] <= position[:, None]
            keys = load_keys(
                k, v, page * k_page_stride + key % PAGE_ROWS * k_row_stride,
                page * v_page_stride + key % PAGE_ROWS * v_row_stride, is_key, D, D_1, D_2, V, V_1, V_2, True,
            )  # fmt: skip
            softmax, _ = attend_tile(queries, keys, visible, score_scale, softmax, D_2, V_2, True)
        whole = add_softmax(whole, softmax, V_2, True)
        parts = (part_maximum, part_total, part_o)
        store_part(parts, row * num_parts + part, exists, whole, V, V_1, V_2)
