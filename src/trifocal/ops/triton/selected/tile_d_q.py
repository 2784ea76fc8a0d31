"""d_q of the selected branch by tiles: the rows of neighbouring queries go through the blocks that any of them chose.

Each row adds only what its own query chose (`tile_lists`), so the result is exact and is stored once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import dispatch, tiles
from trifocal.ops.tiles import cdiv, next_power_of_2
from trifocal.ops.triton.common import load_and_multiply, store_parts, zeros_in_parts
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.selected.common import SelectedProblem, add_d_q, load_rows, row_numbers
from trifocal.ops.triton.selected.tile_lists import build_tile_lists


@triton.jit
def _d_q_of_blocks(
    d_q, queries, d_o, k, v, k_time_stride, v_time_stride, numbers,
    tokens, members, in_tile, last_key, num_keys, first, end, score_scale,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Add the shares of some entries of the tile's list to d_q of the rows that chose them."""
    in_block = tl.arange(0, KEYS)
    for entry in tl.range(first, end):
        first_token = tl.load(tokens + entry)
        chosen = ((tl.load(members + entry) >> in_tile) & 1) != 0
        keep = (in_block < BLOCK) & (first_token + in_block < num_keys)
        k_base = k + first_token.to(tl.int64) * k_time_stride
        v_base = v + first_token.to(tl.int64) * v_time_stride
        scores, keys = load_and_multiply(queries, k_base, in_block * k_time_stride, keep, D, D_1, D_2, MASKED)
        d_p, _values = load_and_multiply(d_o, v_base, in_block * v_time_stride, keep, V, V_1, V_2, MASKED)
        d_q = add_d_q(
            d_q, keys, scores, d_p, chosen, keep, first_token, last_key, numbers, score_scale,
            D_2, KEYS, MASKED, GATED,
        )  # fmt: skip
    return d_q


@Kernel
@triton.jit(do_not_specialize=["num_queries", "query_shift", "num_keys", "row_tiles", "width"])
def tile_d_q_kernel(
    q, k, v, d_o, lse, delta, gate, d_q, tokens, members, counts,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    d_batch_stride, d_time_stride, d_head_stride,
    num_queries, query_shift, num_keys, row_tiles, batch_groups, width, score_scale, scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, GATED: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """d_q of ROWS rows of a tile of queries; late tiles start first, those of all batch entries and groups together."""
    tile = row_tiles - 1 - tl.program_id(0) // batch_groups
    batch_group = tl.program_id(0) % batch_groups
    batch = (batch_group // GROUPS).to(tl.int64)
    group = batch_group % GROUPS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    head = row % Q_PER_KV
    # Rows behind the last query that fits stand for it again.
    in_tile = tl.minimum(row // Q_PER_KV, QUERIES - 1)
    query = tile * QUERIES + in_tile
    exists = (row < QUERIES * Q_PER_KV) & (query < num_queries)
    place = (batch * num_queries + query) * (GROUPS * Q_PER_KV) + group * Q_PER_KV + head
    numbers = row_numbers(lse, delta, gate, place, exists, GATED)
    q += batch * q_batch_stride + group * Q_PER_KV * q_head_stride
    d_o += batch * d_batch_stride + group * Q_PER_KV * d_head_stride
    k += batch * k_batch_stride + group * k_head_stride
    v += batch * v_batch_stride + group * v_head_stride
    q_offsets = query.to(tl.int64) * q_time_stride + head * q_head_stride
    d_offsets = query.to(tl.int64) * d_time_stride + head * d_head_stride
    queries, d_o_rows = load_rows(q, d_o, q_offsets, d_offsets, exists, D, D_1, D_2, V, V_1, V_2)
    d_q_sum = zeros_in_parts(ROWS, D_1, D_2)
    of_tile = batch_group.to(tl.int64) * row_tiles + tile
    end = tl.load(counts + of_tile * 2 + 1)
    masked = tl.load(counts + of_tile * 2)
    if BLOCK < KEYS:
        masked = end
    tokens += of_tile * width
    members += of_tile * width
    bounds = (0, masked, end)
    for run in tl.static_range(2 if BLOCK == KEYS else 1):
        d_q_sum = _d_q_of_blocks(
            d_q_sum, queries, d_o_rows, k, v, k_time_stride, v_time_stride, numbers,
            tokens, members, in_tile, query + query_shift, num_keys, bounds[run], bounds[run + 1], score_scale,
            D, D_1, D_2, V, V_1, V_2, BLOCK, KEYS, run == 0, GATED,
        )  # fmt: skip
    store_parts(d_q, place * D, exists, scale, d_q_sum, D, D_1, D_2)


def tile_d_q(problem: SelectedProblem) -> Tensor:
    """d_q, [B, T, H, D]."""
    p, q_per_kv = problem, problem.q_per_kv
    batch, num_keys, groups = p.k.shape[:3]
    on_hopper = dispatch.tiles_on_hopper(p.q, p.k, p.v, p.d_o, block_size=p.block_size)
    tile = tiles.selected_tile("tile d_q", p.q, p.v, q_per_kv, on_hopper=False)
    queries = dispatch.queries_of_tile(p.q, q_per_kv, tile.BLOCK_M, batch * groups)
    if on_hopper:
        queries = 128 // next_power_of_2(q_per_kv)
    lists = build_tile_lists(p.selected_blocks, p.block_size, num_keys, p.documents, queries)
    d_q = torch.empty(p.q.shape, dtype=p.q.dtype, device=p.q.device)
    if on_hopper:
        dispatch.hopper("selected.tile_d_q").launch_tile_d_q(p, d_q, lists)
        return d_q
    row_tiles, width = lists.tokens.shape[2:]
    rows = min(tile.BLOCK_M, max(16, next_power_of_2(queries * q_per_kv)))
    constants = p.constants()
    del constants["PACKED"]
    tile_d_q_kernel[row_tiles * batch * groups, cdiv(queries * q_per_kv, rows)](
        *p.rows(), d_q, lists.tokens, lists.members, lists.counts, *p.sizes(), row_tiles, batch * groups, width,
        p.score_scale, p.scale, **constants, QUERIES=queries, ROWS=rows,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return d_q
