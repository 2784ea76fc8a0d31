"""Decoding's attention: what is launched, and the partial results in between.

The scores are launched, then the choice, attend and combine; with an index, `append` has scored, and attend takes the
compressed branch along. Where the batch says that every token takes all of its blocks, there is no choice, and no block
sum that anybody reads. Dense attention is a kernel like attend over the whole past, and combine. What a part is:
`common`.
"""

import torch
from torch import Tensor

from trifocal.ops import dispatch, tiles
from trifocal.ops.decode.caches import DecodeBatch, DenseCache, Rotary, SparseCache, WindowCache
from trifocal.ops.decode.triton.attend import MAX_UNITS, decode_attend_kernel, decode_dense_kernel
from trifocal.ops.decode.triton.choice import decode_choice_kernel
from trifocal.ops.decode.triton.combine import HEADS_OF_PROGRAM, decode_combine_kernel
from trifocal.ops.decode.triton.common import stages_of_pages
from trifocal.ops.decode.triton.scores import decode_scores_kernel
from trifocal.ops.geometry import Geometry
from trifocal.ops.tiles import Tile, cdiv, named_widths, next_power_of_2
from trifocal.ops.triton.common import LOG2_E, unit_stride
from trifocal.ops.triton.dependent_launch import dependent_launch
from trifocal.ops.triton.scoring import LINE

# Columns that a thread of the choice holds; how many numbers of each kind it asks for together, and of how many heads.
_CHOICE_COLUMNS = 4
_CHOICE_NUMBERS = 32
_MAX_CHOICE_HEADS = 8
# Parts of a branch that combine asks for together, at most.
_PARTS_AT_ONCE = 16


