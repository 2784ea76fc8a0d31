"""d_q on Hopper: one product, of the d_scores that `dkdv` stored and the keys.

A program holds d_q of a tile of rows and loops over tiles of 64 keys, both read by the copy engine. From memory, per
program: the d_scores of its rows, keys of the range, d_q out, and in when it is added to. The d_scores are most of it.
"""

import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.hopper.common import split_heads
from trifocal.ops.hopper.interval.dkdv import StoredScores
from trifocal.ops.tiles import Tile, cdiv, split_width
from trifocal.ops.triton.common import load_tile, store_tile
from trifocal.ops.triton.interval.common import IntervalProblem, full_tiles, key_sources, load_keys, visible_keys
from trifocal.ops.triton.launch import Kernel, describe_tiles

# fmt: off

@triton.jit
def _add_tiles(
    d_q_1, d_q_2, d_scores, k_source_1, k_source_2, batch, group, first_plane, first_row, query_shift, first_query,
    key_origin, row_begin, row_end, count, split, jump,
    Q_PER_KV: tl.constexpr, COMPRESSED: tl.constexpr, D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):
    """Add the shares of `count` key tiles to d_q; tiles from number `split` on lie `jump` tiles further."""
    for number in tl.range(0, count):
        first_key = key_origin + (number + tl.where(number >= split, jump, 0)) * KEYS
        row = first_row
        if not COMPRESSED:
            # A plane of the window begins with the first query that sees its keys.
            row = first_row - tl.maximum(first_key - query_shift, first_query) * Q_PER_KV
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


@Kernel
@triton.jit(do_not_specialize=[
    "num_queries", "query_shift", "window_size", "first_query_of_all", "planes_of_group", "first_plane",
])
def interval_d_q_hopper_kernel(
    d_scores, k_source_1, k_source_2, d_q, ids, positions, first_blocks,
    num_queries, query_shift, window_size, first_query_of_all, planes_of_group, first_plane, scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, SHARES: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr,
    COMPRESSED: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, PACKED: tl.constexpr,
    ADD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):
    """d_q of one tile of rows, those with the longest past first; with ADD, added to the old values of d_q."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch = tl.program_id(1) // (GROUPS * SHARES)
    share = tl.program_id(1) % (GROUPS * SHARES)
    row = first_row + tl.arange(0, ROWS)
    query = tl.minimum(row // Q_PER_KV, num_queries - 1)
    row_begin, row_end = visible_keys(
        query, query_shift, window_size, ids, positions, first_blocks, COMPRESSED, BLOCK, STRIDE, PACKED)
    begin, full_end = visible_keys(
        first_row // Q_PER_KV, query_shift, window_size, ids, positions, first_blocks,
        COMPRESSED, BLOCK, STRIDE, PACKED)
    full_begin, end = visible_keys(
        tl.minimum((first_row + ROWS - 1) // Q_PER_KV, num_queries - 1), query_shift, window_size, ids, positions,
        first_blocks, COMPRESSED, BLOCK, STRIDE, PACKED)
    key_origin = begin // KEYS * KEYS
    tiles, first_full, last_full = full_tiles(key_origin, end, full_begin, full_end, KEYS)
    full = last_full - first_full
    plane = tl.program_id(1) * planes_of_group + first_plane
    d_q_1 = tl.zeros([ROWS, D_1], tl.float32)
    d_q_2 = d_q_1
    if D_2 > 0:
        d_q_2 = tl.zeros([ROWS, D_2], tl.float32)
    d_q_1, d_q_2 = _add_tiles(
        d_q_1, d_q_2, d_scores, k_source_1, k_source_2, batch, share // SHARES, plane, first_row, query_shift,
        first_query_of_all, key_origin, row_begin, row_end, full, 0, first_full,
        Q_PER_KV, COMPRESSED, D, D_1, D_2, ROWS, KEYS, False)
    d_q_1, d_q_2 = _add_tiles(
        d_q_1, d_q_2, d_scores, k_source_1, k_source_2, batch, share // SHARES, plane, first_row, query_shift,
        first_query_of_all, key_origin, row_begin, row_end, tiles - full, first_full, full,
        Q_PER_KV, COMPRESSED, D, D_1, D_2, ROWS, KEYS, True)
    HEADS: tl.constexpr = GROUPS * SHARES * Q_PER_KV
    keep = row < num_queries * Q_PER_KV
    d_q += ((batch.to(tl.int64) * num_queries + first_row // Q_PER_KV) * HEADS + share * Q_PER_KV) * D
    in_tile = tl.arange(0, ROWS)
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


def launch_d_q(
    problem: IntervalProblem,
    d_q: Tensor,
    stored: StoredScores,
    tile: Tile,
    *,
    add: bool,
    first_query: int = 0,
) -> None:
    """Write d_q from the d_scores of `dkdv.launch_dkdv`.

    Args:
        problem: Inputs. Query 0 need not be the first that `stored` has rows of, nor key 0 that of its first plane.
        d_q: Where it goes, [B, T, H, D], contiguous.
        stored: The d_scores; `first_plane` is that of key 0.
        tile: Rows and keys of a tile, warps, stages.
        add: Whether it is added to the old values.
        first_query: Number of the sequence's first query, seen from query 0: 0 or less.
    """
    q, k, branch = problem.q, problem.k, problem.branch
    batch, num_queries = q.shape[:2]
    width = split_width(q.shape[3])
    q_per_kv, shares = split_heads(problem.q_per_kv)
    groups = k.shape[2]
    planes, rows, _, keys = stored.tensor.shape
    source = describe_tiles(stored.tensor, (planes, rows, keys), (rows * keys, keys, 1), (1, tile.BLOCK_M, keys))
    interval_d_q_hopper_kernel[cdiv(num_queries * q_per_kv, tile.BLOCK_M), batch * groups * shares](
        source, *key_sources(k, width, keys, True), d_q, branch.ids, branch.positions, branch.first_blocks,
        num_queries, branch.query_shift, branch.window_size, first_query, stored.planes_of_group, stored.first_plane,
        problem.scale, groups, q_per_kv, shares, *width, **problem.branch.constants(), ADD=add, ROWS=tile.BLOCK_M,
        KEYS=keys, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
