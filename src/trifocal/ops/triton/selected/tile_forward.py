"""Selected attention, forward: a program holds a tile of queries and walks through the blocks that any of them chose.

It is FlashAttention over the list of the tile (see `tile_lists`): a block that a row did not choose leaves the row as
it is, by one number a row. Rows are the heads of a group of neighbouring queries. Keys and values are read once for all
rows of a tile, and nothing but o and lse is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import dispatch, tiles
from trifocal.ops.layout import Documents
from trifocal.ops.tiles import next_power_of_2
from trifocal.ops.triton.common import LN_2, load_and_multiply, load_parts, nothing_yet, store_tile, strides
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.selected.common import attend_block, kernel_constants
from trifocal.ops.triton.selected.tile_lists import build_tile_lists


@triton.jit
def _number(numbers, entry, end):
    """An entry's first token, or the word that says which queries chose its block."""
    return tl.load(numbers + entry, mask=entry < end, other=0)


@triton.jit
def _attend_entries(
    softmax, queries, k, v, k_time_stride, v_time_stride,
    tokens, members, query, last_key, num_keys, begin, end, score_scale,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the blocks of some entries into the running softmax of the rows that chose them.

    The tokens of the blocks three entries ahead are on their way while a block is worked on: the pipeline fetches keys
    two blocks ahead and must not wait for their places.
    """
    in_block = tl.arange(0, KEYS)
    # The compiler pipelines no loop that hands values on unchanged; it cannot know that this is zero.
    zero = num_keys >> 31
    first_0 = _number(tokens, begin, end)
    first_1 = _number(tokens, begin + 1, end)
    first_2 = _number(tokens, begin + 2, end)
    word = _number(members, begin, end)
    for entry in tl.range(begin, end):
        first = first_0
        chosen = ((word >> query) & 1) != 0
        word = _number(members, entry + 1, end)
        keep = (in_block < BLOCK) & (first + in_block < num_keys)
        k_base = k + first.to(tl.int64) * k_time_stride
        v_base = v + first.to(tl.int64) * v_time_stride
        scores, _keys = load_and_multiply(queries, k_base, in_block * k_time_stride, keep, D, D_1, D_2, MASKED)
        if MASKED:
            visible = (in_block < BLOCK)[None, :] & (first + in_block[None, :] <= last_key[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        softmax = attend_block(
            softmax, scores, chosen, v_base, in_block * v_time_stride, keep, score_scale, V, V_1, V_2, MASKED
        )
        first_0 = first_1 + zero
        first_1 = first_2 + zero
        first_2 = _number(tokens, entry + 3, end)
    return softmax


@Kernel
@triton.jit(do_not_specialize=["row_tiles", "width", "num_queries", "query_shift", "num_keys"])
def tile_forward_kernel(
    q, k, v, o, lse, tokens, members, counts,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    v_batch_stride, v_time_stride, v_head_stride,
    row_tiles, width, num_queries, query_shift, num_keys, score_scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """o and lse of one tile of rows; of each group the late ones start first."""
    tile = row_tiles - 1 - tl.program_id(0) % row_tiles
    batch_group = tl.program_id(0) // row_tiles
    batch = (batch_group // GROUPS).to(tl.int64)
    group = batch_group % GROUPS
    row = tl.arange(0, ROWS)
    head = row % Q_PER_KV
    # Rows behind the last query that fits stand for it again.
    in_tile = tl.minimum(row // Q_PER_KV, QUERIES - 1)
    query = tile * QUERIES + in_tile
    exists = (row < QUERIES * Q_PER_KV) & (query < num_queries)
    last_key = query + query_shift
    q += batch * q_batch_stride + group * Q_PER_KV * q_head_stride
    k += batch * k_batch_stride + group * k_head_stride
    v += batch * v_batch_stride + group * v_head_stride
    q_offsets = query.to(tl.int64) * q_time_stride + head * q_head_stride
    queries = load_parts(q, q_offsets, exists, D, D_1, D_2, True)
    softmax = nothing_yet(ROWS, V_1, V_2)
    of_tile = batch_group.to(tl.int64) * row_tiles + tile
    end = tl.load(counts + of_tile * 2 + 1)
    masked = tl.load(counts + of_tile * 2)
    if BLOCK < KEYS:
        masked = end
    tokens += of_tile * width
    members += of_tile * width
    bounds = (0, masked, end)
    for run in tl.static_range(2 if BLOCK == KEYS else 1):
        softmax = _attend_entries(
            softmax, queries, k, v, k_time_stride, v_time_stride,
            tokens, members, in_tile, last_key, num_keys, bounds[run], bounds[run + 1], score_scale,
            D, D_1, D_2, V, V_1, V_2, BLOCK, KEYS, run == 0,
        )  # fmt: skip
    o_1, o_2, running_max, running_sum = softmax
    sees = running_sum > 0
    safe_sum = tl.where(sees, running_sum, 1.0)
    inverse = (1.0 / safe_sum)[:, None]
    place = (batch * num_queries + query) * (GROUPS * Q_PER_KV) + group * Q_PER_KV + head
    # A row that sees nothing may have met any values of blocks that others chose.
    store_tile(o, place * V, exists, tl.where(sees[:, None], o_1 * inverse, 0.0), 0, V_1, V)
    if V_2 > 0:
        store_tile(o, place * V, exists, tl.where(sees[:, None], o_2 * inverse, 0.0), V_1, V_2, V)
    natural = tl.where(sees, (running_max + tl.log2(safe_sum)) * LN_2, float("-inf"))
    tl.store(lse + place, natural, mask=exists)


def tile_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected_blocks: Tensor,
    block_size: int,
    score_scale: float,
    documents: Documents | None,
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V] and lse [B, T, H]; arguments as `selected_forward` prepares them, the scale in base 2."""
    batch, num_queries, num_heads, _ = q.shape
    num_keys, groups, value_dim = v.shape[1:]
    q_per_kv = num_heads // groups
    o = torch.empty(batch, num_queries, num_heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_queries, num_heads, dtype=torch.float32, device=q.device)
    on_hopper = dispatch.tiles_on_hopper(q, k, v, block_size=block_size)
    if on_hopper:
        queries = 128 // next_power_of_2(q_per_kv)
        lists = build_tile_lists(selected_blocks, block_size, num_keys, documents, queries)
        dispatch.hopper("selected.tile_forward").launch_tile_forward(q, k, v, o, lse, lists, score_scale)
        return o, lse
    tile = tiles.selected_tile("tile forward", q, v, q_per_kv, on_hopper=False)
    queries = dispatch.queries_of_tile(q, q_per_kv, tile.BLOCK_M, batch * groups)
    lists = build_tile_lists(selected_blocks, block_size, num_keys, documents, queries)
    row_tiles, width = lists.tokens.shape[2:]
    tile_forward_kernel[(row_tiles * batch * groups,)](
        q, k, v, o, lse, lists.tokens, lists.members, lists.counts, *strides(q), *strides(k), *strides(v),
        row_tiles, width, num_queries, num_keys - num_queries, num_keys, score_scale,
        **kernel_constants(q, k, v, block_size), QUERIES=queries,
        ROWS=max(16, next_power_of_2(queries * q_per_kv)), num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=tile.registers,
    )  # fmt: skip
    return o, lse
