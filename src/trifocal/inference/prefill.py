"""A chunk of one sequence's prompt: it is written into the caches, and what its queries see is gathered from them.

The first chunk sees only itself: its keys and values go into attention as they are, as in training. The rings keep
their tokens until a chunk has gone through every layer: one that fails half-way leaves a sequence as it was, since
pages are never read behind its length.

What depends on the sequence is on the device, and shapes depend only on where the chunk begins and on its length, so
that a chunk can be recorded as a CUDA graph. Its last tokens may be padding: no token in front of them sees them, and
they reach no ring.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trifocal.nn.attention import dense_attention
from trifocal.nn.attention_base import Projected, RotaryTables
from trifocal.ops import DenseCache, Geometry, SparseCache, WindowCache
from trifocal.ops.decode.api import append_chunk
from trifocal.ops.decode.caches import NewRows, Place, Rotary

Compress = Callable[[Tensor], Tensor]
"""φ of the keys or values of a sequence, [1, S, G, *] -> [1, C, G, *]."""


class Chunk:
    """A chunk of one sequence: `length` tokens, padding included, from position `first`."""

    def __init__(self, place: Place, first: int, length: int) -> None:
        self._place, self.first, self.stop = place, first, first + length
        # By memory of rings: all its rows, [rows, *], and what the sequence's row gets from the chunk, [1, *].
        self._ends: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def append(
        self, rows: Mapping[str, NewRows], backend: str, *, first: int | None = None, zero: int = 0, stride: int = 1
    ) -> dict[str, Tensor]:
        """`ops.decode.api.append_chunk` of tokens, or of other rows from `first` on."""
        first = self.first if first is None else first
        return append_chunk(rows, self._place, first, zero=zero, stride=stride, backend=backend)

    def in_ring(self, x: Tensor, ring: Tensor, past: int, rotary: Rotary | None = None) -> NewRows:
        """The chunk's rows of a ring [rows, G, R, *], read with `past` before them; `write_rings` writes them."""
        # Rings whose rows lie side by side in one memory are written together.
        width, offset = ring.stride(0), ring.storage_offset()
        key = ring.untyped_storage().data_ptr(), offset // width
        if key not in self._ends:
            whole = ring.as_strided((ring.shape[0], width), (width, 1), offset // width * width)
            self._ends[key] = whole, torch.empty_like(whole[:1])
        end = self._ends[key][1].as_strided((1, *ring.shape[1:]), ring.stride(), offset % width)
        return NewRows(x, self.first - past, rotary, ring=ring, ring_end=end)

    def last(self, x: Tensor) -> Tensor:
        """The row of the chunk's last token that is no padding, [T, *] -> [1, *]."""
        return x.index_select(0, self._place.num_new - 1)

    def write_rings(self) -> None:
        """Write what `append` has put aside, once every layer has seen the chunk."""
        for rings, end in self._ends.values():
            rings.index_copy_(0, self._place.row, end)
        self._ends.clear()


class Seen(NamedTuple):
    """What the queries of a chunk see, as `nsa_attention` takes it; k_cmp, v_cmp are None where the cache has none."""

    k_cmp: Tensor | None
    v_cmp: Tensor | None
    k_slc: Tensor
    v_slc: Tensor
    k_win: Tensor
    v_win: Tensor


def append_dense_chunk(
    new: Projected, cache: DenseCache, chunk: Chunk, rotary: Rotary, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Append a chunk to the cache of a dense layer; rotated queries, and keys and values of all tokens so far."""
    rows = {
        "q": NewRows(new.q, chunk.first, rotary),
        "k": NewRows(new.keys[0], 0, rotary, cache.k),
        "v": NewRows(new.values[0], 0, None, cache.v),
    }
    seen = chunk.append(rows, backend)
    return seen["q"], seen["k"], seen["v"]


def append_window_chunk(
    new: Projected, cache: WindowCache, chunk: Chunk, window_size: int, rotary: Rotary, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """As `append_dense_chunk`, for a window layer; keys and values of the chunk and of the window before it."""
    past = min(chunk.first, window_size - 1)
    rows = {
        "q": NewRows(new.q, chunk.first, rotary),
        "k_win": chunk.in_ring(new.keys[0], cache.k_win, past, rotary),
        "v_win": chunk.in_ring(new.values[0], cache.v_win, past),
    }
    seen = chunk.append(rows, backend)
    return seen["q"], seen["k_win"], seen["v_win"]


def append_sparse_chunk(
    new: Projected,
    cache: SparseCache,
    chunk: Chunk,
    geometry: Geometry,
    compress: tuple[Compress, Compress],
    tables: RotaryTables,
    backend: str,
) -> tuple[Tensor, Seen, tuple[Tensor, Tensor] | None]:
    """Append a chunk to a sparse layer's caches: rotated queries, what they see, and the index's, or None."""
    stride, rotary = geometry.compression_stride, tables.tokens
    before, after = geometry.num_compressed_blocks(chunk.first), geometry.num_compressed_blocks(chunk.stop)
    past = min(chunk.first, geometry.window_size - 1)
    k_slc, v_slc = new.selected
    rows = {
        "q": NewRows(new.q, chunk.first, rotary),
        "k": NewRows(k_slc, 0, rotary, cache.k_slc),
        "v": NewRows(v_slc, 0, None, cache.v_slc),
    }
    rings = (
        ("k_win", new.keys[-1], cache.k_win, past, rotary),
        ("v_win", new.values[-1], cache.v_win, past, None),
        # From the start of the first block that is not compressed yet.
        ("k_raw", new.keys[0], cache.k_raw, chunk.first - before * stride, None),
        ("v_raw", new.values[0], cache.v_raw, chunk.first - before * stride, None),
    )
    for name, x, ring, reach, rotation in rings:
        if ring is not None:
            rows[name] = chunk.in_ring(x, ring, reach, rotation)
    if new.index is not None:
        q_idx, k_idx = new.index
        rows["q_idx"] = NewRows(q_idx, chunk.first, tables.index_tokens)
        rows["k_idx"] = NewRows(k_idx[:, :, None], 0, tables.index_tokens, cache.k_idx)
    seen = chunk.append(rows, backend)

    slot_of_first, blocks = geometry.compression_block_size // stride - 1, {}
    compressed = (("k", cache.k_cmp, compress[0], rotary), ("v", cache.v_cmp, compress[1], None))
    for name, pages, phi, rotation in compressed:
        if pages is not None:
            stretch = seen[f"{name}_raw"]
            compressed_rows = phi(stretch) if after > before else stretch[:, :0]
            blocks[name] = NewRows(compressed_rows, slot_of_first, rotation, pages)
    blocks_seen: dict[str, Tensor] = {}
    if blocks:
        blocks_seen = chunk.append(blocks, backend, first=before + slot_of_first, zero=slot_of_first, stride=stride)
    k_win, v_win = (seen.get(f"{name}_win", seen[name][:, chunk.first - past :]) for name in "kv")
    found = Seen(blocks_seen.get("k"), blocks_seen.get("v"), seen["k"], seen["v"], k_win, v_win)
    return seen["q"], found, (seen["q_idx"], seen["k_idx"][:, :, 0]) if "q_idx" in seen else None


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention of the last T positions over S: q [1, T, H, D], k [1, S, G, D], v [1, S, G, V]."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    if num_queries == num_keys:
        return dense_attention(q, k, v)
    q_per_kv = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.repeat_interleave(q_per_kv, dim=2).transpose(1, 2) for x in (k, v))
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] == v.shape[3] and q.shape[3] % 8 == 0:
        # `is_causal` of the public function aligns the first query with the first key. FlashAttention aligns the last
        # ones, and its operator is what `torch.nn.attention.bias.causal_lower_right` calls, whose module imports the
        # compiler.
        o = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)[0]
        return o.transpose(1, 2)
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
