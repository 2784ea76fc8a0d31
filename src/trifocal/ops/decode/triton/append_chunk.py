"""A prompt's chunk in one kernel: rotation, writes to pages, and the rows of the past that attention reads with it.

A program takes a tile of rows of one head, of one job: queries; keys and values in pages; those of a window or of
blocks that are not compressed yet, in rings; what a ring is to hold once the chunk is over; queries and keys of an
index. Nothing is written to where another program of the launch reads.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.decode.caches import NewRows, Place, chunk_keys
from trifocal.ops.decode.triton.append import load_halves, load_rotated_halves, store_rows
from trifocal.ops.tiles import cdiv, next_power_of_2
from trifocal.ops.triton.launch import Kernel

# Numbers of a tile's half.
_TILE = 2048


@triton.jit
def load_new(
    x, offsets, keep, position, cos, sin, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROTATED: tl.constexpr
):  # fmt: skip
    """Both halves of new rows in the type of x, rotated or not."""
    if ROTATED:
        first, second = load_rotated_halves(x, offsets, keep, position, cos, sin, SIZE, COLUMNS)
    else:
        first, second = load_halves(x, offsets, keep, SIZE, COLUMNS)
    return first.to(x.dtype.element_ty), second.to(x.dtype.element_ty)


@triton.jit
def append_rows(
    x, x_time, held, out, pages, begin, first, num_rows, cos, sin, head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, HELD_ROWS: tl.constexpr, PAGED: tl.constexpr,
    GATHERS: tl.constexpr, ROTATED: tl.constexpr, ZERO: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of rows from `begin` on: old ones from the cache, new ones from x, which also go into pages.

    GATHERS: whether there are old ones. HELD_ROWS: those of a page or a ring; 0 without a cache. Rows that are neither
    rotated nor joined are not copied.
    """
    tile = begin + tl.program_id(0) * ROWS
    if tile < first + num_rows:
        row = tile + tl.arange(0, ROWS)
        exists = row < first + num_rows
        is_new = exists & (row >= first)
        source = (row - first).to(tl.int64) * x_time
        part_1, part_2 = load_new(
            x + head * SIZE, source, is_new, (row - ZERO) * STRIDE, cos, sin, SIZE, COLUMNS, ROTATED
        )  # fmt: skip
        if HELD_ROWS > 0:
            places = head * (HELD_ROWS * SIZE) + (row % HELD_ROWS).to(tl.int64) * SIZE
            if PAGED:
                places += tl.load(pages + row // HELD_ROWS, mask=exists, other=0) * (HEADS * HELD_ROWS * SIZE)
            if GATHERS:
                old_1, old_2 = load_halves(held, places, exists & (row < first), SIZE, COLUMNS)
                part_1 = tl.where(is_new[:, None], part_1, old_1)
                part_2 = tl.where(is_new[:, None], part_2, old_2)
            if PAGED:
                store_rows(part_1, part_2, held, places, is_new, SIZE, COLUMNS)
        if ROTATED or GATHERS:
            target = ((row - begin).to(tl.int64) * HEADS + head) * SIZE
            store_rows(part_1, part_2, out, target, exists, SIZE, COLUMNS)


@triton.jit
def end_ring(
    x, x_time, ring, end, first, num_new, cos, sin, group,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, RING: tl.constexpr, ROTATED: tl.constexpr, ZERO: tl.constexpr,
    STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of what a ring's row is to hold once the chunk is over."""
    if tl.program_id(0) * ROWS < RING:
        place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        exists = place < RING
        # A place holds the last token whose position leaves it as the remainder.
        last = first + num_new - 1
        token = last - (last + RING - place) % RING
        is_new = exists & (token >= first)
        source = (token - first).to(tl.int64) * x_time
        new_1, new_2 = load_new(
            x + group * SIZE, source, is_new, (token - ZERO) * STRIDE, cos, sin, SIZE, COLUMNS, ROTATED
        )  # fmt: skip
        places = (group * RING + place) * SIZE
        old_1, old_2 = load_halves(ring, places, exists & (token < first), SIZE, COLUMNS)
        part_1, part_2 = tl.where(is_new[:, None], new_1, old_1), tl.where(is_new[:, None], new_2, old_2)
        store_rows(part_1, part_2, end, places, exists, SIZE, COLUMNS)


@triton.jit
def append_ring(
    k, k_time, k_ring, k_row, k_out, k_end, v, v_time, v_ring, v_row, v_out, v_end,
    sequence_row, sequence_new, pages, begin, first, num_rows, cos, sin, job,
    GROUPS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, RING: tl.constexpr,
    HAS_V: tl.constexpr, GATHERS: tl.constexpr, ROTATED: tl.constexpr, ZERO: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Keys and values in rings: rows that attention reads, by one job a group, then what the rings are to hold.

    ROTATED: whether keys are.
    """
    row = tl.load(sequence_row)
    k_ring += row * k_row
    v_ring += row * v_row
    if job < GROUPS:
        if ROTATED or GATHERS:
            append_rows(
                k, k_time, k_ring, k_out, pages, begin, first, num_rows, cos, sin, job,
                GROUPS, D, COLUMNS, RING, False, GATHERS, ROTATED, ZERO, STRIDE, ROWS,
            )  # fmt: skip
        if HAS_V and GATHERS:
            append_rows(
                v, v_time, v_ring, v_out, pages, begin, first, num_rows, cos, sin, job,
                GROUPS, V, COLUMNS, RING, False, True, False, ZERO, STRIDE, ROWS,
            )  # fmt: skip
    else:
        new, group = tl.load(sequence_new), job - GROUPS
        end_ring(k, k_time, k_ring, k_end, first, new, cos, sin, group, D, COLUMNS, RING, ROTATED, ZERO, STRIDE, ROWS)
        if HAS_V:
            end_ring(v, v_time, v_ring, v_end, first, new, cos, sin, group, V, COLUMNS, RING, False, ZERO, STRIDE, ROWS)


@Kernel
@triton.jit(do_not_specialize=["first", "page_begin", "win_begin", "raw_begin", "num_rows"])
def append_chunk_kernel(
    q, k, v, k_win, v_win, k_raw, v_raw, q_idx, k_idx,
    q_time, k_time, v_time, k_win_time, v_win_time, k_raw_time, v_raw_time, q_idx_time, k_idx_time,
    q_out, k_out, v_out, k_win_out, v_win_out, k_raw_out, v_raw_out, q_idx_out, k_idx_out,
    k_pages, v_pages, k_win_ring, v_win_ring, k_raw_ring, v_raw_ring, k_idx_pages,
    k_win_end, v_win_end, k_raw_end, v_raw_end, k_win_row, v_win_row, k_raw_row, v_raw_row,
    cos, sin, cos_idx, sin_idx, sequence_row, sequence_new, pages,
    first, page_begin, win_begin, raw_begin, num_rows,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, INDEX: tl.constexpr,
    COLUMNS: tl.constexpr, INDEX_HEADS: tl.constexpr, PAGE_ROWS: tl.constexpr, WINDOW_RING: tl.constexpr,
    RAW_RING: tl.constexpr, HAS_V: tl.constexpr, HAS_V_RAW: tl.constexpr, GATHERS: tl.constexpr,
    GATHERS_WINDOW: tl.constexpr, GATHERS_RAW: tl.constexpr, ZERO: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Jobs one after the other: heads of q, groups in pages, of the window and its end, of raw and its end, index.

    RINGs and PAGE_ROWS: their tokens; 0 where is none. A tensor that is not there is never read.
    """
    WINDOW: tl.constexpr = HEADS + (GROUPS if PAGE_ROWS > 0 else 0)
    RAW: tl.constexpr = WINDOW + (2 * GROUPS if WINDOW_RING > 0 else 0)
    OF_INDEX: tl.constexpr = RAW + (2 * GROUPS if RAW_RING > 0 else 0)
    job = tl.program_id(1).to(tl.int64)
    if HEADS > 0:  # noqa: SIM102
        if job < HEADS:
            append_rows(
                q, q_time, q, q_out, pages, first, first, num_rows, cos, sin, job,
                HEADS, D, COLUMNS, 0, False, False, True, ZERO, STRIDE, ROWS,
            )  # fmt: skip
    if PAGE_ROWS > 0:  # noqa: SIM102
        if (job >= HEADS) & (job < WINDOW):
            append_rows(
                k, k_time, k_pages, k_out, pages, page_begin, first, num_rows, cos, sin, job - HEADS,
                GROUPS, D, COLUMNS, PAGE_ROWS, True, GATHERS, True, ZERO, STRIDE, ROWS,
            )  # fmt: skip
            if HAS_V:
                append_rows(
                    v, v_time, v_pages, v_out, pages, page_begin, first, num_rows, cos, sin, job - HEADS,
                    GROUPS, V, COLUMNS, PAGE_ROWS, True, GATHERS, False, ZERO, STRIDE, ROWS,
                )  # fmt: skip
    if WINDOW_RING > 0:  # noqa: SIM102
        if (job >= WINDOW) & (job < RAW):
            append_ring(
                k_win, k_win_time, k_win_ring, k_win_row, k_win_out, k_win_end,
                v_win, v_win_time, v_win_ring, v_win_row, v_win_out, v_win_end,
                sequence_row, sequence_new, pages, win_begin, first, num_rows, cos, sin, job - WINDOW,
                GROUPS, D, V, COLUMNS, WINDOW_RING, True, GATHERS_WINDOW, True, ZERO, STRIDE, ROWS,
            )  # fmt: skip
    if RAW_RING > 0:  # noqa: SIM102
        if (job >= RAW) & (job < OF_INDEX):
            append_ring(
                k_raw, k_raw_time, k_raw_ring, k_raw_row, k_raw_out, k_raw_end,
                v_raw, v_raw_time, v_raw_ring, v_raw_row, v_raw_out, v_raw_end,
                sequence_row, sequence_new, pages, raw_begin, first, num_rows, cos, sin, job - RAW,
                GROUPS, D, V, COLUMNS, RAW_RING, HAS_V_RAW, GATHERS_RAW, False, ZERO, STRIDE, ROWS,
            )  # fmt: skip
    if INDEX > 0:  # noqa: SIM102
        if job >= OF_INDEX:
            if job < OF_INDEX + INDEX_HEADS:
                append_rows(
                    q_idx, q_idx_time, q_idx, q_idx_out, pages, first, first, num_rows, cos_idx, sin_idx,
                    job - OF_INDEX, INDEX_HEADS, INDEX, COLUMNS, 0, False, False, True, ZERO, STRIDE, ROWS,
                )  # fmt: skip
            else:
                append_rows(
                    k_idx, k_idx_time, k_idx_pages, k_idx_out, pages, page_begin, first, num_rows, cos_idx, sin_idx,
                    job - OF_INDEX - INDEX_HEADS, 1, INDEX, COLUMNS, PAGE_ROWS, True, GATHERS, True, ZERO, STRIDE, ROWS,
                )  # fmt: skip


def append_chunk(rows: Mapping[str, NewRows], place: Place, first: int, zero: int, stride: int) -> dict[str, Tensor]:
    """See `ops.decode.api.append_chunk`."""
    keys = chunk_keys(rows)
    some, values = rows[keys], rows.get(f"v{keys[1:]}")
    assert some.rotary is not None
    # A tensor that is not there is never read: any other stands for it.
    sources = {name: _side_by_side(rows.get(name, some).x) for name in _NAMES}
    found = {name: _space(new, sources[name], first) for name, new in rows.items()}
    begins = {name: new.begin for name, new in rows.items()}
    num_rows, groups = some.x.shape[1:3]
    rings = {name: rows[name].ring if name in rows else None for name in _RINGS}
    window, raw = (0 if rings[name] is None else rings[name].shape[2] for name in ("k_win", "k_raw"))
    index_heads, index = rows["q_idx"].x.shape[2:] if "q_idx" in rows else (0, 0)
    heads, dim = rows["q"].x.shape[2] if "q" in rows else 0, some.x.shape[3]
    value_dim = dim if values is None else values.x.shape[3]
    page_rows, like = (0, some.x) if some.pages is None else (some.pages.shape[2], some.pages)
    columns = next_power_of_2((max(dim, value_dim, index) + 1) // 2)
    tile = max(1, _TILE // columns)
    most = max(window, raw, *(first + num_rows - begin for begin in begins.values()))
    if not most:
        return found
    jobs = heads + groups * ((page_rows > 0) + 2 * (window > 0) + 2 * (raw > 0)) + (index_heads + 1 if index else 0)
    ends = [rows[name].ring_end if name in rows else some.x for name in _RINGS]
    held = [rows[name].pages if name in rows else like for name in ("k", "v")]
    held += [like if ring is None else ring for ring in rings.values()]
    held.append(rows["k_idx"].pages if index else like)
    append_chunk_kernel[cdiv(most, tile), jobs](
        *sources.values(), *(x.stride(1) for x in sources.values()), *(found.get(name, some.x) for name in _NAMES),
        *held, *ends, *(0 if ring is None else ring.stride(0) for ring in rings.values()),
        *some.rotary, *(rows["k_idx"].rotary or some.rotary if index else some.rotary), *place,
        first, some.begin, begins.get("k_win", first), begins.get("k_raw", first), num_rows,
        HEADS=heads, GROUPS=groups, D=dim, V=value_dim, INDEX=index, COLUMNS=columns, INDEX_HEADS=index_heads,
        PAGE_ROWS=page_rows, WINDOW_RING=window, RAW_RING=raw, HAS_V="v" in rows, HAS_V_RAW="v_raw" in rows,
        GATHERS=some.begin < first, GATHERS_WINDOW=begins.get("k_win", first) < first,
        GATHERS_RAW=begins.get("k_raw", first) < first, ZERO=zero, STRIDE=stride, ROWS=tile,
    )  # fmt: skip
    return found


_RINGS = ("k_win", "v_win", "k_raw", "v_raw")
_NAMES = ("q", "k", "v", *_RINGS, "q_idx", "k_idx")


def _side_by_side(x: Tensor) -> Tensor:
    """x [1, n, heads, width], copied unless the heads of a row lie side by side."""
    heads_fit = x.shape[2] == 1 or x.stride(2) == x.shape[3]
    return x if heads_fit and (x.stride(3) == 1 or x.shape[3] == 1) else x.contiguous()


def _space(new: NewRows, x: Tensor, first: int) -> Tensor:
    """Memory for rows that are rotated or joined; new rows as they are otherwise."""
    if new.rotary is None and new.begin == first:
        return x
    _, num_rows, heads, width = x.shape
    return torch.empty(1, first + num_rows - new.begin, heads, width, dtype=x.dtype, device=x.device)
