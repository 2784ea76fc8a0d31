"""FlashAttention in which query `t` sees the keys from `begin(t)` to `end(t)`: the compressed and the window branch.

Both ends never decrease along the sequence. So a tile of rows sees one range of keys, from its first row's begin to its
last row's end, and only the tiles at the ends of the range pay for a mask. A program of `forward` and of `d_q` holds a
tile of rows and loops over key tiles, one of `dkdv` a tile of keys and loops over the rows of the whole group.

Where the device has a tensor copy engine (TMA) and strides allow, a loop reads through it. Keys are [1, 1, keys,
columns] of [B, G, S, D]; rows are [1, 1, queries, heads, columns] of [B, G, T, R, D], if the heads of a group divide a
tile. Masked keys and values never reach a product: both ways load them as zeros.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.tiles import Widths
from trifocal.ops.triton.common import LOG2_E, LOG2_E_KERNEL, load_tile
from trifocal.ops.triton.launch import Descriptor, describe_tiles

# fmt: off

@triton.jit
def visible_keys(
    query, masks, COMPRESSED: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, PACKED: tl.constexpr
):
    """The keys that queries see, begin and end. `masks`: fields of `Branch`, from `query_shift` to `first_blocks`."""
    query_shift, window_size, ids, positions, first_blocks = masks
    token = query + query_shift
    if COMPRESSED:
        if PACKED:
            begin = tl.load(first_blocks + tl.load(ids + token))
            position = tl.load(positions + token)
        else:
            begin = token * 0
            position = token
        end = begin + tl.maximum(position + 1 - BLOCK + STRIDE, 0) // STRIDE
    else:
        begin = tl.maximum(token + 1 - window_size, 0)
        if PACKED:
            begin = tl.maximum(begin, token - tl.load(positions + token))
        end = token + 1
    return begin, end


@triton.jit
def seeing_queries(
    key, num_queries, masks,
    COMPRESSED: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, PACKED: tl.constexpr,
):
    """The queries that see keys, begin and end: the inverse of `visible_keys`, by `query_begin` and `query_end`."""
    query_shift, window_size, query_begin, query_end = masks
    if COMPRESSED:
        if PACKED:
            begin = tl.load(query_begin + key) - query_shift
            end = tl.load(query_end + key) - query_shift
        else:
            begin = key * STRIDE + (BLOCK - 1) - query_shift
            end = key * 0 + num_queries
    else:
        begin = key - query_shift
        end = begin + window_size
        if PACKED:
            end = tl.minimum(end, tl.load(query_end + tl.load(query_begin + key) + 1) - query_shift)
    begin = tl.minimum(tl.maximum(begin, 0), num_queries)
    return begin, tl.maximum(tl.minimum(end, num_queries), begin)


@triton.jit
def full_tiles(begin, end, full_begin, full_end, SIZE: tl.constexpr):
    """Cut a range into tiles: how many, and which of them, first to last, lie wholly in the full range."""
    tiles = tl.cdiv(end - begin, SIZE)
    first = tl.minimum(tl.cdiv(tl.maximum(full_begin - begin, 0), SIZE), tiles)
    last = tl.maximum(tl.minimum(tl.maximum(full_end - begin, 0) // SIZE, tiles), first)
    return tiles, first, last


@triton.jit
def place_rows(row, num_queries, Q_PER_KV: tl.constexpr):
    """Query and head of rows; rows behind the last query stand in for it."""
    query = row // Q_PER_KV
    return tl.minimum(query, num_queries - 1), row - query * Q_PER_KV


@triton.jit
def place_rows_of_program(
    num_queries, masks,
    GROUPS: tl.constexpr, Q_PER_KV: tl.constexpr, COMPRESSED: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    PACKED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):
    """This program's tile of rows, the keys that each sees, and the key tiles: all of them, and the first and number
    of those that every row sees. Tiles with the longest past start first, so that none is left over at the end."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch = tl.program_id(1) // GROUPS
    group = tl.program_id(1) % GROUPS
    first_query = first_row // Q_PER_KV
    last_query = tl.minimum((first_row + ROWS - 1) // Q_PER_KV, num_queries - 1)
    row = first_row + tl.arange(0, ROWS)
    query, head = place_rows(row, num_queries, Q_PER_KV)
    row_begin, row_end = visible_keys(query, masks, COMPRESSED, BLOCK, STRIDE, PACKED)
    begin, full_end = visible_keys(first_query, masks, COMPRESSED, BLOCK, STRIDE, PACKED)
    full_begin, end = visible_keys(last_query, masks, COMPRESSED, BLOCK, STRIDE, PACKED)
    tiles, first_full, last_full = full_tiles(begin, end, full_begin, full_end, KEYS)
    full = last_full - first_full
    return batch, group, first_query, row, query, head, row_begin, row_end, begin, end, tiles, first_full, full


@triton.jit
def load_keys(
    source, batch, group, first_key, stride, keep, FIRST: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr,
):
    """Load PART columns, from FIRST on, of a tile of keys. `source`: a descriptor, or a pointer to batch and group."""
    if TMA:
        tile = source.load([batch, group, first_key, FIRST]).reshape([KEYS, PART])
        if MASKED and PACKED:
            # Slots that no document fills.
            tile = tl.where(keep[:, None], tile, 0.0)
    else:
        base = source + first_key.to(tl.int64) * stride
        tile = load_tile(base, tl.arange(0, KEYS) * stride, keep, FIRST, PART, SIZE, MASKED)
    return tile


@triton.jit
def load_and_multiply_keys(
    held, sources, batch, group, first_key, stride, keep, SIZE: tl.constexpr, PART_1: tl.constexpr,
    PART_2: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr,
):
    """Products of held rows and of a tile of keys, [rows, keys], and the latter in two parts."""
    part_1 = load_keys(sources[0], batch, group, first_key, stride, keep, 0, PART_1, SIZE, KEYS, MASKED, PACKED, TMA)
    part_2 = part_1
    product = tl.dot(held[0], tl.trans(part_1), input_precision="ieee")
    if PART_2 > 0:
        part_2 = load_keys(
            sources[1], batch, group, first_key, stride, keep, PART_1, PART_2, SIZE, KEYS, MASKED, PACKED, TMA)
        product = tl.dot(held[1], tl.trans(part_2), product, input_precision="ieee")
    return product, (part_1, part_2)


@triton.jit
def load_rows(
    source, batch, group, first_query, query, head, time_stride, head_stride, FIRST: tl.constexpr, PART: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr,
):
    """Load PART columns, from FIRST on, of a tile of rows. `source` as in `load_keys`."""
    if TMA:
        tile = source.load([batch, group, first_query, 0, FIRST]).reshape([ROWS, PART])
    else:
        base = source + first_query.to(tl.int64) * time_stride
        offsets = (query - first_query) * time_stride + head * head_stride
        tile = load_tile(base, offsets, query >= 0, FIRST, PART, SIZE, False)
    return tile


@triton.jit
def log2_sum(pointers):
    """Log-sum-exp in base 2; +inf where nothing is seen, so that every probability of the row comes out as 0."""
    lse = tl.load(pointers)
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E_KERNEL)

