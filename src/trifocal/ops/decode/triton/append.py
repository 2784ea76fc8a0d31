"""Writes new tokens into the caches, and the compressed blocks that they end.

Where φ is the mean, the programs of `scores` have these jobs beside their own. Otherwise `append_kernel` is decoding's
first kernel: a program has one job for one sequence and group: to rotate and write the new tokens, or to make the
mean of one compressed block that may be due, from the ring and from the new tokens themselves. The keys of an index
count as a group of their own. A learned φ takes two
more kernels: `compression_windows_kernel` copies the tokens of blocks out of a ring, and `write_compressed_kernel`
writes what φ made of them, where a block is due.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.decode.caches import Compress, DecodeBatch, DenseCache, Index, NewTokens, Rotary, SparseCache
from trifocal.ops.decode.triton.common import sum_of_pairs
from trifocal.ops.geometry import Geometry
from trifocal.ops.tiles import cdiv, next_power_of_2
from trifocal.ops.triton.common import unit_stride
from trifocal.ops.triton.dependent_launch import dependent_launch, wait_for_inputs
from trifocal.ops.triton.launch import Kernel

# Tokens of a block that are added up at a time.
MOST_ROWS = 32


@triton.jit
def rotate_halves(first, second, cos, sin, position, keep, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """Both halves of rows of keys, [rows, COLUMNS] each, rotated by their positions; in fp32."""
    column = tl.arange(0, COLUMNS)
    place = position.to(tl.int64)[:, None] * HALF + column[None, :]
    mask = keep[:, None] & (column < HALF)[None, :]
    cosine = tl.load(cos + place, mask=mask, other=0.0).to(tl.float32)
    sine = tl.load(sin + place, mask=mask, other=0.0).to(tl.float32)
    # Said so, every compiled code rounds the same way.
    return tl.fma(first, cosine, -(second * sine)), tl.fma(second, cosine, first * sine)


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
    BLOCK: tl.constexpr, RING: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The mean of the rows of a block, the tokens before this step from the ring and the others from x; in fp32.

    2**LEVELS rows are added up at a time.
    """
    CHUNK: tl.constexpr = 2**LEVELS
    column = FIRST + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, BLOCK, CHUNK):
        in_block = begin + tl.arange(0, CHUNK)
        token = start + in_block
        inside = (in_block < BLOCK)[None, :] & (column < LAST)[:, None]
        is_old = inside & (token < length)[None, :]
        is_new = inside & (token >= length)[None, :]
        old = tl.load(ring + (token % RING * ring_stride)[None, :] + column[:, None], mask=is_old, other=0.0)
        new = tl.load(x + ((token - length) * x_stride)[None, :] + column[:, None], mask=is_new, other=0.0)
        total += sum_of_pairs(old.to(tl.float32) + new.to(tl.float32), LEVELS)
    return total * (1.0 / BLOCK)


