"""Decoding's first kernel: writes new tokens into the caches, and the compressed blocks that they end.

A program of `append_kernel` has one job for one sequence and group: to rotate and write the new tokens, or to make the
mean of one compressed block that may be due, from the ring and from the new tokens themselves. The keys of an index
count as their own group. A learned φ takes two more kernels, as its sums over all numbers of a block are shared
by several programs: `learned_hidden_kernel` makes its hidden units, and `learned_blocks_kernel` what is written. Where
no block is due their programs end at once; in a step that ends no block, as 15 of 16 steps of a sequence, they are left
out.

Further programs score blocks for an index, see `index`, in the same launch or in one behind it.
"""

import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import dispatch
from trifocal.ops.decode.caches import (
    DecodeBatch,
    DenseCache,
    Index,
    LearnedCompressor,
    Rotary,
    SparseCache,
    WindowCache,
)
from trifocal.ops.decode.triton.index import IndexScoring, plan_scores, prefetch_index_keys, score_tiles
from trifocal.ops.geometry import Geometry
from trifocal.ops.tiles import cdiv, next_power_of_2
from trifocal.ops.triton.common import unit_stride
from trifocal.ops.triton.dependent_launch import dependent_launch, release_next, wait_for_inputs
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.scoring import LINE

# Tokens of a block that are added up at a time.
MAX_ROWS = 32
# Hidden units of a learned φ that a program makes, bytes of a block's numbers that it takes at a time, and hidden units
# that are added up at a time.
UNITS = 16
DEPTH_BYTES = 1024
UNITS_OF_SUM = 64
# Constants of `append_kernel` that only an index and its scores have.
_INDEX_SIZES = (
    "INDEX", "INDEX_HALF", "INDEX_1", "INDEX_2", "NEW", "SELECTION", "NUM_SELECTED", "ROWS", "BLOCKS", "TAPS",
    "ONE_TILE", "STAGES",
)  # fmt: skip


