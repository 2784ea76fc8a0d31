"""d_q on Hopper, of the compressed branch, the window or both: products of keys and the d_scores that `dkdv` stored.

A program holds d_q of a tile of rows and loops over tiles of 64 keys, both read by the copy engine. From memory, per
program: the d_scores of its rows, keys of the ranges, d_q out, and in when it is added to. The d_scores are most of it.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.hopper.common import split_heads
from trifocal.ops.hopper.interval.dkdv import StoredScores
from trifocal.ops.tiles import Tile, cdiv, split_width
from trifocal.ops.triton.common import load_tile, store_tile
from trifocal.ops.triton.interval.common import Branch, full_tiles, key_sources, load_keys, visible_keys
from trifocal.ops.triton.launch import Kernel, describe_tiles

# fmt: off

@triton.jit
def _add_tiles(
    d_q_1, d_q_2, d_scores, k_source_1, k_source_2, batch, group, first_plane, first_row, query_shift, key_origin,
    row_begin, row_end, count, split, jump,
    Q_PER_KV: tl.constexpr, COMPRESSED: tl.constexpr, D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):
    """Add the shares of `count` key tiles to d_q; tiles from number `split` on lie `jump` tiles further."""
    for number in tl.range(0, count):
        first_key = key_origin + (number + tl.where(number >= split, jump, 0)) * KEYS
        row = first_row
        if not COMPRESSED:
            # A plane of the window begins with the query at the place of its first key.
            row = first_row - (first_key - query_shift) * Q_PER_KV
        tile = d_scores.load([first_plane + first_key // KEYS, row, 0]).reshape([ROWS, KEYS])
        if MASKED:
            # What nobody sees was not stored.
            key = first_key + tl.arange(0, KEYS)
            visible = (key[None, :] >= row_begin[:, None]) & (key[None, :] < row_end[:, None])
            tile = tl.where(visible, tile, 0.0)
        k_1 = load_keys(k_source_1, batch, group, first_key, 0, 0, 0, D_1, D, KEYS, False, False, True)
        d_q_1 = tl.dot(tile, k_1, d_q_1, input_precision="ieee")
        if D_2 > 0:
            k_2 = load_keys(k_source_2, batch, group, first_key, 0, 0, D_1, D_2, D, KEYS, False, False, True)
            d_q_2 = tl.dot(tile, k_2, d_q_2, input_precision="ieee")
    return d_q_1, d_q_2


@triton.jit
def _add_branch(
    d_q_1, d_q_2, d_scores, k_source_1, k_source_2, batch, group, first_row, num_queries, num_keys, query_shift,
    first_query, planes_of_group, first_plane, window_size, ids, positions,
    Q_PER_KV: tl.constexpr, D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr,
    COMPRESSED: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):
    """Add one branch's share to d_q of a tile of rows: first the tiles of keys that need no mask, then the others.

    Of the window without documents, only one with a key behind the last does: its planes have zeros where a key is not
    seen, since they end where their last key's window ends, and the copy engine has zeros behind.
    """
    query = tl.minimum((first_row + tl.arange(0, ROWS)) // Q_PER_KV, num_queries - 1)
    last_query = tl.minimum((first_row + ROWS - 1) // Q_PER_KV, num_queries - 1)
    row_begin, row_end = visible_keys(
        query, query_shift, window_size, ids, positions, None, COMPRESSED, BLOCK, STRIDE, PACKED)
    begin, full_end = visible_keys(
        first_row // Q_PER_KV, query_shift, window_size, ids, positions, None, COMPRESSED, BLOCK, STRIDE, PACKED)
    full_begin, end = visible_keys(
        last_query, query_shift, window_size, ids, positions, None, COMPRESSED, BLOCK, STRIDE, PACKED)
    key_origin = begin // KEYS * KEYS
    tiles, first_full, last_full = full_tiles(key_origin, end, full_begin, full_end, KEYS)
    if not COMPRESSED and not PACKED:
        first_full = 0
        last_full = tl.minimum(tiles, (num_keys - key_origin) // KEYS)
    full = last_full - first_full
    stored_row = first_row - first_query * Q_PER_KV if COMPRESSED else first_row
    plane = tl.program_id(1) * planes_of_group + first_plane
    d_q_1, d_q_2 = _add_tiles(
        d_q_1, d_q_2, d_scores, k_source_1, k_source_2, batch, group, plane, stored_row, query_shift, key_origin,
        row_begin, row_end, full, 0, first_full, Q_PER_KV, COMPRESSED, D, D_1, D_2, ROWS, KEYS, False)
    d_q_1, d_q_2 = _add_tiles(
        d_q_1, d_q_2, d_scores, k_source_1, k_source_2, batch, group, plane, stored_row, query_shift, key_origin,
        row_begin, row_end, tiles - full, first_full, full, Q_PER_KV, COMPRESSED, D, D_1, D_2, ROWS, KEYS, True)
    return d_q_1, d_q_2


@Kernel
@triton.jit(do_not_specialize=[
    "num_queries", "cmp_num_keys", "cmp_query_shift", "cmp_first_query", "cmp_planes_of_group", "cmp_first_plane",
    "win_num_keys", "win_query_shift", "win_first_query", "win_planes_of_group", "win_first_plane", "window_size",
])
def interval_d_q_hopper_kernel(
    cmp_scores, cmp_k_1, cmp_k_2, cmp_num_keys, cmp_query_shift, cmp_first_query, cmp_planes_of_group, cmp_first_plane,
    win_scores, win_k_1, win_k_2, win_num_keys, win_query_shift, win_first_query, win_planes_of_group, win_first_plane,
    window_size, ids, positions, d_q, num_queries, scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, SHARES: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    PACKED: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):
    """d_q of one tile of rows, those with the longest past first; with ADD, added to the old values of d_q.

    Of the branch that is left out, d_scores are None.
    """
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch = tl.program_id(1) // (GROUPS * SHARES)
    share = tl.program_id(1) % (GROUPS * SHARES)
    d_q_1 = tl.zeros([ROWS, D_1], tl.float32)
    d_q_2 = d_q_1
    if D_2 > 0:
        d_q_2 = tl.zeros([ROWS, D_2], tl.float32)
    if cmp_scores is not None:
        d_q_1, d_q_2 = _add_branch(
            d_q_1, d_q_2, cmp_scores, cmp_k_1, cmp_k_2, batch, share // SHARES, first_row, num_queries,
            cmp_num_keys, cmp_query_shift, cmp_first_query, cmp_planes_of_group, cmp_first_plane, 0, None, None,
            Q_PER_KV, D, D_1, D_2, True, BLOCK, STRIDE, False, ROWS, KEYS)
    if win_scores is not None:
        d_q_1, d_q_2 = _add_branch(
            d_q_1, d_q_2, win_scores, win_k_1, win_k_2, batch, share // SHARES, first_row, num_queries,
            win_num_keys, win_query_shift, win_first_query, win_planes_of_group, win_first_plane,
            window_size, ids, positions,
            Q_PER_KV, D, D_1, D_2, False, BLOCK, STRIDE, PACKED, ROWS, KEYS)
    HEADS: tl.constexpr = GROUPS * SHARES * Q_PER_KV
    in_tile = tl.arange(0, ROWS)
    keep = first_row + in_tile < num_queries * Q_PER_KV
    d_q += ((batch.to(tl.int64) * num_queries + first_row // Q_PER_KV) * HEADS + share * Q_PER_KV) * D
    place = ((in_tile // Q_PER_KV) * HEADS + in_tile % Q_PER_KV) * D
    d_q_1 *= scale
    if ADD:
        d_q_1 += load_tile(d_q, place, keep, 0, D_1, D, True).to(tl.float32)
    store_tile(d_q, place, keep, d_q_1, 0, D_1, D)
    if D_2 > 0:
        d_q_2 *= scale
        if ADD:
            d_q_2 += load_tile(d_q, place, keep, D_1, D_2, D, True).to(tl.float32)
        store_tile(d_q, place, keep, d_q_2, D_1, D_2, D)

# fmt: on


class Share(NamedTuple):
    """One branch's share of the d_q of some queries.

    Attributes:
        k: Keys, [B, S, G, D]; key 0 is the first of plane `stored.first_plane`.
        branch: What these queries see of them.
        stored: The d_scores.
        first_query: Of the compressed branch, the query of the first rows of `stored`, seen from query 0: 0 or less.
    """

    k: Tensor
    branch: Branch
    stored: StoredScores
    first_query: int


def launch_d_q(
    d_q: Tensor, compressed: Share | None, window: Share | None, scale: float, tile: Tile, *, add: bool
) -> None:
    """Write d_q from the d_scores of `dkdv.launch_dkdv`.

    Args:
        d_q: Where it goes, [B, T, H, D], contiguous.
        compressed, window: The shares of the branches, at least one.
        scale: Factor on the scores.
        tile: Rows and keys of a tile, warps, stages.
        add: Whether it is added to the old values.
    """
    batch, num_queries, heads, dim = d_q.shape
    share = compressed or window
    assert share is not None
    width, groups = split_width(dim), share.k.shape[2]
    q_per_kv, shares = split_heads(heads // groups)
    rows, keys = tile.BLOCK_M, tile.BLOCK_N
    blocks, seen = (Branch() if x is None else x.branch for x in (compressed, window))

    def arguments(share: Share | None) -> tuple[object, ...]:
        if share is None:
            return (None,) * 3 + (0,) * 5
        planes, plane_rows, _, _ = share.stored.tensor.shape
        shape, strides = (planes, plane_rows, keys), (plane_rows * keys, keys, 1)
        source = describe_tiles(share.stored.tensor, shape, strides, (1, rows, keys))
        numbers = (share.k.shape[1], share.branch.query_shift, share.first_query, *share.stored[1:])
        return source, *key_sources(share.k, width, keys, True), *numbers

    interval_d_q_hopper_kernel[cdiv(num_queries * q_per_kv, rows), batch * groups * shares](
        *arguments(compressed), *arguments(window), seen.window_size, seen.ids, seen.positions, d_q, num_queries, scale,
        groups, q_per_kv, shares, *width, BLOCK=blocks.block, STRIDE=blocks.stride,
        PACKED=seen.is_packed, ADD=add, ROWS=rows, KEYS=keys, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
