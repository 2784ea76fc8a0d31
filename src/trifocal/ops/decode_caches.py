"""What decoding keeps of the past: tensors of one layer, and where each sequence lies in them.

Every token's keys and values lie in pages of `P` tokens, a multiple of the selection block. A block table names the
pages of each sequence, the same for all layers. A compressed block lies with its last token: block `i`, the tokens
`[i*d, i*d + l)`, is stripe `i + l/d - 1` of `d` tokens each. So a page is finished when its tokens are.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from trifocal.ops.geometry import Geometry

MOST_NEW_TOKENS = 8

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of all positions, [max_len, D/2] each, in the type of the rotation's arithmetic."""

Compress = Callable[[Tensor], Tensor]
"""A learned φ: the tokens of blocks, [N, l, G, *], to one key or value each, [N, G, *]."""


@dataclass(frozen=True)
class DecodeBatch:
    """The sequences of one step, the same for every layer; int32 on the device of the caches.

    Attributes:
        rows: The row of the rings that belongs to each sequence, [B].
        lengths: Tokens in the caches before this step, [B].
        num_new: New tokens of each sequence, 0 to T, [B]. 0 is a padding row: nothing is written, its output is zero.
        block_table: Page numbers, [B, most pages]. Entries past `lengths + num_new` tokens may be anything.
    """

    rows: Tensor
    lengths: Tensor
    num_new: Tensor
    block_table: Tensor


@dataclass(frozen=True)
class SparseCache:
    """The past of one sparse layer. Keys are rotated, but for `k_raw`.

    Attributes:
        k_slc, v_slc: Every token, in pages, [pages, G, P, D] and [pages, G, P, V].
        k_cmp: Compressed keys, in pages, [pages, G, P/d, D].
        v_cmp: Compressed values, [pages, G, P/d, V]; None where compressed keys only choose.
        k_win, v_win: Rings of the window's last tokens, token `t` at `t % R`, [rows, G, R, *], R at least w - 1 + T.
            None where the window reads `k_slc` and `v_slc`, or where there is none.
        k_raw, v_raw: Rings of unrotated keys and values for the next compressed blocks, [rows, G, R, *], R at least
            l - 1 + T. v_raw is None where v_cmp is.
    """

    k_slc: Tensor
    v_slc: Tensor
    k_cmp: Tensor
    v_cmp: Tensor | None
    k_win: Tensor | None
    v_win: Tensor | None
    k_raw: Tensor
    v_raw: Tensor | None


@dataclass(frozen=True)
class DenseCache:
    """The past of one dense layer: every token in pages, k [pages, G, P, D], rotated, and v [pages, G, P, V]."""

    k: Tensor
    v: Tensor


def check_batch(batch: DecodeBatch, num_sequences: int) -> None:
    """Raise ValueError unless the batch has so many sequences, in rows without gaps."""
    for name in ("rows", "lengths", "num_new"):
        given = getattr(batch, name)
        if given.shape != (num_sequences,):
            raise ValueError(f"{name} must have the shape [B] = [{num_sequences}], got {list(given.shape)}")
        if not given.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got a stride of {given.stride(0)}")
    table = batch.block_table
    if table.ndim != 2 or table.shape[0] != num_sequences:
        raise ValueError(f"block_table must have the shape [{num_sequences}, pages], got {list(table.shape)}")
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise ValueError(f"the rows of block_table must be contiguous, got a stride of {table.stride(1)}")


def check_new_tokens(x: Tensor) -> None:
    """Raise ValueError unless x [B, T, heads, *] has 1 to 8 tokens a sequence."""
    if x.ndim != 4 or not 1 <= x.shape[1] <= MOST_NEW_TOKENS:
        raise ValueError(f"a step takes [B, T, heads, *] with T from 1 to {MOST_NEW_TOKENS}, got {list(x.shape)}")


def check_cache(cache: SparseCache, geometry: Geometry, num_new: int) -> None:
    """Raise ValueError unless pages and rings fit the geometry and so many new tokens at a time."""
    page_size = cache.k_slc.shape[2]
    if page_size % geometry.selection_block_size:
        raise ValueError(
            f"a page must be a multiple of the selection block of {geometry.selection_block_size} tokens, "
            f"got {page_size}"
        )
    stripes = page_size // geometry.compression_stride
    for name in ("k_cmp", "v_cmp"):
        x = getattr(cache, name)
        if x is not None and x.shape[:3] != (*cache.k_slc.shape[:2], stripes):
            raise ValueError(
                f"{name} must have the shape [pages, G, P/d, *] = {[*cache.k_slc.shape[:2], stripes, '*']}, "
                f"got {list(x.shape)}"
            )
    for name, reach in (("win", geometry.window_size), ("raw", geometry.compression_block_size)):
        for x in (getattr(cache, f"k_{name}"), getattr(cache, f"v_{name}")):
            if x is not None and x.shape[2] < reach - 1 + num_new:
                raise ValueError(
                    f"k_{name} and v_{name} must be rings of at least {reach - 1 + num_new} tokens for {num_new} "
                    f"at a time, got {x.shape[2]}"
                )
    if (cache.v_cmp is None) != (cache.v_raw is None):
        raise ValueError("v_cmp and v_raw must both be given, or neither")
    if (cache.k_win is None) != (cache.v_win is None):
        raise ValueError("k_win and v_win must both be given, or neither")
