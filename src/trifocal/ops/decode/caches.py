"""What decoding keeps of the past: tensors of one layer, and where each sequence lies in them.

Every token's keys and values lie in pages of `P` tokens, a multiple of the selection block. A block table names the
pages of each sequence, the same for all layers. A compressed block lies with its last token: block `i`, the tokens
`[i*d, i*d + l)`, is slot `i + l/d - 1` of `d` tokens each. So a page is finished when its tokens are. What is read of
only the last tokens, as by a window, lies in rings, a row for each sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trifocal.ops.geometry import LARGEST_SIZE, Geometry
from trifocal.ops.validation import (
    check_beside,
    check_contiguous,
    check_rank,
    check_same_kind,
    check_type,
    check_whole_number,
)

MAX_NEW_TOKENS = 8

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of all positions, [max_len, D/2] each, contiguous, in the type of the rotation's arithmetic."""


class Index(NamedTuple):
    """New index queries [B, T, G, Di] and keys [B, T, Di], not rotated yet, and rotary tables of their width."""

    q: Tensor
    k: Tensor
    rotary: Rotary


@dataclass(frozen=True)
class DecodeBatch:
    """The sequences of one step, the same for every layer; int32 on the device of the caches.

    Attributes:
        rows: The row of the rings that belongs to each sequence, [B].
        lengths: Tokens in the caches before this step, [B].
        num_new: New tokens of each sequence, 0 to T, [B]. 0 is a padding row: nothing is written, its output is zero.
        block_table: Page numbers, [B, most pages]. Entries past `lengths + num_new` tokens may be anything.
        takes_all: No sequence has more than n selection blocks afterwards: all are chosen, and nothing chooses.
        ends_block: Some new token may be the last one of a compressed block; where none is, nothing is compressed.
            The host says both, since a recorded step cannot look at the lengths; the defaults hold for any batch.
    """

    rows: Tensor
    lengths: Tensor
    num_new: Tensor
    block_table: Tensor
    takes_all: bool = False
    ends_block: bool = True


class LearnedCompressor(NamedTuple):
    """The weights of `nn.MLPCompressor`, contiguous, in the type of what it compresses: positions [l, D], W1 [hidden,
    l * D] and W2 [D, hidden]; for values V stands for D.
    """

    positions: Tensor
    up: Tensor
    down: Tensor


class Place(NamedTuple):
    """Where a chunk of a prompt lies, int64 on the device: its row of the rings [1], its tokens without padding [1],
    and contiguous pages of its past and itself [pages]; padding may lie in one that nobody reads.
    """

    row: Tensor
    num_new: Tensor
    pages: Tensor


class NewRows(NamedTuple):
    """Rows of a chunk, of queries, keys or values: how they are rotated, where they are kept, what is read with them.

    Attributes:
        x: [1, n, heads, width], not rotated yet.
        begin: The first row of the sequence that attention reads with them.
        rotary: Tables of all positions; None: they are not rotated.
        pages: Where they are kept, [pages, heads, rows, width], contiguous; None for queries and rings.
        ring: Where their last ones are kept, [rows, heads, R, width], each row contiguous; only read here.
        ring_end: Gets what the ring's row is to hold once the chunk is over, [1, heads, R, width], contiguous.
    """

    x: Tensor
    begin: int
    rotary: Rotary | None = None
    pages: Tensor | None = None
    ring: Tensor | None = None
    ring_end: Tensor | None = None


