"""Attention of new tokens to a cache of transformers, for each kind of layer.

Up to eight new tokens a row go through the decoding kernels, all rows at once. More of them, a prompt, go through the
kernels of training row by row, so that a row's length is its own; in a window layer any number does.
"""

from typing import Any

import torch
from torch import Tensor, nn

from trifocal.hf.layer_cache import TrifocalLayer
from trifocal.inference.prefill import Chunk, Compress, causal_attention, extend_dense, extend_sparse
from trifocal.nn import DenseAttention, MeanCompressor, NSAttention, SelectedAttention, WindowAttention
from trifocal.nn.chooser import VALUE_COLUMNS
from trifocal.nn.gate import NUM_BRANCHES
from trifocal.ops import (
    DecodeBatch,
    Geometry,
    append_dense,
    append_sparse,
    compressed_attention,
    decode_attention,
    decode_dense_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from trifocal.ops.decode.caches import MOST_NEW_TOKENS


class NewTokens:
    """The new tokens of a batch, the same for every layer.

    Args:
        lengths: Tokens of each row before them.
        counts: New tokens of each row.
        num_pages: Pages of each row.
        page_size: Tokens of a page.
        rotary: Cosines and sines of all positions that the pages hold, in the first layer.
    """

    def __init__(
        self, lengths: list[int], counts: list[int], num_pages: int, page_size: int, rotary: tuple[Tensor, Tensor]
    ) -> None:
        device, batch = rotary[0].device, len(counts)
        self.counts, self.num_pages, self.page_size = counts, num_pages, page_size
        table = torch.arange(batch * num_pages, device=device).view(batch, num_pages)
        self.chunks = [
            Chunk(table[row], row, length, count, rotary)
            for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
            if count
        ]
        self.decode_batch: DecodeBatch | None = None
        if max(counts) <= MOST_NEW_TOKENS:
            numbers = torch.tensor([list(range(batch)), lengths, counts], dtype=torch.int32).to(device)
            rows, before, new = numbers
            self.decode_batch = DecodeBatch(rows, before, new, table.to(torch.int32))
        self._places: Tensor | None = None
        if min(counts) < max(counts):
            places = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
            self._places = places.flatten().nonzero()[:, 0].to(device)

    def align(self, x: Tensor) -> Tensor:
        """[1, N, ...] -> each row's tokens one behind the other from the first column on, [B, T, ...]."""
        shape = (len(self.counts), max(self.counts), *x.shape[2:])
        if self._places is None:
            return x.reshape(shape)
        return x.new_zeros(shape).flatten(0, 1).index_copy(0, self._places, x[0]).view(shape)

    def pack(self, x: Tensor) -> Tensor:
        """The way back: [B, T, ...] -> [1, N, ...]."""
        flat = x.flatten(0, 1)
        return (flat if self._places is None else flat[self._places])[None]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """[1, N, ...] -> the tokens of each row that has some, [1, n, ...]."""
        return x.split([count for count in self.counts if count], dim=1)


class LayerPast:
    """`trifocal.nn.attention_base.KVCache` of one layer.

    Args:
        layer: Cache of the layer.
        new: The new tokens.
        rotary: Cosines and sines of all positions in this layer.
    """

    def __init__(self, layer: TrifocalLayer, new: NewTokens, rotary: tuple[Tensor, Tensor]) -> None:
        self._layer, self._new, self._rotary = layer, new, rotary

    def attend(
        self, attention: nn.Module, q: Tensor, keys: list[Tensor], values: list[Tensor], gates: Tensor | None
    ) -> Tensor:
        """Append and attend, by the kind of the layer."""
        for chunk in self._new.chunks:
            chunk.rotary = self._rotary
        if isinstance(attention, NSAttention):
            assert gates is not None
            return self._sparse(attention, q, keys, values, gates)
        if isinstance(attention, SelectedAttention):
            return self._selected(attention, q, keys[0], values[0])
        if isinstance(attention, WindowAttention):
            return self._window(attention, q, keys[0], values[0])
        assert isinstance(attention, DenseAttention)
        return self._dense(q, keys[0], values[0])

    def _sparse(
        self, attention: NSAttention, q: Tensor, keys: list[Tensor], values: list[Tensor], gates: Tensor
    ) -> Tensor:
        geometry, new, shared = attention.geometry, self._new, attention.shared_kv
        # One branch for all, or cmp, slc, win.
        (k_raw, k_slc, k_win), (v_raw, v_slc, v_win) = (
            branches * (NUM_BRANCHES // len(branches)) for branches in (keys, values)
        )
        self._reserve(geometry, k_slc=k_slc, v_slc=v_slc, k_cmp=k_raw, v_cmp=v_raw)
        for name, x, reach in (
            ("k_raw", k_raw, geometry.compression_block_size),
            ("v_raw", v_raw, geometry.compression_block_size),
            *(() if shared else (("k_win", k_win, geometry.window_size), ("v_win", v_win, geometry.window_size))),
        ):
            self._layer.reserve_ring(name, x, reach - 1)
        cache = self._layer.sparse()
        if new.decode_batch is not None:
            raw_k, raw_v, slc_k, slc_v = (new.align(x) for x in (k_raw, v_raw, k_slc, v_slc))
            win_k, win_v = (None, None) if shared else (new.align(k_win), new.align(v_win))
            append_sparse(
                cache, new.decode_batch, raw_k, raw_v, slc_k, slc_v, win_k, win_v, geometry, self._rotary,
                _learned(attention), attention.backend,
            )  # fmt: skip
            o = decode_attention(
                new.align(q), new.align(gates), cache, new.decode_batch, geometry, self._rotary, window=True,
                backend=attention.backend,
            )  # fmt: skip
            return new.pack(o)
        compress = (attention.k_compressor, attention.v_compressor)
        outputs = []
        rows = zip(*map(new.split, (q, gates, k_raw, v_raw, k_slc, v_slc, k_win, v_win)), strict=True)
        for chunk, (q_row, gates_row, *parts) in zip(new.chunks, rows, strict=True):
            raw, selected, own = zip(parts[::2], parts[1::2], strict=True)
            seen = extend_sparse(cache, chunk, raw, selected, None if shared else own, geometry, compress)
            assert seen.v_cmp is not None
            q_row = chunk.rotate(q_row)
            o = nsa_attention(q_row, *seen, gates_row, geometry, backend=attention.backend)  # type: ignore[arg-type]
            outputs.append(o)
        return torch.cat(outputs, dim=1)

    def _selected(self, attention: SelectedAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        geometry, new = attention.geometry, self._new
        self._reserve(geometry, k_slc=k, v_slc=v, k_cmp=k)
        self._layer.reserve_ring("k_raw", k, geometry.compression_block_size - 1)
        cache = self._layer.sparse()
        if new.decode_batch is not None:
            k, v = new.align(k), new.align(v)
            append_sparse(
                cache, new.decode_batch, k, None, k, v, None, None, geometry, self._rotary, backend=attention.backend
            )
            o = decode_attention(
                new.align(q), None, cache, new.decode_batch, geometry, self._rotary, window=False,
                backend=attention.backend,
            )  # fmt: skip
            return new.pack(o)
        outputs = []
        for chunk, q_row, k_row, v_row in zip(new.chunks, *map(new.split, (q, k, v)), strict=True):
            compress = (attention.k_compressor,) * 2
            seen = extend_sparse(cache, chunk, (k_row, None), (k_row, v_row), None, geometry, compress)
            q_row = chunk.rotate(q_row)
            given: dict[str, Any] = {"num_keys": chunk.stop, "backend": attention.backend}
            _, lse = compressed_attention(q_row, seen.k_cmp, seen.k_cmp[..., :VALUE_COLUMNS], geometry, **given)
            blocks = select_blocks(q_row, seen.k_cmp, lse, geometry, **given)
            o = selected_attention(q_row, seen.k_slc, seen.v_slc, blocks, geometry, backend=attention.backend)
            outputs.append(o)
        return torch.cat(outputs, dim=1)

    def _window(self, attention: WindowAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Row by row even where there is one new token: a row reads few keys.
        reach = attention.window_size - 1
        k_ring, v_ring = (self._layer.reserve_ring(name, x, reach) for name, x in (("k_win", k), ("v_win", v)))
        outputs = []
        for chunk, q_row, k_row, v_row in zip(self._new.chunks, *map(self._new.split, (q, k, v)), strict=True):
            past = min(chunk.first, reach)
            k_win = chunk.join_ring(k_ring, chunk.rotate(k_row), past)
            v_win = chunk.join_ring(v_ring, v_row, past)
            q_row = chunk.rotate(q_row)
            outputs.append(window_attention(q_row, k_win, v_win, attention.window_size, backend=attention.backend))
        return torch.cat(outputs, dim=1)

    def _dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new = self._new
        self._reserve(None, k=k, v=v)
        cache = self._layer.dense()
        if new.decode_batch is not None:
            append_dense(cache, new.decode_batch, new.align(k), new.align(v), self._rotary)
            return new.pack(decode_dense_attention(new.align(q), cache, new.decode_batch, self._rotary))
        outputs = [
            causal_attention(chunk.rotate(q_row), *extend_dense(cache, chunk, k_row, v_row))
            for chunk, q_row, k_row, v_row in zip(new.chunks, *map(new.split, (q, k, v)), strict=True)
        ]
        return torch.cat(outputs, dim=1)

    def _reserve(self, geometry: Geometry | None, **new: Tensor) -> None:
        size = self._new.page_size
        stride = 1 if geometry is None else geometry.compression_stride
        tokens = {name: size // (stride if name.endswith("_cmp") else 1) for name in new}
        self._layer.reserve_pages(new, self._new.num_pages, tokens)


def _learned(attention: NSAttention) -> tuple[Compress, Compress] | None:
    """φ of keys and of values as the decoding kernels take it, if it is learned."""
    phi_k, phi_v = attention.k_compressor, attention.v_compressor
    if isinstance(phi_k, MeanCompressor):
        return None
    return lambda blocks: phi_k(blocks)[:, 0], lambda blocks: phi_v(blocks)[:, 0]
