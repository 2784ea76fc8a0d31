"""Decoding's choice of selection blocks: as in `scoring`, from the sums that `scores` writes, or the scores of `index`.

A program holds the importance of all blocks of one token and group, and adds the heads of the group one after the
other. A head's sums of a tile are relative to the tile's maximum; over the head's total they are probabilities.

Its time is that of steps that wait for one another. So everything that it needs of several heads is asked for at the
same time, before any of it is used, and the threads exchange little: each of them adds up a head's total, and a step of
the search for the least important chosen block tries several thresholds.
"""

import triton
import triton.language as tl

from trifocal.ops.decode.triton.common import power_of_2
from trifocal.ops.decode.triton.scores import count_tiles
from trifocal.ops.triton.common import LOWEST
from trifocal.ops.triton.dependent_launch import wait_for_inputs
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.scoring import INFINITY_BITS, LINE

# What 1 is while units' sums are added up: one is at most its keys, and the largest at least a half.
FIXED_POINT = tl.constexpr(2.0**40)
# Thresholds that a step of the search tries at the same time.
THRESHOLDS = tl.constexpr(8)
# A number's bits are this much more than those of its half.
DOUBLE = tl.constexpr(1 << 23)


@triton.jit
def most_important_of_row(importance, free, num_free, wanted):
    """The `wanted` most important of the free blocks; as `scoring.most_important` of one row, in a third of the steps.

    A program has nothing else to do: a step takes as long as its exchange between threads, however many thresholds.
    """
    bits = tl.minimum(tl.maximum(importance.to(tl.int32, bitcast=True), 0), INFINITY_BITS)
    bits = tl.where(free, bits, -1)
    # Invariant: at least `wanted` values reach `low`, `reached` of them; fewer reach `high`, or none is wanted.
    low = num_free * 0
    reached = num_free
    high = tl.max(bits, 0) + 1
    number = tl.arange(0, THRESHOLDS)
    columns = bits[:, None]
    # The first thresholds are halves of the maximum: almost always one lies under the wanted value.
    step = tl.minimum(tl.cdiv(high, THRESHOLDS), DOUBLE)
    while (reached != wanted) & (high - low > 1):
        threshold = tl.where(number > 0, tl.maximum(high - (THRESHOLDS - number) * step, low), low)
        reach = tl.sum((columns >= threshold[None, :]).to(tl.int32), 0)
        enough = reach >= wanted
        reached = tl.min(tl.where(enough, reach, num_free), 0)
        low = tl.max(tl.where(enough, threshold, low), 0)
        high = tl.min(tl.where(enough, high, threshold), 0)
        step = tl.cdiv(high - low, THRESHOLDS)
    chosen = bits >= low
    if reached != wanted:
        # Ties: the lower index.
        above = bits > low
        equal = bits == low
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= wanted - tl.sum(above.to(tl.int32), 0)))
    return chosen


