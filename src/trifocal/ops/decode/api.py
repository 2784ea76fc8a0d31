"""Decoding: append new tokens to a layer's caches, and attend from them to everything before.

One to eight new tokens a sequence, each sequence with its own length. No call looks at the device's data, and
shapes do not depend on it, so that a whole step can be recorded once and replayed while sequences grow. The result of
a sequence does not depend on the others of its batch.
"""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from trifocal.ops.decode import reference
from trifocal.ops.decode.caches import (
    DecodeBatch,
    DenseCache,
    Index,
    LearnedCompressor,
    NewRows,
    Place,
    Rotary,
    SparseCache,
    WindowCache,
    check_batch,
    check_cache,
    check_chunk,
    check_compressors,
    check_index,
    check_new,
    check_queries,
    check_rotary,
    check_window,
    chunk_keys,
)
from trifocal.ops.dispatch import resolve
from trifocal.ops.geometry import Geometry
from trifocal.ops.validation import check_beside, check_geometry, check_rank, check_type, resolve_scale

_resolve = functools.partial(resolve, decoding=True)


def append_sparse(
    cache: SparseCache,
    batch: DecodeBatch,
    k_raw: Tensor | None,
    v_raw: Tensor | None,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor | None,
    v_win: Tensor | None,
    geometry: Geometry,
    rotary: Rotary,
    compress: tuple[LearnedCompressor, LearnedCompressor | None] | None = None,
    backend: str = "auto",
    index: Index | None = None,
) -> Tensor | None:
    """Write the new tokens' keys and values into a sparse layer's caches, and the compressed blocks that they end; and
    score blocks where an index chooses.

    Args:
        cache: The layer's caches; written in place.
        batch: Where the sequences lie; the caches hold `lengths + num_new` tokens afterwards.
        k_raw, v_raw: Keys and values of the compressed branch, [B, T, G, D] and [B, T, G, V]; None where the cache has
            none. No key is rotated yet.
        k_slc, v_slc: Keys and values of the selected branch.
        k_win, v_win: Keys and values of the window; None where the cache has no rings for it.
        rotary: Tables of all positions. Compressed keys are rotated by the position of their first token.
        compress: The learned φ of keys and of values, None for values that the cache does not compress; the mean of
            both where not given.
        index: Queries and keys of the index, and their tables; None where the cache has no index keys.
        geometry, backend: See `trifocal.ops`.

    Returns:
        Scores of blocks, [B, T, G, *], which `decode_attention` takes; None without an index, or if all blocks are
        taken.

    Raises:
        ValueError: If an argument does not fit; see `trifocal.ops`.

    Not differentiable.
    """
    check_geometry(geometry)
    check_batch(batch, "k_slc", k_slc)
    check_cache(cache, geometry, k_slc.shape[1])
    check_rotary(rotary, k_slc)
    for name, x in (("v_slc", v_slc), ("k_raw", k_raw), ("v_raw", v_raw), ("k_win", k_win), ("v_win", v_win)):
        if (x is None) != (getattr(cache, name) is None):
            raise ValueError(f"{name} must be given where the cache has it, and only there")
    check_new(
        k_slc, cache.k_slc, cache.v_slc,
        k_raw=k_raw, v_raw=v_raw, k_slc=k_slc, v_slc=v_slc, k_win=k_win, v_win=v_win,
    )  # fmt: skip
    check_index(index, cache.k_idx, [*k_slc.shape[:3]])
    check_compressors(compress, cache, geometry)
    new = (k_raw, v_raw, k_slc, v_slc, k_win, v_win)
    if _resolve("append_sparse", backend, k_slc, v_slc, geometry) == "triton":
        from trifocal.ops.decode.triton import append as kernels

        with torch.cuda.device_of(k_slc):
            return kernels.append_sparse(cache, batch, new, geometry, rotary, compress, index)
    return reference.append_sparse(cache, batch, new, geometry, rotary, compress, index)


def append_dense(
    cache: DenseCache | WindowCache, batch: DecodeBatch, k: Tensor, v: Tensor, rotary: Rotary, backend: str = "auto"
) -> None:
    """Write the new tokens' keys, [B, T, G, D], which are rotated here, and values, [B, T, G, V], into the cache of a
    dense or a window layer.

    Arguments as in `append_sparse`.
    """
    check_type("cache", cache, DenseCache, WindowCache)
    check_batch(batch, "k", k)
    check_rank("v", v, "[B, T, G, V]")
    check_rotary(rotary, k)
    check_new(k, *vars(cache).values(), k=k, v=v)
    if _resolve("append_dense", backend, k, v, None) == "triton":
        from trifocal.ops.decode.triton import append as kernels

        with torch.cuda.device_of(k):
            kernels.append_dense(cache, batch, k, v, rotary)
    else:
        reference.append_dense(cache, batch, k, v, rotary)