def decode_attention(
    q: Tensor,
    gates: Tensor | None,
    cache: SparseCache,
    batch: DecodeBatch,
    geometry: Geometry,
    rotary: Rotary,
    window: bool,
    scale: float,
    scores: Tensor | None,
) -> Tensor:
    """See `trifocal.ops.decode_attention`."""
    q, g = unit_stride(q), geometry
    num_sequences, new, heads, dim = q.shape
    groups, page_size, value_dim = *cache.k_slc.shape[1:3], cache.v_slc.shape[3]
    q_per_kv, num_rows = heads // groups, num_sequences * new * heads
    head_tile = tiles.decode_tile(q, cache.v_slc, q_per_kv, "attend")
    # Who takes compressed blocks, scores or attend.
    indexed = cache.k_idx is not None
    tile = head_tile if indexed else tiles.decode_tile(q, cache.v_slc, new * q_per_kv, "scores")
    most_tokens = batch.block_table.shape[1] * page_size

    # Compressed blocks: tiles hold whole selection blocks, each padded to a power of two.
    taps = next_power_of_2(g.selection_block_size // g.compression_stride)
    blocks = max(1, tile.BLOCK_N // taps)
    unit_tiles = max(1, tiles.DECODE_UNIT // (blocks * taps))
    starts = cdiv(g.num_compressed_blocks(most_tokens), g.selection_block_size // g.compression_stride)
    num_tiles = cdiv(starts, blocks)
    # The last tile's last overflow lies in the block behind it.
    block_lines = cdiv(num_tiles * blocks + 1, LINE.value)
    row_tiles = cdiv(new * q_per_kv, tile.BLOCK_M)
    programs = num_sequences * groups * row_tiles
    chosen_units = cdiv(g.selected_tokens, tiles.DECODE_UNIT)
    units = dispatch.decode_units_of_part(num_sequences * groups * new, chosen_units, q.device)
    cmp_units = units
    if not indexed:
        cmp_units = dispatch.decode_units_of_part(programs, cdiv(num_tiles, unit_tiles), q.device)
    cmp_parts = cdiv(num_tiles, unit_tiles * cmp_units) if gates is not None else 0
    chosen_parts = cdiv(chosen_units, units)
    window_parts = cdiv(min(g.window_size, most_tokens), tiles.DECODE_UNIT * units) if window else 0
    num_parts = cmp_parts + chosen_parts + window_parts
    parts = _empty_parts(q, num_parts, value_dim)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    choice_columns = max(16, next_power_of_2(g.num_selection_blocks(most_tokens)))
    choice_warps = min(16, max(4, choice_columns // (32 * _CHOICE_COLUMNS)))
    choice_heads = max(1, _CHOICE_NUMBERS // cdiv(choice_columns, 32 * choice_warps))
    selected_blocks, places = (
        empty(num_sequences, new, groups, g.num_selected_blocks, dtype=dtype) for dtype in (torch.int32, torch.int64)
    )
    where = batch.lengths, batch.num_new, batch.block_table
    columns = batch.block_table.stride(0)
    sizes = {"NEW": new, "GROUPS": groups, "Q_PER_KV": q_per_kv}
    widths = named_widths(D=dim, V=value_dim)
    block_sizes = {
        "COMPRESSION": g.compression_block_size, "STRIDE": g.compression_stride, "SELECTION": g.selection_block_size,
    }  # fmt: skip
    k_cmp = cache.k_slc if cache.k_cmp is None else cache.k_cmp
    v_cmp = k_cmp if gates is None or cache.v_cmp is None else cache.v_cmp
    if not indexed and (gates is not None or not batch.takes_all):
        sums = empty(2, num_rows, block_lines * LINE.value)
        tile_maximum, tile_total = empty(num_rows, num_tiles), empty(num_rows, num_tiles)
        grid = dispatch.decode_programs(programs, cdiv(num_tiles, unit_tiles * cmp_units), q.device)
        decode_scores_kernel[grid, groups * row_tiles, num_sequences](
            q, k_cmp, v_cmp, *rotary, *where, sums, tile_maximum, tile_total, *parts,
            *q.stride()[:3], *k_cmp.stride()[:3], *v_cmp.stride()[:3],
            columns, block_lines, num_tiles, num_parts, num_rows, scale * LOG2_E,
            **sizes, **widths, **block_sizes, HAS_V=gates is not None, PAGE_ROWS=k_cmp.shape[2], TAPS=taps,
            BLOCKS=blocks, UNIT_TILES=unit_tiles, UNITS=cmp_units, **_options(q, tile),
        )  # fmt: skip
    if not batch.takes_all:
        if scores is not None:
            sums, block_lines = scores, scores.shape[3] // LINE.value
            tile_maximum = tile_total = sums
        decode_choice_kernel[groups * new, num_sequences](
            sums, tile_maximum, tile_total, *where, selected_blocks, places, columns, block_lines, num_tiles, num_rows,
            **sizes, **block_sizes, NUM_SELECTED=g.num_selected_blocks,
            NUM_SELECTED_PAD=next_power_of_2(g.num_selected_blocks), INITIAL=g.num_initial_blocks,
            LOCAL=g.num_local_blocks, PAGE_BLOCKS=page_size // g.selection_block_size, BLOCKS=blocks,
            UNIT_TILES=unit_tiles, UNROLL=min(choice_heads, q_per_kv, _MAX_CHOICE_HEADS), COLUMNS=choice_columns,
            INDEXED=indexed, num_warps=choice_warps, **dependent_launch(q.device),
        )  # fmt: skip
    k_win, v_win, ring = cache.k_slc, cache.v_slc, 0
    if window and cache.k_win is not None and cache.v_win is not None:
        k_win, v_win, ring = cache.k_win, cache.v_win, cache.k_win.shape[2]
    # Compressed blocks that attend takes; a long block table must not start programs that find nothing.
    compresses = indexed and gates is not None
    token_parts = chosen_parts + window_parts
    cmp_programs = dispatch.decode_programs(num_sequences * groups * new, cmp_parts, q.device) if compresses else 0
    keys = cache.k_slc, cache.v_slc, k_win, v_win, k_cmp, v_cmp
    decode_attend_kernel[token_parts + cmp_programs, groups * new, num_sequences](
        q, *keys, *rotary, batch.rows, *where, selected_blocks, places, *parts,
        *q.stride()[:3], *(stride for x in keys for stride in x.stride()[:3]),
        columns, num_parts, cmp_parts, chosen_parts, token_parts, g.window_size, scale * LOG2_E,
        **sizes, **widths, SELECTION=g.selection_block_size, NUM_SELECTED=g.num_selected_blocks, PAGE_ROWS=page_size,
        RING=ring, KEYS=head_tile.BLOCK_N, UNIT_TILES=tiles.DECODE_UNIT // head_tile.BLOCK_N, UNITS=units,
        COMPRESSION=g.compression_block_size if compresses else 0, STRIDE=g.compression_stride, TAPS=taps,
        BLOCKS=blocks, BLOCK_TILES=unit_tiles, COMPRESSED_PAGE_ROWS=k_cmp.shape[2],
        WINDOW_STAGES=head_tile.stages if ring else stages_of_pages(head_tile.stages), **_options(q, head_tile),
    )  # fmt: skip
    return _combine(
        parts, q, gates, batch, value_dim, (cmp_parts, chosen_parts, window_parts), (cmp_units, units), g.window_size,
        window, {**block_sizes, "NUM_SELECTED": g.num_selected_blocks, "BLOCKS": blocks, "UNIT_TILES": unit_tiles},
    )  # fmt: skip


def decode_dense_attention(
    q: Tensor,
    cache: DenseCache | WindowCache,
    batch: DecodeBatch,
    rotary: Rotary,
    window_size: int | None,
    scale: float,
) -> Tensor:
    """See `trifocal.ops.decode_dense_attention`."""
    q = unit_stride(q)
    if isinstance(cache, WindowCache):
        assert window_size is not None
        return _decode_window(q, cache, batch, rotary, window_size, scale)
    num_sequences, new, heads, dim = q.shape
    groups, page_size, value_dim = *cache.k.shape[1:3], cache.v.shape[3]
    q_per_kv = heads // groups
    tile = tiles.decode_tile(q, cache.v, new * q_per_kv, "dense")
    row_tiles = cdiv(new * q_per_kv, tile.BLOCK_M)
    programs = num_sequences * groups * row_tiles
    most_units = min(MAX_UNITS.value, cdiv(batch.block_table.shape[1] * page_size, tiles.DECODE_UNIT))
    units = dispatch.decode_units_of_part(programs, most_units, q.device)
    num_parts = cdiv(most_units, units)
    parts = _empty_parts(q, num_parts, value_dim)
    grid = dispatch.decode_programs(programs, num_parts, q.device)
    decode_dense_kernel[grid, groups * row_tiles, num_sequences](
        q, cache.k, cache.v, *rotary, batch.lengths, batch.num_new, batch.block_table, *parts,
        *q.stride()[:3], *cache.k.stride()[:3], *cache.v.stride()[:3],
        batch.block_table.stride(0), num_parts, scale * LOG2_E,
        NEW=new, GROUPS=groups, Q_PER_KV=q_per_kv, **named_widths(D=dim, V=value_dim), PAGE_ROWS=page_size,
        KEYS=tile.BLOCK_N, UNITS=units, **_options(q, tile),
    )  # fmt: skip
    return _combine(parts, q, None, batch, value_dim, (0, num_parts, 0), (1, units), 0, False)


def _decode_window(
    q: Tensor, cache: WindowCache, batch: DecodeBatch, rotary: Rotary, window_size: int, scale: float
) -> Tensor:
    """Only the window's part of `decode_attend_kernel`."""
    num_sequences, new, heads, dim = q.shape
    k, v = cache.k_win, cache.v_win
    groups, ring, value_dim = *k.shape[1:3], v.shape[3]
    tile = tiles.decode_tile(q, v, heads // groups, "attend")
    most_units = cdiv(window_size, tiles.DECODE_UNIT)
    units = dispatch.decode_units_of_part(num_sequences * groups * new, most_units, q.device)
    num_parts = cdiv(most_units, units)
    parts = _empty_parts(q, num_parts, value_dim)
    strides = (*k.stride()[:3], *v.stride()[:3])
    # Nothing is chosen: the table stands in for the choice, which no program reads, and rings for pages.
    table = batch.block_table
    decode_attend_kernel[num_parts, groups * new, num_sequences](
        q, *(k, v) * 3, *rotary, batch.rows, batch.lengths, batch.num_new, table, table, table,
        *parts, *q.stride()[:3], *strides * 3, table.stride(0), num_parts, 0, 0, num_parts, window_size,
        scale * LOG2_E,
        NEW=new, GROUPS=groups, Q_PER_KV=heads // groups, **named_widths(D=dim, V=value_dim), SELECTION=tile.BLOCK_N,
        NUM_SELECTED=1, PAGE_ROWS=tile.BLOCK_N, RING=ring, KEYS=tile.BLOCK_N,
        UNIT_TILES=tiles.DECODE_UNIT // tile.BLOCK_N, UNITS=units,
        COMPRESSION=0, STRIDE=1, TAPS=1, BLOCKS=1, BLOCK_TILES=1, COMPRESSED_PAGE_ROWS=1,
        WINDOW_STAGES=tile.stages, **_options(q, tile),
    )  # fmt: skip
    return _combine(parts, q, None, batch, value_dim, (0, num_parts, 0), (1, units), window_size, True)


def _combine(
    parts: tuple[Tensor, Tensor, Tensor],
    q: Tensor,
    gates: Tensor | None,
    batch: DecodeBatch,
    value_dim: int,
    num_parts: tuple[int, int, int],
    units: tuple[int, int],
    window_size: int,
    window: bool,
    sizes: dict[str, int] | None = None,
) -> Tensor:
    """o from parts, of some units of keys each: of compressed, chosen and window keys, or without `sizes` of one
    branch.
    """
    dense = sizes is None
    sizes = sizes or dict.fromkeys(("COMPRESSION", "STRIDE", "SELECTION", "NUM_SELECTED", "BLOCKS", "UNIT_TILES"), 1)
    num_sequences, new, heads, _ = q.shape
    cmp_parts, chosen_parts, window_parts = num_parts
    cmp_units, units_of_tokens = units
    o = q.new_empty(num_sequences, new, heads, value_dim)
    gate_strides = (0, 0, 0, 0) if gates is None else gates.stride()
    decode_combine_kernel[cdiv(heads, HEADS_OF_PROGRAM.value), new, num_sequences](
        *parts, o if gates is None else gates, o, batch.lengths, batch.num_new, *gate_strides,
        sum(num_parts), cmp_parts, cmp_parts + chosen_parts, window_size,
        NEW=new, HEADS=heads, V=value_dim, V_PAD=next_power_of_2(value_dim), DENSE=dense,
        GATED=gates is not None, WINDOW=window, **sizes, COMPRESSED_UNITS=cmp_units, UNITS=units_of_tokens,
        COMPRESSED_AT_ONCE=_at_once(cmp_parts, cmp_units), CHOSEN_AT_ONCE=_at_once(chosen_parts, units_of_tokens),
        WINDOW_AT_ONCE=_at_once(window_parts, units_of_tokens), MORE_COMPRESSED=_more_parts(cmp_parts, cmp_units),
        MORE_CHOSEN=_more_parts(chosen_parts, units_of_tokens), MORE_WINDOW=_more_parts(window_parts, units_of_tokens),
        num_warps=4, **dependent_launch(q.device),
    )  # fmt: skip
    return o


def _options(q: Tensor, tile: Tile) -> dict[str, int | None]:
    return {
        **dependent_launch(q.device),
        "ROWS": tile.BLOCK_M, "STAGES": stages_of_pages(tile.stages), "num_warps": tile.warps,
        "maxnreg": tile.registers,
    }  # fmt: skip


def _at_once(parts: int, units: int) -> int:
    """Groups whose parts combine asks for together: all up to 16 parts, a power of two."""
    most = max(1, _PARTS_AT_ONCE * units // tiles.DECODE_GROUP)
    return min(most, next_power_of_2(max(1, cdiv(parts * units, tiles.DECODE_GROUP))))


def _more_parts(parts: int, units: int) -> bool:
    """Whether there are more parts than combine asks for together."""
    return parts * units > _at_once(parts, units) * tiles.DECODE_GROUP


def _empty_parts(q: Tensor, num_parts: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum and o of every part of every row."""
    shape = (*q.shape[:3], num_parts)
    maximum, total, o = (
        torch.empty(size, dtype=torch.float32, device=q.device) for size in (shape, shape, (*shape, value_dim))
    )
    return maximum, total, o