# fmt: on


class Branch(NamedTuple):
    """Which interval of keys a query sees: by `window_size`, or by the compressed branch's `block` and `stride`.

    `query_shift` is the token of query 0; for the window, its place among the keys given. Documents have `ids` and
    `positions`, and the compressed branch the `first_blocks` of each. In backward it has the range of tokens that see
    each key, `query_begin` and `query_end`, [keys]; the window has the document of each key there, and `cu_seqlens`.
    """

    window_size: int = 0
    block: int = 0
    stride: int = 0
    query_shift: int = 0
    ids: Tensor | None = None
    positions: Tensor | None = None
    first_blocks: Tensor | None = None
    query_begin: Tensor | None = None
    query_end: Tensor | None = None

    @property
    def is_window(self) -> bool:
        """Whether this is the window branch."""
        return self.window_size > 0

    @property
    def is_packed(self) -> bool:
        """Whether documents are packed."""
        return self.ids is not None

    def constants(self) -> dict[str, int | bool]:
        """Compile-time constants of the kernels."""
        return {"COMPRESSED": not self.is_window, "BLOCK": self.block, "STRIDE": self.stride, "PACKED": self.is_packed}


class IntervalProblem(NamedTuple):
    """Inputs of backward: d_o of the output or, with a gate, of the mixture; q, k and v; of the rows, [B, T, H], the
    gate, and lse and delta (`sum(d_o * o)`, less the gradient of lse), fp32, contiguous.
    """

    d_o: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    delta: Tensor
    gate: Tensor | None
    scale: float
    branch: Branch

    @property
    def q_per_kv(self) -> int:
        """Heads of a group."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def score_scale(self) -> float:
        """Factor on the scores in base 2."""
        return self.scale * LOG2_E

    @property
    def gate_strides(self) -> tuple[int, ...]:
        """Strides of batch, position and head."""
        return (0, 0, 0) if self.gate is None else self.gate.stride()

    def constants(self) -> dict[str, int | bool]:
        """Compile-time constants of the kernels."""
        return {**self.branch.constants(), "GATED": self.gate is not None}


def key_sources(x: Tensor, widths: Widths, keys: int, tma: bool) -> tuple[Tensor | Descriptor | None, ...]:
    """Where the two parts of a tile of keys come from: x [B, S, G, D] itself, or descriptors of it."""
    if not tma:
        return x, x
    batch, length, groups, _ = x.shape
    batch_stride, time_stride, head_stride, _ = x.stride()
    shape, strides = (batch, groups, length, widths.size), (batch_stride, head_stride, time_stride, 1)
    return _descriptors(x, shape, strides, (1, 1, keys), widths)


def row_sources(x: Tensor, widths: Widths, rows: int, groups: int, tma: bool) -> tuple[Tensor | Descriptor | None, ...]:
    """Where the two parts of a tile of rows come from: x [B, T, H, D] itself, or descriptors of it."""
    if not tma:
        return x, x
    batch, length, heads, _ = x.shape
    q_per_kv = heads // groups
    batch_stride, time_stride, head_stride, _ = x.stride()
    shape = (batch, groups, length, q_per_kv, widths.size)
    strides = (batch_stride, q_per_kv * head_stride, time_stride, head_stride, 1)
    return _descriptors(x, shape, strides, (1, 1, rows // q_per_kv, q_per_kv), widths)


def _descriptors(
    x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], tile: tuple[int, ...], widths: Widths
) -> tuple[Descriptor | None, ...]:
    first = describe_tiles(x, shape, strides, (*tile, widths.part_1))
    second = describe_tiles(x, shape, strides, (*tile, widths.part_2)) if widths.part_2 else None
    return first, second