@dataclass(frozen=True)
class SparseCache:
    """The past of one sparse layer. Keys are rotated, but for `k_raw`. Strides may be any but the last, which is 1.

    Attributes:
        k_slc, v_slc: Every token, in pages, [pages, G, P, D] and [pages, G, P, V].
        k_cmp: Compressed keys, in pages, [pages, G, P/d, D]; None without compressed attention where an index chooses.
        v_cmp: Compressed values, [pages, G, P/d, V]; None where compressed keys only choose.
        k_win, v_win: Rings of the window's last tokens, token `t` at `t % R`, [rows, G, R, *], R at least w - 1 + T.
            None where the window reads `k_slc` and `v_slc`, or where there is none.
        k_raw, v_raw: Rings of unrotated keys and values for the next compressed blocks, [rows, G, R, *], R at least
            l - 1 + T. They are None where k_cmp and v_cmp are.
        k_idx: Index keys, in pages, [pages, 1, P, Di]; None where compressed keys choose.
    """

    k_slc: Tensor
    v_slc: Tensor
    k_cmp: Tensor | None = None
    v_cmp: Tensor | None = None
    k_win: Tensor | None = None
    v_win: Tensor | None = None
    k_raw: Tensor | None = None
    v_raw: Tensor | None = None
    k_idx: Tensor | None = None

    def __post_init__(self) -> None:
        for kind in ("slc", "cmp", "win", "raw"):
            k, v = (getattr(self, f"{letter}_{kind}") for letter in "kv")
            _check_tensors(f"k_{kind}", k, f"v_{kind}", v, self.k_slc, self.v_slc)
        for one, other in (("k_cmp", "k_raw"), ("v_cmp", "v_raw"), ("k_win", "v_win")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"{one} and {other} must both be given, or neither")
        if self.k_cmp is None and (self.k_idx is None or self.v_cmp is not None):
            raise ValueError("k_cmp must be given, but for a cache without v_cmp whose k_idx chooses the blocks")
        if self.k_idx is None:
            return
        expected = (self.k_slc.shape[0], 1, self.k_slc.shape[2])
        if self.k_idx.shape[:3] != expected or self.k_idx.ndim != 4 or self.k_idx.stride(3) != 1:
            raise ValueError(
                f"k_idx must have the shape [pages, 1, P, Di] = {[*expected, '*']} and be contiguous in its last "
                f"dimension, got {list(self.k_idx.shape)} with strides {list(self.k_idx.stride())}"
            )


@dataclass(frozen=True)
class DenseCache:
    """The past of one dense layer: every token in pages, k [pages, G, P, D], rotated, and v [pages, G, P, V]."""

    k: Tensor
    v: Tensor

    def __post_init__(self) -> None:
        _check_tensors("k", self.k, "v", self.v, self.k, self.v)


@dataclass(frozen=True)
class WindowCache:
    """The past of one window layer: rings of its last tokens, token `t` at `t % R`.

    k_win [rows, G, R, D], rotated, and v_win [rows, G, R, V], R at least w - 1 + T.
    """

    k_win: Tensor
    v_win: Tensor

    def __post_init__(self) -> None:
        _check_tensors("k_win", self.k_win, "v_win", self.v_win, self.k_win, self.v_win)


def _check_tensors(
    k_name: str, k: Tensor | None, v_name: str, v: Tensor | None, k_pages: Tensor, v_pages: Tensor
) -> None:
    """Raise ValueError unless a cache's keys and values [*, G, tokens, *] fit one another and the pages, in any strides
    but the last: when it is made, not at every step.
    """
    for name, x, pages in ((k_name, k, k_pages), (v_name, v, v_pages)):
        if x is None:
            continue
        shape, *_, stride = x.shape, *x.stride()
        if len(shape) != 4 or shape[1] != k_pages.shape[1] or shape[3] != pages.shape[3]:
            expected = ["*", k_pages.shape[1], "*", pages.shape[-1]]
            raise ValueError(f"{name} must have the shape [*, G, tokens, width] = {expected}, got {list(shape)}")
        if stride != 1 and shape[3] > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got a stride of {stride}")
    if k is not None and v is not None and k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{k_name} and {v_name} must have the same pages or rows, groups and tokens, "
            f"got {list(k.shape)} and {list(v.shape)}"
        )