@Kernel
@triton.jit(do_not_specialize=["table_columns", "block_lines", "num_tiles", "num_rows"])
def decode_choice_kernel(
    sums, tile_maximum, tile_total, lengths, num_new, block_table, selected_blocks, places,
    table_columns, block_lines, num_tiles, num_rows,
    NEW: tl.constexpr, GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, COMPRESSION: tl.constexpr, STRIDE: tl.constexpr,
    SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, PAGE_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, UNIT_TILES: tl.constexpr,
    UNROLL: tl.constexpr, COLUMNS: tl.constexpr, INDEXED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the choice of one token and group, ascending, then -1; and where the blocks' pages are, in blocks.

    INDEXED: `sums` are the importance itself, [B, T, G, lines of blocks].
    """
    wait_for_inputs(DEPENDENT)
    group, token = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    batch = tl.program_id(1).to(tl.int64)
    length, new = tl.load(lengths + batch), tl.load(num_new + batch)
    if token < new:
        candidates = (length + token) // SELECTION + 1
        tiles = count_tiles(length + new, COMPRESSION, STRIDE, SELECTION, BLOCKS)
        scored = tiles * BLOCKS
        block = tl.arange(0, COLUMNS)
        is_candidate = block < candidates
        forced = is_candidate & ((block < INITIAL) | (block >= candidates - LOCAL))
        chosen = is_candidate
        table = block_table + batch * table_columns
        page = tl.load(table + block // PAGE_BLOCKS, mask=is_candidate, other=0)
        # Where all candidates are taken, importance does not matter.
        if candidates > NUM_SELECTED:
            free = is_candidate & (forced == 0)
            importance = tl.zeros([COLUMNS], tl.float32)
            first_row = (batch * NEW + token) * (GROUPS * Q_PER_KV) + group * Q_PER_KV
            has_direct = free & (block < scored)
            has_overflow = free & (block > 0) & (block <= scored)
            # A unit's sum is that of its last tile. As many units as there can be: at least one, a power of two.
            MAX_UNITS: tl.constexpr = (COLUMNS + BLOCKS * UNIT_TILES - 1) // (BLOCKS * UNIT_TILES)
            unit = tl.arange(0, MAX_UNITS)
            last_tile = tl.minimum(unit * UNIT_TILES + (UNIT_TILES - 1), tiles - 1)
            is_unit = unit * UNIT_TILES < tiles
            if INDEXED:
                of_group = sums + ((batch * NEW + token) * GROUPS + group) * (block_lines * LINE)
                importance = tl.load(of_group + block, mask=free, other=0.0)
            for first_head in range(0, 0 if INDEXED else Q_PER_KV, UNROLL):
                loaded = ()
                for step in tl.static_range(UNROLL):
                    row = first_row + first_head + step
                    # Heads that there are not add nothing.
                    is_head = first_head + step < Q_PER_KV
                    of_row = tile_maximum + row * num_tiles
                    unit_maximum = tl.load(of_row + last_tile, mask=is_unit & is_head, other=LOWEST)
                    unit_total = tl.load(tile_total + row * num_tiles + last_tile, mask=is_unit & is_head, other=0.0)
                    mask = has_direct & is_head
                    direct = tl.load(sums + row * (block_lines * LINE) + block, mask=mask, other=0.0)
                    direct_maximum = tl.load(of_row + block // BLOCKS, mask=mask, other=LOWEST)
                    overflow, overflow_maximum = direct, direct_maximum
                    if COMPRESSION > STRIDE:
                        mask = has_overflow & is_head
                        overflow = tl.load(sums + (num_rows + row) * (block_lines * LINE) + block, mask=mask, other=0.0)
                        overflow_maximum = tl.load(of_row + (block - 1) // BLOCKS, mask=mask, other=LOWEST)
                    loaded += ((unit_maximum, unit_total, direct, direct_maximum, overflow, overflow_maximum),)
                for step in tl.static_range(UNROLL):
                    unit_maximum, unit_total, direct, direct_maximum, overflow, overflow_maximum = loaded[step]
                    maximum = tl.max(unit_maximum, 0)
                    # A sum of whole numbers has the same bits in any order.
                    weighed = unit_total * power_of_2(unit_maximum - maximum) * FIXED_POINT
                    total = tl.sum(weighed.to(tl.int64), 0).to(tl.float32) * (1.0 / FIXED_POINT)
                    share = tl.where(total != 0.0, 1.0 / tl.where(total != 0.0, total, 1.0), 0.0)
                    importance = tl.fma(direct, power_of_2(direct_maximum - maximum) * share, importance)
                    if COMPRESSION > STRIDE:
                        importance = tl.fma(overflow, power_of_2(overflow_maximum - maximum) * share, importance)
            chosen = forced | most_important_of_row(
                importance, free, candidates - (INITIAL + LOCAL), NUM_SELECTED - (INITIAL + LOCAL)
            )
        slot = tl.cumsum(chosen.to(tl.int32), 0) - 1
        out = ((batch * NEW + token) * GROUPS + group) * NUM_SELECTED
        tl.store(selected_blocks + out + slot, block, mask=chosen)
        tl.store(places + out + slot, page.to(tl.int64) * PAGE_BLOCKS + block % PAGE_BLOCKS, mask=chosen)
        pad = tl.arange(0, NUM_SELECTED_PAD)
        tl.store(
            selected_blocks + out + pad, tl.full([NUM_SELECTED_PAD], -1, tl.int32),
            mask=(pad >= candidates) & (pad < NUM_SELECTED),
        )  # fmt: skip