def append_chunk(
    rows: Mapping[str, NewRows], place: Place, first: int, *, zero: int = 0, stride: int = 1, backend: str = "auto"
) -> dict[str, Tensor]:
    """Rotate the rows of a prompt's chunk, by name as a layer has them, write them into pages, and join what is read of
    the past with them: rows `begin` up to the last new one, by the same names, [1, S, heads, width].

    `first` is the number of the first new row in the sequence, `zero` that of the row at position 0, `stride` positions
    from one row to the next. Rings are left as they are until every layer has seen the chunk: what they are to hold
    then goes into `ring_end`. Shapes depend only on `first` and on the number of rows. Not differentiable.
    """
    check_chunk(rows, place, first, zero, stride)
    keys = chunk_keys(rows)
    x = rows[keys].x
    if _resolve("append_chunk", backend, x, rows.get(f"v{keys[1:]}", rows[keys]).x, None) == "triton":
        from trifocal.ops.decode.triton import append_chunk as kernels

        with torch.cuda.device_of(x):
            return kernels.append_chunk(rows, place, first, zero, stride)
    return {name: reference.append_rows(new, place, first, zero, stride) for name, new in rows.items()}


def decode_attention(
    q: Tensor,
    gates: Tensor | None,
    cache: SparseCache,
    batch: DecodeBatch,
    geometry: Geometry,
    rotary: Rotary,
    *,
    window: bool,
    scale: float | None = None,
    backend: str = "auto",
    scores: Tensor | None = None,
) -> Tensor:
    """Native Sparse Attention of new tokens that `append_sparse` has put into the caches.

    Args:
        q: Queries, [B, T, H, D], not rotated yet; query `t` is at position `lengths + t`.
        gates: Weights of the branches in the order cmp, slc, win, [B, T, H, 3]. None: only the selected branch.
        cache: The layer's caches.
        batch: The same batch that `append_sparse` got.
        rotary: Tables of all positions.
        window: Whether there is a window branch.
        scores: What `append_sparse` returned.
        geometry, scale, backend: See `trifocal.ops`.

    Returns:
        o, [B, T, H, V], in the type of q; zero where a sequence has no such token.

    Raises:
        ValueError: If an argument does not fit; see `trifocal.ops`.

    Not differentiable. Source: arXiv:2502.11089, Eq. 5 to 11.
    """
    check_geometry(geometry)
    check_batch(batch, "q", q)
    check_cache(cache, geometry, q.shape[1])
    check_queries(q, cache.k_slc)
    check_rotary(rotary, q)
    if scores is None and cache.k_idx is not None and not batch.takes_all:
        raise ValueError("scores must be given where the cache has k_idx, as append_sparse returned them")
    if gates is None and window:
        raise ValueError("a window branch needs gates")
    if gates is not None and cache.v_cmp is None:
        raise ValueError("gates need the compressed values, and the cache has none")
    if gates is not None:
        check_beside("gates", gates, "[B, T, H, 3]", (*q.shape[:3], 3), q)
    scale = resolve_scale(scale, q)
    if _resolve("decode_attention", backend, q, cache.v_slc.transpose(1, 2), geometry, scale) == "triton":
        from trifocal.ops.decode.triton import attention as kernels

        with torch.cuda.device_of(q):
            return kernels.decode_attention(q, gates, cache, batch, geometry, rotary, window, scale, scores)
    return reference.decode_attention(q, gates, cache, batch, geometry, rotary, window, scale, scores)


def decode_dense_attention(
    q: Tensor,
    cache: DenseCache | WindowCache,
    batch: DecodeBatch,
    rotary: Rotary,
    *,
    window_size: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Full attention of new tokens that `append_dense` has put into the cache; as `decode_attention`.

    With a `WindowCache`, attention to the last `window_size` tokens, the query's own included.
    """
    check_batch(batch, "q", q)
    check_window(cache, window_size, q.shape[1])
    keys, values = vars(cache).values()
    check_queries(q, keys)
    check_rotary(rotary, q)
    scale = resolve_scale(scale, q)
    if _resolve("decode_dense_attention", backend, q, values.transpose(1, 2), None, scale) == "triton":
        from trifocal.ops.decode.triton import attention as kernels

        with torch.cuda.device_of(q):
            return kernels.decode_dense_attention(q, cache, batch, rotary, window_size, scale)
    return reference.decode_dense_attention(q, cache, batch, rotary, window_size, scale)