def check_batch(batch: DecodeBatch, name: str, x: Tensor) -> None:
    """Raise ValueError unless x [B, T, heads, width], the caller's `name`, has 1 to 8 tokens for each sequence of the
    batch, whose tensors are of int32, in rows without gaps that lie apart.
    """
    check_type("batch", batch, DecodeBatch)
    check_rank(name, x, "[B, T, heads, width]")
    if 0 in x.shape or x.shape[1] > MAX_NEW_TOKENS:
        raise ValueError(
            f"a step takes {name} [B, T, heads, width] with T from 1 to {MAX_NEW_TOKENS} and no empty dimension, "
            f"got {list(x.shape)}"
        )
    sizes = (x.shape[0],)
    for field in ("rows", "lengths", "num_new"):
        given = getattr(batch, field)
        check_beside(field, given, "[B]", sizes, x, (torch.int32,))
        if not given.is_contiguous():
            raise ValueError(f"{field} must be contiguous, got a stride of {given.stride(0)}")
    table = batch.block_table
    check_beside("block_table", table, "[B, pages]", sizes, x, (torch.int32,))
    strides = table.stride()
    if not table.is_contiguous() and (strides[1] != 1 or strides[0] < table.shape[1]):
        raise ValueError(f"the rows of block_table must be contiguous and lie apart, got strides {list(strides)}")


def check_window(cache: DenseCache | WindowCache, window_size: int | None, num_new: int) -> None:
    """Raise ValueError unless a window comes with rings, and these hold it beside `num_new` new tokens at a time."""
    check_type("cache", cache, DenseCache, WindowCache)
    if (window_size is None) != isinstance(cache, DenseCache):
        raise ValueError("a window_size must be given with a WindowCache, and only there")
    if window_size is not None:
        check_whole_number("window_size", window_size, 1, LARGEST_SIZE)
        check_rings(cache, "win", window_size, num_new)


def check_rings(cache: object, kind: str, reach: int, num_new: int) -> None:
    """Raise ValueError unless rings k_* and v_*, if any, hold `reach` tokens and new ones behind the first."""
    ring = getattr(cache, f"k_{kind}")
    if ring is not None and ring.shape[2] < reach - 1 + num_new:
        raise ValueError(
            f"k_{kind} and v_{kind} must be rings of at least {reach - 1 + num_new} tokens for {num_new} "
            f"at a time, got {ring.shape[2]}"
        )


def check_rotary(rotary: Rotary, x: Tensor) -> None:
    """Raise ValueError unless the tables fit x [..., D], each without gaps."""
    if not isinstance(rotary, tuple | list) or len(rotary) != 2:
        raise ValueError(f"rotary must be two tables, cosines and sines [max_len, D/2], got {type(rotary).__name__}")
    half = x.shape[-1] // 2
    for name, table in zip(("cosines", "sines"), rotary, strict=True):
        check_beside(name, table, "[max_len, D/2]", (), x)
        if table.shape[1] != half:
            raise ValueError(f"{name} must have the shape [max_len, D/2] = ['*', {half}], got {list(table.shape)}")
    check_contiguous(cosines=rotary[0], sines=rotary[1])


def check_new(first: Tensor, k_held: Tensor, v_held: Tensor, **new: Tensor | None) -> None:
    """Raise ValueError unless new keys, named `k...`, and values fit the first keys [B, T, ...] and the cache's."""
    batch, num_new, *_ = first.shape
    _, groups, _, dim = k_held.shape
    k_shape, v_shape = (batch, num_new, groups, dim), (batch, num_new, groups, v_held.shape[3])
    for name, x in new.items():
        if x is not None:
            check_beside(name, x, "[B, T, G, width]", k_shape if name[0] == "k" else v_shape, k_held)


def check_index(index: Index | None, k_idx: Tensor | None, new: list[int]) -> None:
    """Raise ValueError unless there is an index where the cache has its keys, of new tokens [B, T, G]."""
    if (index is None) != (k_idx is None):
        raise ValueError("an index must be given where the cache has k_idx, and only there")
    if index is None or k_idx is None:
        return
    width, dtype = k_idx.shape[3], k_idx.dtype
    for name, x, expected in (("q", index.q, [*new, width]), ("k", index.k, [*new[:2], width])):
        if [*x.shape] != expected or x.dtype != dtype:
            raise ValueError(f"{name} of an index must be {expected} of {dtype}, got {[*x.shape]} of {x.dtype}")
    check_rotary(index.rotary, index.k)