@triton.jit
def mean_of_block(
    ring, ring_stride, x, x_stride, cache, start, length, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, RING: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The mean of one block as two halves, [1, COLUMNS] each, in the type of the cache."""
    HALF: tl.constexpr = (SIZE + 1) // 2
    first = mean_of_columns(ring, ring_stride, x, x_stride, start, length, 0, HALF, COLUMNS, BLOCK, RING, LEVELS)
    second = mean_of_columns(ring, ring_stride, x, x_stride, start, length, HALF, SIZE, COLUMNS, BLOCK, RING, LEVELS)
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


@triton.jit
def write_tokens(
    k_raw, v_raw, k, v, k_win, v_win, k_raw_ring, v_raw_ring, k_cache, v_cache, k_win_ring, v_win_ring, cos, sin,
    block_table, batch, group, ring_row, length, new,
    k_raw_batch, k_raw_time, k_raw_head, v_raw_batch, v_raw_time, v_raw_head,
    k_batch, k_time, k_head, v_batch, v_time, v_head, k_win_batch, k_win_time, k_win_head,
    v_win_batch, v_win_time, v_win_head,
    k_raw_ring_row, k_raw_ring_head, k_raw_ring_time, v_raw_ring_row, v_raw_ring_head, v_raw_ring_time,
    k_page, k_cache_head, k_cache_time, v_page, v_cache_head, v_cache_time,
    k_win_ring_row, k_win_ring_head, k_win_ring_time, v_win_ring_row, v_win_ring_head, v_win_ring_time,
    D: tl.constexpr, D_HALF: tl.constexpr, V: tl.constexpr, V_HALF: tl.constexpr, PAGE_ROWS: tl.constexpr,
    RAW_RING: tl.constexpr, WINDOW_RING: tl.constexpr, HAS_V_CMP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the new tokens of one sequence and group, whose table is given. RINGs: their tokens; 0 where is none."""
    token = tl.arange(0, TOKENS)
    exists = token < new
    position = length + token
    page = tl.load(block_table + position // PAGE_ROWS, mask=exists, other=0).to(tl.int64)
    page_row = position % PAGE_ROWS
    # Everything is read before anything is written: a load never waits for a store that might be to its place.
    k_1, k_2 = load_rotated_halves(
        k + batch * k_batch + group * k_head, token * k_time, exists, position, cos, sin, D, D_HALF
    )
    v_1, v_2 = load_halves(v + batch * v_batch + group * v_head, token * v_time, exists, V, V_HALF)
    if WINDOW_RING > 0:
        k_win_1, k_win_2 = load_rotated_halves(
            k_win + batch * k_win_batch + group * k_win_head, token * k_win_time, exists, position, cos, sin, D, D_HALF
        )
        v_win_1, v_win_2 = load_halves(
            v_win + batch * v_win_batch + group * v_win_head, token * v_win_time, exists, V, V_HALF
        )
    if RAW_RING > 0:
        k_raw_1, k_raw_2 = load_halves(
            k_raw + batch * k_raw_batch + group * k_raw_head, token * k_raw_time, exists, D, D_HALF
        )
    if HAS_V_CMP:
        v_raw_1, v_raw_2 = load_halves(
            v_raw + batch * v_raw_batch + group * v_raw_head, token * v_raw_time, exists, V, V_HALF
        )
    store_rows(k_1, k_2, k_cache + group * k_cache_head, page * k_page + page_row * k_cache_time, exists, D, D_HALF)
    store_rows(v_1, v_2, v_cache + group * v_cache_head, page * v_page + page_row * v_cache_time, exists, V, V_HALF)
    if WINDOW_RING > 0:
        place = position % WINDOW_RING
        k_win_ring += ring_row * k_win_ring_row + group * k_win_ring_head
        v_win_ring += ring_row * v_win_ring_row + group * v_win_ring_head
        store_rows(k_win_1, k_win_2, k_win_ring, place * k_win_ring_time, exists, D, D_HALF)
        store_rows(v_win_1, v_win_2, v_win_ring, place * v_win_ring_time, exists, V, V_HALF)
    if RAW_RING > 0:
        k_raw_ring += ring_row * k_raw_ring_row + group * k_raw_ring_head
        store_rows(k_raw_1, k_raw_2, k_raw_ring, position % RAW_RING * k_raw_ring_time, exists, D, D_HALF)
    if HAS_V_CMP:
        v_raw_ring += ring_row * v_raw_ring_row + group * v_raw_ring_head
        store_rows(v_raw_1, v_raw_2, v_raw_ring, position % RAW_RING * v_raw_ring_time, exists, V, V_HALF)


@triton.jit
def write_mean_block(
    k_raw, v_raw, k_raw_ring, v_raw_ring, k_cmp, v_cmp, cos, sin, block_table, batch, group, ring_row, block, length,
    k_raw_batch, k_raw_time, k_raw_head, v_raw_batch, v_raw_time, v_raw_head,
    k_raw_ring_row, k_raw_ring_head, k_raw_ring_time, v_raw_ring_row, v_raw_ring_head, v_raw_ring_time,
    k_cmp_page, k_cmp_time, v_cmp_page, v_cmp_time,
    D: tl.constexpr, D_HALF: tl.constexpr, V: tl.constexpr, V_HALF: tl.constexpr, PAGE_ROWS: tl.constexpr,
    RAW_RING: tl.constexpr, HAS_V_CMP: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Write the compressed block of this number, the mean of its tokens. PAGE_ROWS: compressed blocks of a page.

    k_cmp, v_cmp: those of the group. Rings may be written at the same time: the new tokens' places are not read.
    """
    slot = block + (BLOCK // STRIDE - 1)
    page = tl.load(block_table + slot // PAGE_ROWS).to(tl.int64)
    page_row = slot % PAGE_ROWS
    start = block * STRIDE
    k_raw += batch * k_raw_batch + group * k_raw_head
    k_raw_ring += ring_row * k_raw_ring_row + group * k_raw_ring_head
    k_1, k_2 = mean_of_block(
        k_raw_ring, k_raw_ring_time, k_raw, k_raw_time, k_cmp, start, length, D, D_HALF, BLOCK, RAW_RING, LEVELS
    )
    if HAS_V_CMP:
        v_raw += batch * v_raw_batch + group * v_raw_head
        v_raw_ring += ring_row * v_raw_ring_row + group * v_raw_ring_head
        v_1, v_2 = mean_of_block(
            v_raw_ring, v_raw_ring_time, v_raw, v_raw_time, v_cmp, start, length, V, V_HALF, BLOCK, RAW_RING, LEVELS
        )
    place = page * k_cmp_page + page_row * k_cmp_time
    store_halves(k_1, k_2, k_cmp, place, start, cos, sin, D, D_HALF, True)
    if HAS_V_CMP:
        place = page * v_cmp_page + page_row * v_cmp_time
        store_halves(v_1, v_2, v_cmp, place, start, cos, sin, V, V_HALF, False)


@Kernel
@triton.jit(do_not_specialize=["table_columns"])
def append_kernel(
    k_raw, v_raw, k, v, k_win, v_win, k_raw_ring, v_raw_ring, k_cache, v_cache, k_win_ring, v_win_ring, k_cmp, v_cmp,
    k_idx, k_idx_cache, cos_idx, sin_idx, cos, sin, rows, lengths, num_new, block_table,
    k_raw_batch, k_raw_time, k_raw_head, v_raw_batch, v_raw_time, v_raw_head,
    k_batch, k_time, k_head, v_batch, v_time, v_head, k_win_batch, k_win_time, k_win_head,
    v_win_batch, v_win_time, v_win_head,
    k_raw_ring_row, k_raw_ring_head, k_raw_ring_time, v_raw_ring_row, v_raw_ring_head, v_raw_ring_time,
    k_page, k_cache_head, k_cache_time, v_page, v_cache_head, v_cache_time,
    k_win_ring_row, k_win_ring_head, k_win_ring_time, v_win_ring_row, v_win_ring_head, v_win_ring_time,
    k_cmp_page, k_cmp_head, k_cmp_time, v_cmp_page, v_cmp_head, v_cmp_time,
    k_idx_batch, k_idx_time, k_idx_page, k_idx_cache_time, table_columns,
    GROUPS: tl.constexpr, D: tl.constexpr, D_HALF: tl.constexpr, V: tl.constexpr, V_HALF: tl.constexpr,
    PAGE_ROWS: tl.constexpr, RAW_RING: tl.constexpr, WINDOW_RING: tl.constexpr, HAS_V_CMP: tl.constexpr,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr,
    INDEX: tl.constexpr, INDEX_HALF: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Job 0: write the new tokens. Job 1 and on: one compressed block each. RINGs: their tokens; 0 where is none.

    INDEX: width of the keys of an index, which the programs behind the last group write; 0 without one.
    """
    wait_for_inputs(DEPENDENT)
    job = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    length, new = tl.load(lengths + batch), tl.load(num_new + batch)
    block_table += batch * table_columns
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
    ring_row = batch
    if RAW_RING + WINDOW_RING > 0:
        ring_row = tl.load(rows + batch).to(tl.int64)
    if (job == 0) & (group < GROUPS):
        write_tokens(
            k_raw, v_raw, k, v, k_win, v_win, k_raw_ring, v_raw_ring, k_cache, v_cache, k_win_ring, v_win_ring,
            cos, sin, block_table, batch, group, ring_row, length, new,
            k_raw_batch, k_raw_time, k_raw_head, v_raw_batch, v_raw_time, v_raw_head,
            k_batch, k_time, k_head, v_batch, v_time, v_head, k_win_batch, k_win_time, k_win_head,
            v_win_batch, v_win_time, v_win_head,
            k_raw_ring_row, k_raw_ring_head, k_raw_ring_time, v_raw_ring_row, v_raw_ring_head, v_raw_ring_time,
            k_page, k_cache_head, k_cache_time, v_page, v_cache_head, v_cache_time,
            k_win_ring_row, k_win_ring_head, k_win_ring_time, v_win_ring_row, v_win_ring_head, v_win_ring_time,
            D, D_HALF, V, V_HALF, PAGE_ROWS, RAW_RING, WINDOW_RING, HAS_V_CMP, TOKENS,
        )  # fmt: skip
    elif RAW_RING > 0:
        block, is_due = due_block(length, new, job - 1, BLOCK, STRIDE)
        if is_due & (group < GROUPS):
            write_mean_block(
                k_raw, v_raw, k_raw_ring, v_raw_ring, k_cmp + group * k_cmp_head, v_cmp + group * v_cmp_head,
                cos, sin, block_table, batch, group, ring_row, block, length,
                k_raw_batch, k_raw_time, k_raw_head, v_raw_batch, v_raw_time, v_raw_head,
                k_raw_ring_row, k_raw_ring_head, k_raw_ring_time, v_raw_ring_row, v_raw_ring_head, v_raw_ring_time,
                k_cmp_page, k_cmp_time, v_cmp_page, v_cmp_time,
                D, D_HALF, V, V_HALF, PAGE_ROWS // STRIDE, RAW_RING, HAS_V_CMP, BLOCK, LEVELS, STRIDE,
            )  # fmt: skip


@Kernel
@triton.jit
def compression_windows_kernel(
    ring, windows, rows, lengths, ring_row_stride, ring_head_stride, ring_time_stride,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, MOST: tl.constexpr, RING: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Some rows of the tokens of one block that may be due, [B * MOST, BLOCK, GROUPS, SIZE]."""
    wait_for_inputs(DEPENDENT)
    batch, number = tl.program_id(1) // MOST, tl.program_id(1) % MOST
    block, _ = due_block(tl.load(lengths + batch), 1, number, BLOCK, STRIDE)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < BLOCK * GROUPS
    place = (block * STRIDE + row // GROUPS) % RING
    column = tl.arange(0, COLUMNS)
    inside = exists[:, None] & (column < SIZE)[None, :]
    ring += tl.load(rows + batch).to(tl.int64) * ring_row_stride
    source = row % GROUPS * ring_head_stride + place * ring_time_stride
    x = tl.load(ring + source[:, None] + column[None, :], mask=inside, other=0.0)
    out = windows + tl.program_id(1).to(tl.int64) * (BLOCK * GROUPS * SIZE)
    tl.store(out + row[:, None] * SIZE + column[None, :], x, mask=inside)


@Kernel
@triton.jit(do_not_specialize=["table_columns"])
def write_compressed_kernel(
    x, cache, cos, sin, lengths, num_new, block_table, page_stride, head_stride, time_stride, table_columns,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, MOST: tl.constexpr, PAGE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, ROTATED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write one group of φ's result for one block, x [B * MOST, GROUPS, SIZE], if the block is due."""
    wait_for_inputs(DEPENDENT)
    HALF: tl.constexpr = (SIZE + 1) // 2
    batch, number = tl.program_id(1) // MOST, tl.program_id(1) % MOST
    group = tl.program_id(0).to(tl.int64)
    block, is_due = due_block(tl.load(lengths + batch), tl.load(num_new + batch), number, BLOCK, STRIDE)
    if is_due:
        slot = block + (BLOCK // STRIDE - 1)
        page = tl.load(block_table + batch.to(tl.int64) * table_columns + slot // PAGE_ROWS).to(tl.int64)
        column = tl.arange(0, COLUMNS)[None, :]
        source = x + (tl.program_id(1).to(tl.int64) * GROUPS + group) * SIZE + column
        first = tl.load(source, mask=column < HALF, other=0.0)
        second = tl.load(source + HALF, mask=HALF + column < SIZE, other=0.0)
        place = page * page_stride + group * head_stride + slot % PAGE_ROWS * time_stride
        store_halves(first, second, cache, place, block * STRIDE, cos, sin, SIZE, COLUMNS, ROTATED)


def append_sparse(
    cache: SparseCache,
    batch: DecodeBatch,
    new: NewTokens,
    geometry: Geometry,
    rotary: Rotary,
    compress: tuple[Compress, Compress | None] | None,
    index: Index | None,
) -> None:
    """See `trifocal.ops.append_sparse`."""
    sources, caches, sizes = tensors_of_tokens(cache, new, geometry)
    k, v = sources[2:4]
    num_tokens, groups = k.shape[1:3]
    most_due = cdiv(num_tokens, geometry.compression_stride) if cache.k_cmp is not None else 0
    k_cmp, v_cmp = (cache.k_slc if held is None else held for held in (cache.k_cmp, cache.v_cmp))
    index_tensors, index_strides, index_sizes = _of_index(index, cache.k_idx, k, rotary)
    append_kernel[1 if compress else 1 + most_due, groups + (index is not None), k.shape[0]](
        *sources, *caches, k_cmp, v_cmp, *index_tensors, *rotary,
        batch.rows, batch.lengths, batch.num_new, batch.block_table,
        *(stride for x in sources for stride in x.stride()[:3]),
        *(stride for x in (*caches, k_cmp, v_cmp) for stride in x.stride()[:3]),
        *index_strides, batch.block_table.stride(0), **(_sizes(k, v) | sizes), **index_sizes,
        PAGE_ROWS=cache.k_slc.shape[2], BLOCK=geometry.compression_block_size, STRIDE=geometry.compression_stride,
        num_warps=2, **dependent_launch(k.device),
    )  # fmt: skip
    if compress and cache.k_raw is not None and cache.k_cmp is not None:
        _append_learned(cache.k_raw, cache.k_cmp, compress[0], batch, geometry, rotary, most_due, rotated=True)
        if cache.v_raw is not None and cache.v_cmp is not None and compress[1] is not None:
            _append_learned(cache.v_raw, cache.v_cmp, compress[1], batch, geometry, rotary, most_due, rotated=False)


def tensors_of_tokens(
    cache: SparseCache, new: NewTokens | tuple[None, ...], geometry: Geometry
) -> tuple[list[Tensor], list[Tensor], dict[str, int]]:
    """New keys and values of cmp, slc and win, where they go, and sizes; pages stand for what there is not."""
    held = cache.k_raw, cache.v_raw, cache.k_slc, cache.v_slc, cache.k_win, cache.v_win
    sources = [cache.k_slc if x is None else unit_stride(x) for x in new]
    sizes = {
        **_halves(cache.k_slc, cache.v_slc), "RAW_RING": 0 if cache.k_raw is None else cache.k_raw.shape[2],
        "WINDOW_RING": 0 if cache.k_win is None else cache.k_win.shape[2], "HAS_V_CMP": cache.v_cmp is not None,
        "LEVELS": (min(MOST_ROWS, next_power_of_2(geometry.compression_block_size)) - 1).bit_length(),
    }  # fmt: skip
    return sources, [cache.k_slc if x is None else x for x in held], sizes


def append_dense(cache: DenseCache, batch: DecodeBatch, k: Tensor, v: Tensor, rotary: Rotary) -> None:
    """See `trifocal.ops.append_dense`."""
    k, v = unit_stride(k), unit_stride(v)
    sources, caches = (k, v) * 3, (cache.k, cache.v) * 4
    index_tensors, index_strides, index_sizes = _of_index(None, None, k, rotary)
    append_kernel[1, k.shape[2], k.shape[0]](
        *sources, *caches, *index_tensors, *rotary, batch.rows, batch.lengths, batch.num_new, batch.block_table,
        *(stride for x in (*sources, *caches) for stride in x.stride()[:3]), *index_strides,
        batch.block_table.stride(0), **_sizes(k, v), **index_sizes, PAGE_ROWS=cache.k.shape[2], RAW_RING=0,
        WINDOW_RING=0, HAS_V_CMP=False, BLOCK=1, LEVELS=0, STRIDE=1, num_warps=2, **dependent_launch(k.device),
    )  # fmt: skip


def _append_learned(
    ring: Tensor,
    cache: Tensor,
    compress: Compress,
    batch: DecodeBatch,
    geometry: Geometry,
    rotary: Rotary,
    most_due: int,
    *,
    rotated: bool,
) -> None:
    groups, size = ring.shape[1], ring.shape[3]
    block, stride = geometry.compression_block_size, geometry.compression_stride
    sizes = {"GROUPS": groups, "SIZE": size, "MOST": most_due, "BLOCK": block, "STRIDE": stride}
    columns = next_power_of_2(size)
    rows = max(1, 4096 // columns)
    num_blocks = batch.lengths.shape[0] * most_due
    windows = torch.empty(num_blocks, block, groups, size, dtype=ring.dtype, device=ring.device)
    compression_windows_kernel[cdiv(block * groups, rows), num_blocks](
        ring, windows, batch.rows, batch.lengths, *ring.stride()[:3],
        **sizes, COLUMNS=columns, RING=ring.shape[2], ROWS=rows, **dependent_launch(ring.device),
    )  # fmt: skip
    write_compressed_kernel[groups, num_blocks](
        compress(windows).contiguous(), cache, *rotary, batch.lengths, batch.num_new, batch.block_table,
        *cache.stride()[:3], batch.block_table.stride(0),
        **sizes, COLUMNS=next_power_of_2((size + 1) // 2), PAGE_ROWS=cache.shape[2], ROTATED=rotated, num_warps=1,
        **dependent_launch(ring.device),
    )  # fmt: skip


def _of_index(
    index: Index | None, held: Tensor | None, like: Tensor, rotary: Rotary
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, int]]:
    """Tensors, strides and sizes of an index; without one, any tensors, which are not read."""
    if index is None or held is None:
        return (like, like, *rotary), (0, 0, 0, 0), {"INDEX": 0, "INDEX_HALF": 1}
    x = index[0] if index[0].stride(2) == 1 else index[0].contiguous()
    sizes = {"INDEX": x.shape[2], "INDEX_HALF": next_power_of_2((x.shape[2] + 1) // 2)}
    return (x, held, *index[1]), (*x.stride()[:2], held.stride(0), held.stride(2)), sizes


def _sizes(k: Tensor, v: Tensor) -> dict[str, int]:
    sizes = {"GROUPS": k.shape[2], "D": k.shape[3], "V": v.shape[3], "TOKENS": next_power_of_2(k.shape[1])}
    return sizes | _halves(k, v)


def _halves(k: Tensor, v: Tensor) -> dict[str, int]:
    """Columns that hold half of a key's and of a value's width."""
    return {name: next_power_of_2((x.shape[3] + 1) // 2) for name, x in (("D_HALF", k), ("V_HALF", v))}