@triton.jit
def rotate_halves(first, second, cos, sin, position, keep, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """Both halves of rows of keys, [rows, COLUMNS] each, rotated by their positions; in fp32."""
    column = tl.arange(0, COLUMNS)
    place = position.to(tl.int64)[:, None] * HALF + column[None, :]
    mask = keep[:, None] & (column < HALF)[None, :]
    cosine = tl.load(cos + place, mask=mask, other=0.0).to(tl.float32)
    sine = tl.load(sin + place, mask=mask, other=0.0).to(tl.float32)
    return first * cosine - second * sine, second * cosine + first * sine


@triton.jit
def load_halves(x, offsets, keep, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Both halves of rows of x, [rows, COLUMNS] each; COLUMNS cover half of SIZE."""
    HALF: tl.constexpr = (SIZE + 1) // 2
    column = tl.arange(0, COLUMNS)
    source = x + offsets[:, None] + column[None, :]
    first = tl.load(source, mask=keep[:, None] & (column < HALF)[None, :], other=0.0)
    second = tl.load(source + HALF, mask=keep[:, None] & (HALF + column < SIZE)[None, :], other=0.0)
    return first, second


@triton.jit
def load_rotated_halves(x, offsets, keep, position, cos, sin, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Load both halves and rotate them, in fp32."""
    first, second = load_halves(x, offsets, keep, SIZE, COLUMNS)
    return rotate_halves(
        first.to(tl.float32), second.to(tl.float32), cos, sin, position, keep, (SIZE + 1) // 2, COLUMNS
    )


@triton.jit
def store_rows(first, second, cache, places, keep, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Write rows, given as two halves, into a cache."""
    HALF: tl.constexpr = (SIZE + 1) // 2
    column = tl.arange(0, COLUMNS)
    target = cache + places[:, None] + column[None, :]
    tl.store(target, first.to(cache.dtype.element_ty), mask=keep[:, None] & (column < HALF)[None, :])
    tl.store(target + HALF, second.to(cache.dtype.element_ty), mask=keep[:, None] & (HALF + column < SIZE)[None, :])


@triton.jit
def mean_of_columns(
    ring, ring_stride, x, x_stride, start, length, FIRST: tl.constexpr, LAST: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, RING: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The mean of the rows of a block, the tokens before this step from the ring and the others from x; in fp32."""
    column = FIRST + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, BLOCK, CHUNK):
        in_block = begin + tl.arange(0, CHUNK)
        token = start + in_block
        inside = (in_block < BLOCK)[:, None] & (column < LAST)[None, :]
        is_old = inside & (token < length)[:, None]
        is_new = inside & (token >= length)[:, None]
        old = tl.load(ring + (token % RING * ring_stride)[:, None] + column[None, :], mask=is_old, other=0.0)
        new = tl.load(x + ((token - length) * x_stride)[:, None] + column[None, :], mask=is_new, other=0.0)
        total += tl.sum(old.to(tl.float32) + new.to(tl.float32), 0)
    return total * (1.0 / BLOCK)


@triton.jit
def mean_of_block(
    ring, ring_stride, x, x_stride, cache, start, length, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, RING: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The mean of one block as two halves, [1, COLUMNS] each, in the type of the cache."""
    HALF: tl.constexpr = (SIZE + 1) // 2
    first = mean_of_columns(ring, ring_stride, x, x_stride, start, length, 0, HALF, COLUMNS, BLOCK, RING, CHUNK)
    second = mean_of_columns(ring, ring_stride, x, x_stride, start, length, HALF, SIZE, COLUMNS, BLOCK, RING, CHUNK)
    # Rounded before the rotation, as the mean of a whole sequence is.
    return first[None, :].to(cache.dtype.element_ty), second[None, :].to(cache.dtype.element_ty)


@triton.jit
def store_halves(
    first, second, cache, place, position, cos, sin, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROTATED: tl.constexpr
):
    """Write one row of compressed keys or values, given as two halves, [1, COLUMNS] each."""
    HALF: tl.constexpr = (SIZE + 1) // 2
    if ROTATED:
        positions = tl.zeros([1], tl.int32) + position
        first, second = rotate_halves(
            first.to(tl.float32), second.to(tl.float32), cos, sin, positions, positions >= 0, HALF, COLUMNS
        )
    column = tl.arange(0, COLUMNS)[None, :]
    tl.store(cache + place + column, first.to(cache.dtype.element_ty), mask=column < HALF)
    tl.store(cache + place + HALF + column, second.to(cache.dtype.element_ty), mask=HALF + column < SIZE)


@triton.jit
def due_block(length, new, number, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """The block of this number among those that the new tokens may end, and whether they do."""
    before = tl.where(length >= BLOCK, (length - BLOCK) // STRIDE + 1, 0)
    block = before + number
    return block, (new > 0) & (block * STRIDE + BLOCK <= length + new)


@Kernel
@triton.jit(do_not_specialize=["table_columns", "block_lines"])
def append_kernel(
    k_raw, v_raw, k, v, k_win, v_win, k_raw_ring, v_raw_ring, k_cache, v_cache, k_win_ring, v_win_ring, k_cmp, v_cmp,
    k_idx, k_idx_cache, q_idx, scores, cos_idx, sin_idx, cos, sin, rows, lengths, num_new, block_table,
    k_raw_batch, k_raw_time, k_raw_head, v_raw_batch, v_raw_time, v_raw_head,
    k_batch, k_time, k_head, v_batch, v_time, v_head, k_win_batch, k_win_time, k_win_head,
    v_win_batch, v_win_time, v_win_head,
    k_raw_ring_row, k_raw_ring_head, k_raw_ring_time, v_raw_ring_row, v_raw_ring_head, v_raw_ring_time,
    k_page, k_cache_head, k_cache_time, v_page, v_cache_head, v_cache_time,
    k_win_ring_row, k_win_ring_head, k_win_ring_time, v_win_ring_row, v_win_ring_head, v_win_ring_time,
    k_cmp_page, k_cmp_head, k_cmp_time, v_cmp_page, v_cmp_head, v_cmp_time,
    k_idx_batch, k_idx_time, k_idx_page, k_idx_cache_time, q_idx_batch, q_idx_time, q_idx_head, block_lines,
    table_columns,
    GROUPS: tl.constexpr, D: tl.constexpr, D_HALF: tl.constexpr, V: tl.constexpr, V_HALF: tl.constexpr,
    PAGE_ROWS: tl.constexpr, RAW_RING: tl.constexpr, WINDOW_RING: tl.constexpr, HAS_V_CMP: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr,
    INDEX: tl.constexpr, INDEX_HALF: tl.constexpr, INDEX_1: tl.constexpr, INDEX_2: tl.constexpr,
    SCORES: tl.constexpr, NEW: tl.constexpr, SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, TAPS: tl.constexpr, ONE_TILE: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Job 0: write the new tokens. Job 1 and on: one compressed block each. RINGs and PAGE_ROWS: their tokens; INDEX:
    width of the keys of an index, which the programs behind the last group write; 0 where is none.

    SCORES: 1: there is only job 0, groups are along the first axis, and the programs behind them score the past; 2: all
    programs score, the new keys too.
    """
    job, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    block_table += batch * table_columns
    if SCORES:
        release_next(DEPENDENT)
        ROW_TILES: tl.constexpr = (NEW * GROUPS + ROWS - 1) // ROWS
        WRITERS: tl.constexpr = GROUPS + 1 if SCORES == 1 else 0
        scorer = tl.program_id(0) - WRITERS
        job, group = 0, (scorer + (GROUPS + 1)).to(tl.int64)
        if DEPENDENT:  # noqa: SIM102
            if scorer >= 0:
                prefetch_index_keys(
                    k_idx_cache, lengths + batch, block_table, scorer // ROW_TILES, k_idx_page, k_idx_cache_time,
                    INDEX, SELECTION, PAGE_ROWS, BLOCKS, TAPS,
                )  # fmt: skip
    wait_for_inputs(DEPENDENT)
    length, new = tl.load(lengths + batch), tl.load(num_new + batch)
    if SCORES:  # noqa: SIM102
        if scorer >= 0:
            score_tiles(
                q_idx + batch * q_idx_batch, k_idx_cache, cos_idx, sin_idx, block_table, scores,
                scorer % ROW_TILES * ROWS, scorer // ROW_TILES, (tl.num_programs(0) - WRITERS) // ROW_TILES,
                batch, length, new, length + new * (SCORES - 1),
                q_idx_time, q_idx_head, k_idx_page, k_idx_cache_time, block_lines,
                NEW, GROUPS, INDEX, INDEX_1, INDEX_2, SELECTION, NUM_SELECTED, PAGE_ROWS, ROWS, BLOCKS, TAPS, ONE_TILE,
                STAGES,
            )  # fmt: skip
    if INDEX > 0:  # noqa: SIM102
        if (job == 0) & (group == GROUPS):
            token = tl.arange(0, TOKENS)
            exists = token < new
            position = length + token
            page = tl.load(block_table + position // PAGE_ROWS, mask=exists, other=0).to(tl.int64)
            key_1, key_2 = load_rotated_halves(
                k_idx + batch * k_idx_batch, token * k_idx_time, exists, position, cos_idx, sin_idx, INDEX, INDEX_HALF
            )
            places = page * k_idx_page + position % PAGE_ROWS * k_idx_cache_time
            store_rows(key_1, key_2, k_idx_cache, places, exists, INDEX, INDEX_HALF)
    is_group = group < GROUPS
    ring_row = batch
    if RAW_RING + WINDOW_RING > 0:
        ring_row = tl.load(rows + batch).to(tl.int64)
    if RAW_RING > 0:
        k_raw += batch * k_raw_batch + group * k_raw_head
        k_raw_ring += ring_row * k_raw_ring_row + group * k_raw_ring_head
    if HAS_V_CMP:
        v_raw += batch * v_raw_batch + group * v_raw_head
        v_raw_ring += ring_row * v_raw_ring_row + group * v_raw_ring_head
    if (job == 0) & is_group:
        token = tl.arange(0, TOKENS)
        exists = token < new
        position = length + token
        # Everything is read before anything is written: a load never waits for a store that might be to its place.
        if PAGE_ROWS > 0:
            page = tl.load(block_table + position // PAGE_ROWS, mask=exists, other=0).to(tl.int64)
            page_row = position % PAGE_ROWS
            k_1, k_2 = load_rotated_halves(
                k + batch * k_batch + group * k_head, token * k_time, exists, position, cos, sin, D, D_HALF
            )
            v_1, v_2 = load_halves(v + batch * v_batch + group * v_head, token * v_time, exists, V, V_HALF)
        if WINDOW_RING > 0:
            k_win_1, k_win_2 = load_rotated_halves(
                k_win + batch * k_win_batch + group * k_win_head, token * k_win_time, exists, position, cos, sin,
                D, D_HALF,
            )  # fmt: skip
            v_win_1, v_win_2 = load_halves(
                v_win + batch * v_win_batch + group * v_win_head, token * v_win_time, exists, V, V_HALF
            )
        if RAW_RING > 0:
            k_raw_1, k_raw_2 = load_halves(k_raw, token * k_raw_time, exists, D, D_HALF)
        if HAS_V_CMP:
            v_raw_1, v_raw_2 = load_halves(v_raw, token * v_raw_time, exists, V, V_HALF)
        if PAGE_ROWS > 0:
            store_rows(
                k_1, k_2, k_cache + group * k_cache_head, page * k_page + page_row * k_cache_time, exists, D, D_HALF
            )
            store_rows(
                v_1, v_2, v_cache + group * v_cache_head, page * v_page + page_row * v_cache_time, exists, V, V_HALF
            )
        if WINDOW_RING > 0:
            place = position % WINDOW_RING
            k_win_ring += ring_row * k_win_ring_row + group * k_win_ring_head
            v_win_ring += ring_row * v_win_ring_row + group * v_win_ring_head
            store_rows(k_win_1, k_win_2, k_win_ring, place * k_win_ring_time, exists, D, D_HALF)
            store_rows(v_win_1, v_win_2, v_win_ring, place * v_win_ring_time, exists, V, V_HALF)
        if RAW_RING > 0:
            store_rows(k_raw_1, k_raw_2, k_raw_ring, position % RAW_RING * k_raw_ring_time, exists, D, D_HALF)
        if HAS_V_CMP:
            store_rows(v_raw_1, v_raw_2, v_raw_ring, position % RAW_RING * v_raw_ring_time, exists, V, V_HALF)
    elif RAW_RING > 0:
        block, is_due = due_block(length, new, job - 1, BLOCK, STRIDE)
        if is_due & is_group:
            slot = block + (BLOCK // STRIDE - 1)
            page = tl.load(block_table + slot // (PAGE_ROWS // STRIDE)).to(tl.int64)
            page_row = slot % (PAGE_ROWS // STRIDE)
            start = block * STRIDE
            k_1, k_2 = mean_of_block(
                k_raw_ring, k_raw_ring_time, k_raw, k_raw_time, k_cmp, start, length, D, D_HALF, BLOCK, RAW_RING, CHUNK
            )
            if HAS_V_CMP:
                v_1, v_2 = mean_of_block(
                    v_raw_ring, v_raw_ring_time, v_raw, v_raw_time, v_cmp, start, length, V, V_HALF,
                    BLOCK, RAW_RING, CHUNK,
                )  # fmt: skip
            place = page * k_cmp_page + page_row * k_cmp_time
            store_halves(k_1, k_2, k_cmp + group * k_cmp_head, place, start, cos, sin, D, D_HALF, True)
            if HAS_V_CMP:
                place = page * v_cmp_page + page_row * v_cmp_time
                store_halves(v_1, v_2, v_cmp + group * v_cmp_head, place, start, cos, sin, V, V_HALF, False)


@triton.jit
def hidden_of_block(
    ring, positions, up, hidden, start, first, ring_head, ring_time,
    GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, SIZE: tl.constexpr, HIDDEN: tl.constexpr, RING: tl.constexpr,
    BLOCK: tl.constexpr, UNITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """UNITS hidden units of φ, from `first` on, of all groups of a block: hidden [GROUPS, HIDDEN]."""
    DEPTH: tl.constexpr = BLOCK * SIZE
    dtype: tl.constexpr = ring.dtype.element_ty
    group, unit = tl.arange(0, GROUPS_PAD), first + tl.arange(0, UNITS)
    is_group, is_unit = group < GROUPS, unit < HIDDEN
    total = tl.zeros([GROUPS_PAD, UNITS], tl.float32)
    for begin in range(0, DEPTH, CHUNK):
        # Columns of a token side by side, token after token.
        number = begin + tl.arange(0, CHUNK)
        inside = number < DEPTH
        place = (start + number // SIZE) % RING * ring_time + number % SIZE
        x = tl.load(
            ring + group.to(tl.int64)[:, None] * ring_head + place[None, :],
            mask=is_group[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        position = tl.load(positions + number, mask=inside, other=0.0).to(dtype)
        weight = tl.load(
            up + unit[None, :] * DEPTH + number[:, None], mask=is_unit[None, :] & inside[:, None], other=0.0
        )
        placed = (x.to(tl.float32) + position.to(tl.float32)[None, :]).to(dtype)
        total = tl.dot(placed, weight.to(dtype), total, input_precision="ieee")
    # Rounded where PyTorch rounds.
    total = total.to(dtype).to(tl.float32)
    tl.store(
        hidden + group[:, None] * HIDDEN + unit[None, :], (total / (1.0 + tl.exp(-total))).to(dtype),
        mask=is_group[:, None] & is_unit[None, :],
    )  # fmt: skip


@Kernel
@triton.jit
def learned_hidden_kernel(
    k_ring, v_ring, k_positions, v_positions, k_up, v_up, k_hidden, v_hidden, rows, lengths, num_new,
    k_ring_row, k_ring_head, k_ring_time, v_ring_row, v_ring_head, v_ring_time,
    GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, D: tl.constexpr, V: tl.constexpr, K_HIDDEN: tl.constexpr,
    V_HIDDEN: tl.constexpr, RING: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    UNITS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Some hidden units of φ of a block that is due, first those of keys: [B * MOST, GROUPS, HIDDEN] each."""
    wait_for_inputs(DEPENDENT)
    K_TILES: tl.constexpr = (K_HIDDEN + UNITS - 1) // UNITS
    batch, number = tl.program_id(1) // MOST, tl.program_id(1) % MOST
    block, is_due = due_block(tl.load(lengths + batch), tl.load(num_new + batch), number, BLOCK, STRIDE)
    if is_due:
        row, out, tile = tl.load(rows + batch).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(0)
        if tile < K_TILES:
            hidden_of_block(
                k_ring + row * k_ring_row, k_positions, k_up, k_hidden + out * (GROUPS * K_HIDDEN), block * STRIDE,
                tile * UNITS, k_ring_head, k_ring_time, GROUPS, GROUPS_PAD, D, K_HIDDEN, RING, BLOCK, UNITS, CHUNK,
            )  # fmt: skip
        else:
            hidden_of_block(
                v_ring + row * v_ring_row, v_positions, v_up, v_hidden + out * (GROUPS * V_HIDDEN), block * STRIDE,
                (tile - K_TILES) * UNITS, v_ring_head, v_ring_time, GROUPS, GROUPS_PAD, V, V_HIDDEN, RING, BLOCK,
                UNITS, CHUNK,
            )  # fmt: skip


@triton.jit
def half_of_block(
    ring, down, hidden, start, ring_time, dtype: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    COLUMNS: tl.constexpr, HIDDEN: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """Columns FIRST to LAST of φ of a block, [1, COLUMNS], in the type of the cache."""
    column = FIRST + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, HIDDEN, UNITS):
        unit = begin + tl.arange(0, UNITS)
        weight = tl.load(
            down + column[:, None] * HIDDEN + unit[None, :],
            mask=(column < LAST)[:, None] & (unit < HIDDEN)[None, :], other=0.0,
        )  # fmt: skip
        x = tl.load(hidden + unit, mask=unit < HIDDEN, other=0.0)
        total += tl.sum(weight.to(dtype).to(tl.float32) * x.to(tl.float32)[None, :], 1)
    # Every token of a block that is due lies in the ring.
    mean = mean_of_columns(
        ring, ring_time, ring, ring_time, start, start + BLOCK, FIRST, LAST, COLUMNS, BLOCK, RING, ROWS
    )
    return (mean.to(dtype).to(tl.float32) + total.to(dtype).to(tl.float32)).to(dtype)[None, :]


@triton.jit
def write_learned_block(
    ring, down, hidden, cache, start, ring_time, place, cos, sin,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, HIDDEN: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Write φ of one block and group."""
    HALF: tl.constexpr = (SIZE + 1) // 2
    dtype: tl.constexpr = cache.dtype.element_ty
    first = half_of_block(
        ring, down, hidden, start, ring_time, dtype, 0, HALF, COLUMNS, HIDDEN, RING, BLOCK, ROWS, UNITS
    )
    second = half_of_block(
        ring, down, hidden, start, ring_time, dtype, HALF, SIZE, COLUMNS, HIDDEN, RING, BLOCK, ROWS, UNITS
    )
    store_halves(first, second, cache, place, start, cos, sin, SIZE, COLUMNS, ROTATED)


@Kernel
@triton.jit(do_not_specialize=["table_columns"])
def learned_blocks_kernel(
    k_ring, v_ring, k_down, v_down, k_hidden, v_hidden, k_cmp, v_cmp, cos, sin, rows, lengths, num_new, block_table,
    k_ring_row, k_ring_head, k_ring_time, v_ring_row, v_ring_head, v_ring_time,
    k_page, k_head, k_time, v_page, v_head, v_time, table_columns,
    GROUPS: tl.constexpr, D: tl.constexpr, D_HALF: tl.constexpr, V: tl.constexpr, V_HALF: tl.constexpr,
    K_HIDDEN: tl.constexpr, V_HIDDEN: tl.constexpr, RING: tl.constexpr, MOST: tl.constexpr, PAGE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write φ of one block that is due, of one group's keys, or by the programs behind them of its values."""
    wait_for_inputs(DEPENDENT)
    batch, number = tl.program_id(1) // MOST, tl.program_id(1) % MOST
    group = (tl.program_id(0) % GROUPS).to(tl.int64)
    block, is_due = due_block(tl.load(lengths + batch), tl.load(num_new + batch), number, BLOCK, STRIDE)
    if is_due:
        row, of_group = tl.load(rows + batch).to(tl.int64), tl.program_id(1).to(tl.int64) * GROUPS + group
        slot = block + (BLOCK // STRIDE - 1)
        page = tl.load(block_table + batch.to(tl.int64) * table_columns + slot // PAGE_ROWS).to(tl.int64)
        if tl.program_id(0) < GROUPS:
            write_learned_block(
                k_ring + row * k_ring_row + group * k_ring_head, k_down, k_hidden + of_group * K_HIDDEN,
                k_cmp + group * k_head, block * STRIDE, k_ring_time, page * k_page + slot % PAGE_ROWS * k_time,
                cos, sin, D, D_HALF, K_HIDDEN, RING, BLOCK, ROWS, UNITS, True,
            )  # fmt: skip
        else:
            write_learned_block(
                v_ring + row * v_ring_row + group * v_ring_head, v_down, v_hidden + of_group * V_HIDDEN,
                v_cmp + group * v_head, block * STRIDE, v_ring_time, page * v_page + slot % PAGE_ROWS * v_time,
                cos, sin, V, V_HALF, V_HIDDEN, RING, BLOCK, ROWS, UNITS, False,
            )  # fmt: skip


def append_sparse(
    cache: SparseCache,
    batch: DecodeBatch,
    new: tuple[Tensor | None, ...],
    geometry: Geometry,
    rotary: Rotary,
    compress: tuple[LearnedCompressor, LearnedCompressor | None] | None,
    index: Index | None,
) -> Tensor | None:
    """See `trifocal.ops.append_sparse`; `new`: keys and values of cmp, slc and win."""
    k_raw, v_raw, k, v, k_win, v_win = (None if x is None else unit_stride(x) for x in new)
    assert k is not None and v is not None
    num_tokens, groups = k.shape[1:3]
    most_due = cdiv(num_tokens, geometry.compression_stride) if cache.k_cmp is not None and batch.ends_block else 0
    # A tensor that is not there is never read: any other stands for it.
    pairs = (
        (k_raw, cache.k_raw), (v_raw, cache.v_raw), (k, cache.k_slc), (v, cache.v_slc),
        (k_win, cache.k_win), (v_win, cache.v_win),
    )  # fmt: skip
    sources = [k if x is None else x for x, _ in pairs]
    caches = [cache.k_slc if held is None else held for _, held in pairs]
    k_cmp, v_cmp = (cache.k_slc if held is None else held for held in (cache.k_cmp, cache.v_cmp))
    plan = None
    if index is not None and cache.k_idx is not None and not batch.takes_all:
        plan = plan_scores(index.q, cache.k_idx, batch, geometry)
    index_tensors, index_strides, index_sizes = _of_index(index, cache.k_idx, k, rotary, plan)

    def launch(programs: int, writers: int, scores: int, **options: int | None) -> None:
        append_kernel[programs, writers, k.shape[0]](
            *sources, *caches, k_cmp, v_cmp, *index_tensors, *rotary,
            batch.rows, batch.lengths, batch.num_new, batch.block_table,
            *(stride for x in sources for stride in x.stride()[:3]),
            *(stride for x in (*caches, k_cmp, v_cmp) for stride in x.stride()[:3]),
            *index_strides, batch.block_table.stride(0), **_sizes(k, v), **index_sizes, SCORES=scores,
            PAGE_ROWS=cache.k_slc.shape[2], RAW_RING=0 if cache.k_raw is None else cache.k_raw.shape[2],
            WINDOW_RING=0 if cache.k_win is None else cache.k_win.shape[2], HAS_V_CMP=cache.v_cmp is not None,
            BLOCK=geometry.compression_block_size, STRIDE=geometry.compression_stride,
            CHUNK=min(MAX_ROWS, next_power_of_2(geometry.compression_block_size)), **options,
            **dependent_launch(k.device),
        )  # fmt: skip

    jobs, writers = 1 if compress else 1 + most_due, groups + (index is not None)
    if plan is not None and dispatch.decode_append_scores(num_tokens, jobs, geometry):
        launch(writers + plan.programs, 1, 1, **plan.options)
    else:
        launch(jobs, writers, 0, num_warps=2)
        if plan is not None:
            launch(plan.programs, 1, 2, **plan.options)
    if compress and most_due:
        _append_learned(cache, compress, batch, geometry, rotary, most_due)
    return None if plan is None or index is None else plan.scores.unflatten(0, index.q.shape[:3])


def append_dense(cache: DenseCache | WindowCache, batch: DecodeBatch, k: Tensor, v: Tensor, rotary: Rotary) -> None:
    """See `trifocal.ops.append_dense`."""
    k, v = unit_stride(k), unit_stride(v)
    sources, caches = (k, v) * 3, tuple(vars(cache).values()) * 4
    size, paged = caches[0].shape[2], isinstance(cache, DenseCache)
    index_tensors, index_strides, index_sizes = _of_index(None, None, k, rotary)
    append_kernel[1, k.shape[2], k.shape[0]](
        *sources, *caches, *index_tensors, *rotary, batch.rows, batch.lengths, batch.num_new, batch.block_table,
        *(stride for x in (*sources, *caches) for stride in x.stride()[:3]), *index_strides,
        batch.block_table.stride(0), **_sizes(k, v), **index_sizes, SCORES=0, PAGE_ROWS=size if paged else 0,
        RAW_RING=0, WINDOW_RING=0 if paged else size, HAS_V_CMP=False, BLOCK=1, CHUNK=1, STRIDE=1, num_warps=2,
        **dependent_launch(k.device),
    )  # fmt: skip


def _append_learned(
    cache: SparseCache,
    compress: tuple[LearnedCompressor, LearnedCompressor | None],
    batch: DecodeBatch,
    geometry: Geometry,
    rotary: Rotary,
    most_due: int,
) -> None:
    """Write φ of the blocks that are due, from the rings, which hold the new tokens."""
    k_ring, k_cmp, phi_k = cache.k_raw, cache.k_cmp, compress[0]
    assert k_ring is not None and k_cmp is not None
    # Values that are not compressed have no programs: the keys' tensors stand for theirs.
    v_ring, v_cmp, phi_v = k_ring, k_cmp, phi_k
    has_values = compress[1] is not None and cache.v_raw is not None and cache.v_cmp is not None
    if has_values:
        v_ring, v_cmp, phi_v = cache.v_raw, cache.v_cmp, compress[1]
    groups, num_blocks = k_ring.shape[1], batch.lengths.shape[0] * most_due
    hidden = [k_ring.new_empty(num_blocks, groups, phi.up.shape[0]) for phi in (phi_k, phi_v)]
    sizes = {
        "GROUPS": groups, "D": k_ring.shape[3], "V": v_ring.shape[3], "K_HIDDEN": phi_k.up.shape[0],
        "V_HIDDEN": phi_v.up.shape[0], "RING": k_ring.shape[2], "MOST": most_due,
        "BLOCK": geometry.compression_block_size, "STRIDE": geometry.compression_stride,
        **dependent_launch(k_ring.device),
    }  # fmt: skip
    rings = *k_ring.stride()[:3], *v_ring.stride()[:3]
    tiles = cdiv(phi_k.up.shape[0], UNITS) + has_values * cdiv(phi_v.up.shape[0], UNITS)
    learned_hidden_kernel[tiles, num_blocks](
        k_ring, v_ring, phi_k.positions, phi_v.positions, phi_k.up, phi_v.up, *hidden,
        batch.rows, batch.lengths, batch.num_new, *rings, **sizes,
        GROUPS_PAD=max(16, next_power_of_2(groups)), UNITS=UNITS,
        CHUNK=DEPTH_BYTES // k_ring.itemsize, num_stages=2,
    )  # fmt: skip
    learned_blocks_kernel[groups * (1 + has_values), num_blocks](
        k_ring, v_ring, phi_k.down, phi_v.down, *hidden, k_cmp, v_cmp, *rotary,
        batch.rows, batch.lengths, batch.num_new, batch.block_table, *rings, *k_cmp.stride()[:3], *v_cmp.stride()[:3],
        batch.block_table.stride(0), **sizes, D_HALF=next_power_of_2((k_ring.shape[3] + 1) // 2),
        V_HALF=next_power_of_2((v_ring.shape[3] + 1) // 2), PAGE_ROWS=k_cmp.shape[2],
        ROWS=min(MAX_ROWS, next_power_of_2(geometry.compression_block_size)), UNITS=UNITS_OF_SUM,
    )  # fmt: skip


def _of_index(
    index: Index | None, held: Tensor | None, like: Tensor, rotary: Rotary, plan: IndexScoring | None = None
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, int]]:
    """Tensors, strides and sizes of an index and its scores; where there are none, any tensors, which are not read."""
    sizes = dict.fromkeys(_INDEX_SIZES, 0)
    if index is None or held is None:
        return (like,) * 4 + rotary, (0,) * 8, sizes
    q, k = unit_stride(index.q), index.k if index.k.stride(2) == 1 else index.k.contiguous()
    sizes |= {"INDEX": k.shape[2], "INDEX_HALF": next_power_of_2((k.shape[2] + 1) // 2)} | (plan.sizes if plan else {})
    scores = plan.scores if plan else q
    strides = *k.stride()[:2], held.stride(0), held.stride(2), *q.stride()[:3], scores.shape[1] // LINE.value
    return (k, held, q, scores, *index.rotary), strides, sizes


def _sizes(k: Tensor, v: Tensor) -> dict[str, int]:
    dim, value_dim = k.shape[3], v.shape[3]
    return {
        "GROUPS": k.shape[2], "D": dim, "D_HALF": next_power_of_2((dim + 1) // 2),
        "V": value_dim, "V_HALF": next_power_of_2((value_dim + 1) // 2), "TOKENS": next_power_of_2(k.shape[1]),
    }  # fmt: skip
