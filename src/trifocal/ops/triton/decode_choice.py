"""Decoding's choice of selection blocks: as in `scoring`, from the sums that `decode_scores` writes.

A program holds the importance of all blocks of one token and group, and adds the heads of the group one after the
other. A head's sums of a tile are relative to the tile's maximum; over the head's total they are probabilities.
"""

import triton
import triton.language as tl

from trifocal.ops.triton.common import LOWEST
from trifocal.ops.triton.decode_common import power_of_2
from trifocal.ops.triton.decode_scores import count_compressed
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.scoring import LINE, most_important

# Units whose sums are added up at a time.
CHUNK = tl.constexpr(16)


@Kernel
@triton.jit(do_not_specialize=["table_columns", "block_lines", "num_tiles", "num_rows"])
def decode_choice_kernel(
    sums, tile_maximum, tile_total, lengths, num_new, block_table, selected_blocks, places,
    table_columns, block_lines, num_tiles, num_rows,
    NEW: tl.constexpr, GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, COMPRESSION: tl.constexpr, STRIDE: tl.constexpr,
    SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, PAGE_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, UNIT_TILES: tl.constexpr,
    HEADS: tl.constexpr, UNROLL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The chosen blocks of one token and group, ascending, then -1; and where their pages are, in blocks."""
    group, token = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    batch = tl.program_id(1).to(tl.int64)
    length, new = tl.load(lengths + batch), tl.load(num_new + batch)
    candidates = tl.where(token < new, (length + token) // SELECTION + 1, 0)
    _, tiles = count_compressed(length + new, COMPRESSION, STRIDE, SELECTION, BLOCKS)
    scored = tiles * BLOCKS
    block = tl.arange(0, COLUMNS)
    is_candidate = block < candidates
    forced = is_candidate & ((block < INITIAL) | (block >= candidates - LOCAL))
    free = is_candidate & (forced == 0)

    importance = tl.zeros([COLUMNS], tl.float32)
    first_row = (batch * NEW + token) * (GROUPS * Q_PER_KV) + group * Q_PER_KV
    # Where all candidates are taken, importance does not matter.
    if candidates > NUM_SELECTED:
        head = tl.arange(0, HEADS)
        maximum = tl.full([HEADS], LOWEST, tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        for first_unit in range(0, tl.cdiv(tiles, UNIT_TILES), CHUNK):
            # A unit's sum is that of its last tile.
            unit = first_unit + tl.arange(0, CHUNK)
            last_tile = tl.minimum(unit * UNIT_TILES + (UNIT_TILES - 1), tiles - 1)
            of_unit = (first_row + head)[:, None] * num_tiles + last_tile[None, :]
            is_unit = (head < Q_PER_KV)[:, None] & (unit * UNIT_TILES < tiles)[None, :]
            unit_maximum = tl.load(tile_maximum + of_unit, mask=is_unit, other=LOWEST)
            unit_total = tl.load(tile_total + of_unit, mask=is_unit, other=0.0)
            new_maximum = tl.maximum(maximum, tl.max(unit_maximum, 1))
            added = tl.sum(unit_total * power_of_2(unit_maximum - new_maximum[:, None]), 1)
            total = total * power_of_2(maximum - new_maximum) + added
            maximum = new_maximum
        # Heads that there are not add nothing.
        inverse = tl.where(head < Q_PER_KV, 1.0 / tl.where(head < Q_PER_KV, total, 1.0), 0.0)
        row_blocks = block_lines * LINE
        has_direct = free & (block < scored)
        has_overflow = free & (block > 0) & (block <= scored)
        for first_head in range(0, Q_PER_KV, UNROLL):
            # Asked for together, the sums of several heads come together.
            for step in tl.static_range(UNROLL):
                number = first_head + step
                is_head = number < Q_PER_KV
                row = first_row + number
                of_head = tl.sum(tl.where(head == number, maximum, 0.0), 0)
                share = tl.sum(tl.where(head == number, inverse, 0.0), 0)
                here = tile_maximum + row * num_tiles + block // BLOCKS
                direct = tl.load(sums + row * row_blocks + block, mask=has_direct & is_head, other=0.0)
                weight = tl.load(here, mask=has_direct & is_head, other=LOWEST)
                importance += direct * (power_of_2(weight - of_head) * share)
                if COMPRESSION > STRIDE:
                    before = tile_maximum + row * num_tiles + (block - 1) // BLOCKS
                    overflow = tl.load(
                        sums + (num_rows + row) * row_blocks + block, mask=has_overflow & is_head, other=0.0
                    )
                    weight = tl.load(before, mask=has_overflow & is_head, other=LOWEST)
                    importance += overflow * (power_of_2(weight - of_head) * share)

    taken = tl.minimum(candidates, NUM_SELECTED)
    wanted = tl.zeros([1], tl.int32) + (taken - tl.sum(forced.to(tl.int32), 0))
    chosen = forced[None, :] | most_important(importance[None, :], free[None, :], wanted, 1)
    slot = tl.cumsum(chosen.to(tl.int32), 1) - 1
    out = ((batch * NEW + token) * GROUPS + group) * NUM_SELECTED
    tl.store(selected_blocks + out + slot, block[None, :], mask=chosen)
    page = tl.load(block_table + batch * table_columns + block[None, :] // PAGE_BLOCKS, mask=chosen, other=0)
    tl.store(places + out + slot, page.to(tl.int64) * PAGE_BLOCKS + block[None, :] % PAGE_BLOCKS, mask=chosen)
    pad = tl.arange(0, NUM_SELECTED_PAD)
    tl.store(
        selected_blocks + out + pad, tl.full([NUM_SELECTED_PAD], -1, tl.int32),
        mask=(pad >= taken) & (pad < NUM_SELECTED),
    )  # fmt: skip
