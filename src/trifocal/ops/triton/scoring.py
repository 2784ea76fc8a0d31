"""Scoring and top-n: which blocks each query group attends to, in chunks of queries, so that memory is bounded.

A tile of columns holds whole selection blocks, `l'/d` compressed blocks each, padded to a power of two. Each selection
block's importance is written in two parts, so that no tile needs its neighbour: from compressed blocks that start in it
(`direct`), and from those that reach over from the block before (`overflow`). The choice halves the bits of
non-negative floats, which order like integers, to the largest threshold that n values reach.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops import dispatch, tiles
from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents, longest_document
from trifocal.ops.tiles import cdiv, named_widths, next_power_of_2
from trifocal.ops.triton.common import LOG2_E, LOG2_E_KERNEL, load_and_multiply_left, load_parts, strides, unit_stride
from trifocal.ops.triton.documents import default_documents, first_compressed_blocks
from trifocal.ops.triton.launch import Kernel

# Compressed blocks of one selection block that a tile holds; geometries with more are summed in parts.
MAX_TAPS = 64
# Rows of importance are a multiple of this, so that they are read in whole vectors.
LINE = tl.constexpr(16)
INFINITY_BITS = tl.constexpr(0x7F800000)


@Kernel
@triton.jit(
    do_not_specialize=["first_query", "end_query", "query_shift", "block_lines", "num_compressed", "column_tiles"]
)
def importance_kernel(
    q, k_cmp, lse, direct, overflow, ids, positions, first_compressed,
    q_batch_stride, q_time_stride, q_head_stride,
    k_batch_stride, k_time_stride, k_head_stride,
    lse_batch_stride, lse_time_stride, lse_head_stride,
    first_query, end_query, query_shift, block_lines, num_compressed, column_tiles, score_scale,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr,
    COMPRESSION: tl.constexpr, STRIDE: tl.constexpr, SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr,
    TAPS: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Importance of `column_tiles` tiles of selection blocks for one tile of queries.

    `direct` and `overflow` are [B, queries of the chunk, G, num_blocks], with blocks in whole lines. Queries that may
    take all their candidates need no importance; tiles of such queries do nothing.
    """
    COLUMNS: tl.constexpr = BLOCKS * TAPS
    num_blocks = block_lines * LINE
    query = first_query + tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    batch = (tl.program_id(2) // GROUPS).to(tl.int64)
    group = tl.program_id(2) % GROUPS
    exists = query < end_query
    token = query + query_shift
    first_document = 0
    last_document = 0
    if PACKED:
        position = tl.load(positions + token, mask=exists, other=0)
        document_of_query = tl.load(ids + token, mask=exists, other=-1)
        first_document = tl.load(ids + first_query + tl.program_id(1) * QUERIES + query_shift)
        last_document = tl.max(document_of_query)
    else:
        position = token
    q += batch * q_batch_stride + group * Q_PER_KV * q_head_stride
    k_cmp += batch * k_batch_stride + group * k_head_stride
    lse += batch * lse_batch_stride + group * Q_PER_KV * lse_head_stride
    q_offsets = query.to(tl.int64) * q_time_stride
    lse_offsets = query.to(tl.int64) * lse_time_stride
    out_row = (batch * (end_query - first_query) + (query - first_query)) * GROUPS + group

    column = tl.arange(0, COLUMNS)
    block_of_column = column // TAPS
    for document in range(first_document, last_document + 1):
        in_document = exists
        first = 0 * document
        last = first + num_compressed
        if PACKED:
            in_document = exists & (document_of_query == document)
            first = tl.load(first_compressed + document)
        # A query sees only blocks of its document, so the document's count need not be known.
        candidates = tl.max(tl.where(in_document, position // SELECTION + 1, 0))
        first_tile = tl.program_id(0) * column_tiles
        end_tile = tl.minimum(first_tile + column_tiles, tl.cdiv(candidates, BLOCKS))
        end_tile = tl.where(candidates > NUM_SELECTED, end_tile, first_tile)
        for tile in range(first_tile, end_tile):
            first_block = tile * BLOCKS
            direct_sum = tl.zeros([QUERIES, BLOCKS], tl.float32)
            overflow_sum = direct_sum
            for part in tl.static_range(PARTS):
                tap = part * TAPS + column % TAPS
                compressed = (first_block + block_of_column) * (SELECTION // STRIDE) + tap
                column_exists = (tap < SELECTION // STRIDE) & (first + compressed < last)
                k_offsets = (first + compressed).to(tl.int64) * k_time_stride
                keys = load_parts(k_cmp, k_offsets, column_exists, D, D_1, D_2, True)
                p = tl.zeros([QUERIES, COLUMNS], tl.float32)
                for head in tl.range(0, Q_PER_KV):
                    # Asked for before the products, it is there when they are.
                    lse_of_head = tl.load(lse + lse_offsets + head * lse_head_stride, mask=exists, other=0.0)
                    q_head = q + head * q_head_stride
                    scores, _queries = load_and_multiply_left(keys, q_head, q_offsets, exists, D, D_1, D_2)
                    p += tl.exp2(scores * score_scale - (lse_of_head * LOG2_E_KERNEL)[:, None])
                last_token = compressed * STRIDE + (COMPRESSION - 1)
                visible = column_exists[None, :] & (last_token[None, :] <= position[:, None])
                p = tl.where(visible, p, 0.0)
                # Overlaps in units of the stride: with the block that the compressed one starts in, and the next.
                direct_weight = tl.minimum(COMPRESSION, SELECTION - tap * STRIDE).to(tl.float32) / STRIDE
                direct_sum += tl.sum(tl.reshape(p * direct_weight[None, :], [QUERIES, BLOCKS, TAPS]), 2)
                if COMPRESSION > STRIDE:
                    overflow_weight = COMPRESSION / STRIDE - direct_weight
                    overflow_sum += tl.sum(tl.reshape(p * overflow_weight[None, :], [QUERIES, BLOCKS, TAPS]), 2)
            block = first_block + tl.arange(0, BLOCKS)
            out = out_row[:, None].to(tl.int64) * num_blocks + block[None, :]
            tl.store(direct + out, direct_sum, mask=in_document[:, None] & (block < num_blocks)[None, :])
            if COMPRESSION > STRIDE:
                tl.store(
                    overflow + out + 1, overflow_sum, mask=in_document[:, None] & (block + 1 < num_blocks)[None, :]
                )


@triton.jit
def most_important(importance, free, wanted, ROWS: tl.constexpr):
    """The `wanted` most important of the free blocks of each row, [ROWS, blocks]; of equal ones the lower indices."""
    bits = tl.minimum(tl.maximum(importance.to(tl.int32, bitcast=True), 0), INFINITY_BITS)
    bits = tl.where(free, bits, -1)

    # Invariant: at least `wanted` values reach `low`; fewer reach `high`, or none is wanted.
    all_taken = tl.sum(free.to(tl.int32), 1) == wanted
    low = tl.zeros([ROWS], tl.int32)
    high = tl.max(bits, 1) + 1
    done = all_taken | (high <= 1)
    while tl.min(done.to(tl.int32), 0) == 0:
        middle = low + (high - low) // 2
        reach = tl.sum((bits >= middle[:, None]).to(tl.int32), 1)
        enough = reach >= wanted
        low = tl.where(enough & (done == 0), middle, low)
        high = tl.where(enough, high, middle)
        done = done | (enough & (reach == wanted)) | (high - low <= 1)
    above = bits > low[:, None]
    equal = bits == low[:, None]
    spare = wanted - tl.sum(above.to(tl.int32), 1)
    # Almost always all that equal the threshold are taken; a row with more of them than wanted counts them.
    if tl.max(tl.sum(equal.to(tl.int32), 1) - spare, 0) > 0:
        equal = equal & (tl.cumsum(equal.to(tl.int32), 1) <= spare[:, None])
    return above | equal


@Kernel
@triton.jit(do_not_specialize=["first_query", "end_query", "num_queries", "query_shift", "block_lines", "rows"])
def choice_kernel(
    direct, overflow, selected_blocks, positions,
    first_query, end_query, num_queries, query_shift, block_lines, rows,
    GROUPS: tl.constexpr, COMPRESSION: tl.constexpr, STRIDE: tl.constexpr, SELECTION: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    PACKED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The choice of some rows (batch, query of the chunk, group) from the importance of all their blocks."""
    num_blocks = block_lines * LINE
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    row = tl.where(exists, row, 0)
    chunk_queries = end_query - first_query
    query = first_query + ((row // GROUPS) % chunk_queries).to(tl.int32)
    position = query + query_shift
    if PACKED:
        position = tl.load(positions + position)
    # Where the longest document's length was given too small, later blocks have no scores.
    candidates = tl.minimum(position // SELECTION + 1, num_blocks)
    block = tl.arange(0, BLOCKS)[None, :]
    is_candidate = block < candidates[:, None]
    forced = is_candidate & ((block < INITIAL) | (block >= candidates[:, None] - LOCAL))
    free = is_candidate & (forced == 0)
    total = tl.minimum(candidates, NUM_SELECTED)
    wanted = total - tl.sum(forced.to(tl.int32), 1)

    # Whole lines are read; numbers that no tile wrote are dropped before they are used.
    place = row[:, None] * num_blocks + block
    needed = (block // LINE < tl.cdiv(candidates, LINE)[:, None]) & (candidates > NUM_SELECTED)[:, None]
    importance = tl.where(free, tl.load(direct + place, mask=needed, other=0.0), 0.0)
    if COMPRESSION > STRIDE:
        importance += tl.where(free & (block > 0), tl.load(overflow + place, mask=needed, other=0.0), 0.0)
    chosen = forced | most_important(importance, free, wanted, ROWS)
    slot = tl.cumsum(chosen.to(tl.int32), 1) - 1
    # Rows of all chunks: [B, T, G].
    batch = row // GROUPS // chunk_queries
    out = selected_blocks + ((batch * num_queries + query) * GROUPS + row % GROUPS)[:, None] * NUM_SELECTED
    tl.store(out + slot, tl.broadcast_to(block, [ROWS, BLOCKS]), mask=chosen & exists[:, None])
    pad = tl.arange(0, NUM_SELECTED_PAD)[None, :]
    empty = exists[:, None] & (pad >= total[:, None]) & (pad < NUM_SELECTED)
    tl.store(out + pad, tl.full([ROWS, NUM_SELECTED_PAD], -1, tl.int32), mask=empty)


def select_blocks_forward(
    q: Tensor, k_cmp: Tensor, lse: Tensor, geometry: Geometry, num_keys: int, scale: float, documents: Documents | None
) -> Tensor:
    """The choice of blocks, [B, T, G, N], int32, from q [B, T, H, D], k_cmp [B, C, G, D], where documents may pad C,
    and the log-sum-exp of the compressed scores [B, T, H].
    """
    q, k_cmp, lse = unit_stride(q), unit_stride(k_cmp), lse.to(torch.float32)
    batch, num_queries, num_heads, dim = q.shape
    num_compressed, groups = k_cmp.shape[1:3]
    q_per_kv, packed = num_heads // groups, documents is not None
    ids, positions, first_compressed = default_documents(documents, lse)
    if documents is not None:
        first_compressed = first_compressed_blocks(documents, geometry)
    taps = next_power_of_2(geometry.selection_block_size // geometry.compression_stride)
    parts = max(1, taps // MAX_TAPS)
    taps //= parts
    on_hopper = dispatch.importance_on_hopper(q, k_cmp, geometry, packed=packed)
    tile = tiles.importance_tile(q, q_per_kv)
    blocks_of_tile = max(1, tile.BLOCK_N // taps)

    def score(chunk: Chunk, direct: Tensor, overflow: Tensor) -> None:
        first_query, end_query, shift, reachable, block_lines = chunk
        if on_hopper is not None:
            dispatch.hopper("scoring").launch_importance(
                q, k_cmp, lse, direct, overflow, geometry, chunk, scale * LOG2_E, **on_hopper
            )
            return
        column_tiles = cdiv(reachable, blocks_of_tile)
        # A program with few heads takes several tiles, or it would end before its loads are under way.
        tiles_of_program = max(1, min(8 // q_per_kv, column_tiles))
        grid = cdiv(column_tiles, tiles_of_program), cdiv(end_query - first_query, tile.BLOCK_M), batch * groups
        importance_kernel[grid](
            q, k_cmp, lse, direct, overflow, ids, positions, first_compressed,
            *strides(q), *strides(k_cmp), *strides(lse),
            first_query, end_query, shift, block_lines, num_compressed, tiles_of_program, scale * LOG2_E,
            GROUPS=groups, COMPRESSION=geometry.compression_block_size, STRIDE=geometry.compression_stride,
            SELECTION=geometry.selection_block_size, NUM_SELECTED=geometry.num_selected_blocks, PACKED=packed,
            Q_PER_KV=q_per_kv, **named_widths(D=dim), TAPS=taps, PARTS=parts,
            QUERIES=tile.BLOCK_M, BLOCKS=blocks_of_tile, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    shape = (batch, num_queries, groups)
    return choose_in_chunks(score, 2, shape, num_keys, geometry, documents, tile.BLOCK_M, q.device)


class Chunk(NamedTuple):
    """Queries `first_query` to `end_query`, where query 0 is token `query_shift`, that choose from `reachable` blocks:
    rows of `block_lines` lines of 16.
    """

    first_query: int
    end_query: int
    query_shift: int
    reachable: int
    block_lines: int


def query_chunks(num_queries: int, row_bytes: int, tile_queries: int) -> list[tuple[int, int]]:
    """Cut queries into chunks, whole tiles each, whose scores fit the buffer: first and end of each."""
    size = max(tile_queries, dispatch.IMPORTANCE_BUFFER_BYTES // row_bytes // tile_queries * tile_queries)
    return [(first, min(first + size, num_queries)) for first in range(0, num_queries, size)]


def choose_in_chunks(
    score: Callable[..., None],
    num_parts: int,
    shape: tuple[int, int, int],
    num_keys: int,
    geometry: Geometry,
    documents: Documents | None,
    tile_queries: int,
    device: torch.device,
) -> Tensor:
    """Score blocks and choose among them, some queries at a time, so that memory is bounded at any length:
    [B, T, G, N], int32, ascending; -1 pads.

    `score` writes the scores of a `Chunk` into `num_parts` buffers [B, queries of the chunk, G, lines of 16 blocks],
    fp32: two where compressed blocks overlap two blocks, `direct` and `overflow`; else one. `shape` is B, T and G.
    """
    batch, num_queries, groups = shape
    # No query has more candidates than the longest document has blocks.
    longest = longest_document(num_keys, documents)
    num_selected, num_blocks = geometry.num_selected_blocks, geometry.num_selection_blocks(longest)
    selected_blocks = torch.empty(*shape, num_selected, dtype=torch.int32, device=device)
    shift, block_lines = num_keys - num_queries, cdiv(num_blocks, LINE.value)
    numbers = batch * groups * block_lines * LINE.value
    chunks = [(0, num_queries)]
    if num_blocks > num_selected:
        chunks = query_chunks(num_queries, 4 * num_parts * numbers, tile_queries)
    size = chunks[0][1] * numbers if num_blocks > num_selected else 1
    parts = [torch.empty(size, dtype=torch.float32, device=device) for _ in range(num_parts)]
    for first_query, end_query in chunks:
        last = longest if documents is not None else shift + end_query
        chunk = Chunk(first_query, end_query, shift, geometry.num_selection_blocks(last), block_lines)
        if chunk.reachable > num_selected:
            score(chunk, *parts)
        _launch_choice(parts[0], parts[-1], selected_blocks, geometry, documents, chunk)
    return selected_blocks


def _launch_choice(
    direct: Tensor,
    overflow: Tensor,
    selected_blocks: Tensor,
    geometry: Geometry,
    documents: Documents | None,
    chunk: Chunk,
) -> None:
    packed = documents is not None
    if dispatch.choice_on_hopper(selected_blocks, chunk.reachable, packed=packed):
        dispatch.hopper("choice").launch_choice(direct, overflow, selected_blocks, geometry, chunk)
        return
    batch, num_queries, groups, num_selected = selected_blocks.shape
    first_query, end_query, shift, reachable, block_lines = chunk
    rows = batch * (end_query - first_query) * groups
    columns = max(16, next_power_of_2(reachable))
    rows_of_program = max(1, 256 // columns)
    choice_kernel[(cdiv(rows, rows_of_program),)](
        direct, overflow, selected_blocks, selected_blocks if documents is None else documents.positions,
        first_query, end_query, num_queries, shift, block_lines, rows,
        GROUPS=groups, COMPRESSION=geometry.compression_block_size, STRIDE=geometry.compression_stride,
        SELECTION=geometry.selection_block_size, NUM_SELECTED=num_selected,
        NUM_SELECTED_PAD=next_power_of_2(num_selected), INITIAL=geometry.num_initial_blocks,
        LOCAL=geometry.num_local_blocks, PACKED=packed, ROWS=rows_of_program, BLOCKS=columns,
        num_warps=max(1, min(8, columns // 1024)),
    )  # fmt: skip
