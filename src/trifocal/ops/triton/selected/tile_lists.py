"""The blocks that neighbouring queries chose, tile by tile: what kernels that hold a tile of queries walk through.

A tile is up to 32 queries of one group, one after the other. Its list has every block that any of them chose, once,
with a word of bits that say who did. Nothing here looks at the data on the host: widths are upper bounds from shapes.

A list names blocks by their first token, and runs from late to early ones. So a kernel needs no documents: a query sees
a key of a block that it chose if the key's token is not after its own. In packed documents that also hides what a block
has behind its document's end. And the blocks that some query sees in part come first.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.layout import Documents
from trifocal.ops.tiles import cdiv, next_power_of_2
from trifocal.ops.triton.documents import default_documents
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.selected.block_csr import count_blocks, row_token


class TileLists(NamedTuple):
    """The lists of all tiles; contiguous, int32.

    Attributes:
        tokens: First token of each listed block, descending, [B, G, tiles, width].
        members: Which queries chose it, [B, G, tiles, width]: bit r is that of query `tile * queries + r`.
        counts: [B, G, tiles, 2]: the entries of which a query may see only some keys, which come first, and all
            entries, at least one: where nothing was chosen, token 0, by nobody. What lies behind is not initialised.
        queries: Queries of a tile; the last one may have fewer.
    """

    tokens: Tensor
    members: Tensor
    counts: Tensor
    queries: int


@triton.jit
def bitwise_or(a, b):
    return a | b


@Kernel
@triton.jit(do_not_specialize=["num_queries", "query_shift", "row_tiles", "width"])
def tile_lists_kernel(
    selected_blocks, tokens, members, counts, ids, positions, cu_seqlens, num_queries, query_shift, row_tiles,
    width, GROUPS: tl.constexpr, NUM_SELECTED: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
    QUERIES: tl.constexpr, PLACES: tl.constexpr, QUERIES_PAD: tl.constexpr,
):  # fmt: skip
    """The list of one tile: again and again the latest block that is left."""
    of_tile = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(0) % row_tiles
    batch_group = tl.program_id(0) // row_tiles
    batch = (batch_group // GROUPS).to(tl.int64)
    in_tile = tl.arange(0, QUERIES_PAD)
    query = tile * QUERIES + in_tile
    exists = (in_tile < QUERIES) & (query < num_queries)
    query = tl.where(exists, query, tile * QUERIES)
    _, position, document_start, _ = row_token(query, num_queries, query_shift, ids, positions, cu_seqlens, PACKED)
    place = tl.arange(0, PLACES)
    choice = selected_blocks + ((batch * num_queries + query) * GROUPS + batch_group % GROUPS) * NUM_SELECTED
    chosen = tl.load(choice[:, None] + place[None, :], mask=exists[:, None] & (place < NUM_SELECTED)[None, :], other=-1)
    visible = (chosen >= 0) & (chosen <= (position // BLOCK)[:, None])
    left = tl.where(visible, document_start[:, None] + chosen * BLOCK, -1)
    bit = (tl.full([QUERIES_PAD], 1, tl.int32) << in_tile)[:, None]
    first_token = tile * QUERIES + query_shift
    tokens += of_tile * width
    members += of_tile * width
    end = first_token * 0
    masked = end
    latest = tl.max(left)
    # Kernels load what they hold with the first entry: there is one.
    is_empty = latest < 0
    tl.store(tokens, 0, mask=is_empty)
    tl.store(members, 0, mask=is_empty)
    while latest >= 0:
        here = left == latest
        tl.store(tokens + end, latest)
        tl.store(members + end, tl.reduce(tl.where(here, bit, 0), None, bitwise_or))
        end += 1
        masked += (latest + (BLOCK - 1) > first_token).to(tl.int32)
        left = tl.where(here, -1, left)
        latest = tl.max(left)
    tl.store(counts + of_tile * 2, masked + is_empty.to(tl.int32))
    tl.store(counts + of_tile * 2 + 1, end + is_empty.to(tl.int32))


def build_tile_lists(
    selected_blocks: Tensor, block_size: int, num_keys: int, documents: Documents | None, queries: int
) -> TileLists:
    """The lists of tiles of `queries` queries from [B, T, G, N], without pads, repetitions and later blocks."""
    batch, num_queries, groups, num_selected = selected_blocks.shape
    row_tiles = cdiv(num_queries, queries)
    width = min(queries * num_selected, count_blocks(num_keys, block_size, documents))
    places, rows = next_power_of_2(num_selected), next_power_of_2(queries)
    tokens = selected_blocks.new_empty(batch, groups, row_tiles, width)
    members = selected_blocks.new_empty(batch, groups, row_tiles, width)
    counts = selected_blocks.new_empty(batch, groups, row_tiles, 2)
    ids, positions, cu_seqlens = default_documents(documents, counts)
    tile_lists_kernel[(row_tiles * batch * groups,)](
        selected_blocks, tokens, members, counts, ids, positions, cu_seqlens, num_queries, num_keys - num_queries,
        row_tiles, width, GROUPS=groups, NUM_SELECTED=num_selected, BLOCK=block_size, PACKED=documents is not None,
        QUERIES=queries, PLACES=places, QUERIES_PAD=rows,
        num_warps=max(1, min(8, rows * places // 512)),
    )  # fmt: skip
    return TileLists(tokens, members, counts, queries)