def chunk_keys(rows: Mapping[str, NewRows]) -> str:
    """The name of a chunk's keys: k, or k_win in a window layer, which has no others."""
    return "k_win" if "k_win" in rows and "k" not in rows else "k"


def check_chunk(rows: Mapping[str, NewRows], place: Place, first: int, zero: int, stride: int) -> None:
    """Raise ValueError unless tables, pages and rings reach as far as a chunk's rows; nothing looks at the device."""
    for name, new in rows.items():
        last = first + new.x.shape[1] - 1
        if new.rotary is not None and (last - zero) * stride >= len(new.rotary[0]):
            raise ValueError(
                f"the tables of {name} must reach to position {(last - zero) * stride}, got {len(new.rotary[0])}"
            )
        if new.pages is not None and last >= place.pages.shape[0] * new.pages.shape[2]:
            raise ValueError(f"the pages of {name} must hold {last + 1} rows, got {place.pages.shape[0]} pages")
        if new.ring is not None and new.begin < first - new.ring.shape[2]:
            raise ValueError(f"{name} may begin at {first - new.ring.shape[2]}, as its ring reaches, got {new.begin}")


def check_compressors(
    compress: tuple[LearnedCompressor, LearnedCompressor | None] | None, cache: SparseCache, geometry: Geometry
) -> None:
    """Raise ValueError unless a learned φ fits the keys and the values that the cache compresses."""
    if compress is None:
        return
    for name, phi, ring in zip(("keys", "values"), compress, (cache.k_raw, cache.v_raw), strict=True):
        if (phi is None) != (ring is None):
            raise ValueError(f"a learned φ of {name} must be given where the cache compresses them, and only there")
        if phi is None or ring is None:
            continue
        length, width = geometry.compression_block_size, ring.shape[3]
        hidden = phi.up.shape[0]
        expected = {"positions": (length, width), "up": (hidden, length * width), "down": (width, hidden)}
        for part, shape in expected.items():
            weight = getattr(phi, part)
            if weight.shape != shape or not weight.is_contiguous():
                raise ValueError(
                    f"{part} of the φ of {name} must be contiguous, of shape {list(shape)}, "
                    f"got {list(weight.shape)} with strides {list(weight.stride())}"
                )


def check_queries(q: Tensor, keys: Tensor) -> None:
    """Raise ValueError unless q [B, T, H, D] can read keys [pages, G, P, D]."""
    check_same_kind("q", q, keys, of="the cache")
    groups, dim = keys.shape[1], keys.shape[3]
    if q.shape[3] != dim or q.shape[2] % groups:
        raise ValueError(
            f"q [B, T, H, D] must have D = {dim} and a multiple of the cache's {groups} groups for H, "
            f"got {list(q.shape)}"
        )


def check_cache(cache: SparseCache, geometry: Geometry, num_new: int) -> None:
    """Raise ValueError unless pages and rings fit the geometry and `num_new` new tokens at a time."""
    check_type("cache", cache, SparseCache)
    page_size = cache.k_slc.shape[2]
    if page_size % geometry.selection_block_size:
        raise ValueError(
            f"a page must be a multiple of the selection block of {geometry.selection_block_size} tokens, "
            f"got {page_size}"
        )
    slots = page_size // geometry.compression_stride
    if cache.k_cmp is not None and cache.k_cmp.shape[:3] != (*cache.k_slc.shape[:2], slots):
        raise ValueError(
            f"k_cmp must have the shape [pages, G, P/d, *] = {[*cache.k_slc.shape[:2], slots, '*']}, "
            f"got {list(cache.k_cmp.shape)}"
        )
    check_rings(cache, "win", geometry.window_size, num_new)
    check_rings(cache, "raw", geometry.compression_block_size, num_new)
