"""Attention of new tokens to a layer's caches, for every kind of layer: a chunk of one sequence, or a decoding step.

The caches say what there is: a `DenseCache` of every token in dense layers, a `WindowCache` of the last ones in window
layers; in layers that choose blocks a `SparseCache`, with compressed keys, values, a window's own keys or index keys as
the layer needs them.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trifocal.inference.paged_cache import LayerCache
from trifocal.inference.prefill import (
    Chunk,
    Compress,
    append_dense_chunk,
    append_sparse_chunk,
    append_window_chunk,
    causal_attention,
)
from trifocal.models.model_config import ModelConfig
from trifocal.nn import MLPCompressor, NSAttention, WindowAttention
from trifocal.nn.attention_base import INDEX_DIM, AttentionBase, Projected, RotaryTables
from trifocal.nn.chooser import ChoosingAttention, choose_blocks
from trifocal.nn.rope import rotary_tables
from trifocal.ops import (
    DecodeBatch,
    DenseCache,
    Geometry,
    SparseCache,
    WindowCache,
    append_dense,
    append_sparse,
    decode_attention,
    decode_dense_attention,
    nsa_attention,
    select_blocks_by_index,
    selected_attention,
    window_attention,
)
from trifocal.ops.decode.caches import Index, LearnedCompressor


def tables_of_layers(
    config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> list[RotaryTables]:
    """Rotary tables of all positions for each layer, without those of blocks; layers alike share them."""
    exact, positions = torch.promote_types(dtype, torch.float32), torch.arange(num_tokens, device=device)
    scalings = [config.rope_scaling_of(layer) for layer in range(config.num_layers)]
    widths = [config.head_dim, INDEX_DIM] if config.has_index else [config.head_dim]
    tables = {
        scaling: [rotary_tables(positions, width, config.rope_theta, exact, scaling) for width in widths]
        for scaling in {*scalings}
    }
    return [RotaryTables(*tables[scaling]) for scaling in scalings]


class AttentionRule:
    """What a layer's attention does with its caches, beyond the products with its weights.

    `tables` and `geometry` are those for the longest sequence; `prepared` copies a learned φ in the type of the
    products, else it is the layer's own. `decode` reads only the weights of a learned φ: it must not run where φ is not
    `plain`, as an adapter computes more.
    """

    def __init__(
        self,
        attention: AttentionBase,
        geometry: Geometry,
        tables: RotaryTables,
        prepared: Callable[[nn.Module], nn.Module] = lambda phi: phi,
    ) -> None:
        self._tables, self._geometry = tables, geometry
        self._backend: str = getattr(attention, "backend", "auto")
        self._window_size: int | None = None
        if isinstance(attention, WindowAttention):
            # A wider one never slides.
            self._window_size = min(attention.window_size, len(tables.tokens[0]))
        self._compress: tuple[Compress, Compress] | None = None
        self._learned: tuple[LearnedCompressor, LearnedCompressor] | None = None
        self.plain = True
        if isinstance(attention, ChoosingAttention):
            phi_k = prepared(attention.k_compressor)
            phi_v = prepared(attention.v_compressor) if isinstance(attention, NSAttention) else phi_k
            self._compress = phi_k, phi_v
            if isinstance(phi_k, MLPCompressor) and isinstance(phi_v, MLPCompressor):
                self._learned = _weights_of(phi_k), _weights_of(phi_v)
                self.plain = phi_k.is_plain and phi_v.is_plain

    def prefill(self, new: Projected, cache: LayerCache, chunk: Chunk) -> Tensor:
        """Append a chunk of one sequence to the layer's caches and attend, [1, T, ...] -> [1, T, H, V]."""
        rotary, geometry, backend = self._tables.tokens, self._geometry, self._backend
        if isinstance(cache, DenseCache):
            return causal_attention(*append_dense_chunk(new, cache, chunk, rotary, backend))
        if isinstance(cache, WindowCache):
            assert self._window_size is not None
            q, k, v = append_window_chunk(new, cache, chunk, self._window_size, rotary, backend)
            return window_attention(q, k, v, self._window_size, backend=backend)
        assert self._compress is not None
        q, seen, index_seen = append_sparse_chunk(new, cache, chunk, geometry, self._compress, self._tables, backend)
        chosen = None if index_seen is None else select_blocks_by_index(*index_seen, geometry, backend=backend)
        if new.gates is not None:
            return nsa_attention(q, *seen, new.gates, geometry, selected_blocks=chosen, backend=backend)  # type: ignore[arg-type]
        if chosen is None:
            assert seen.k_cmp is not None
            chosen = choose_blocks(q, seen.k_cmp, chunk.stop, geometry, None, backend)
        return selected_attention(q, seen.k_slc, seen.v_slc, chosen, geometry, backend=backend)

    def decode(self, new: Projected, cache: LayerCache, batch: DecodeBatch) -> Tensor:
        """Append the new tokens of a batch and attend, [B, T, ...] -> [B, T, H, V]."""
        rotary, geometry, backend = self._tables.tokens, self._geometry, self._backend
        if not isinstance(cache, SparseCache):
            append_dense(cache, batch, new.keys[0], new.values[0], rotary, backend)
            return decode_dense_attention(new.q, cache, batch, rotary, window_size=self._window_size, backend=backend)
        k_raw = None if cache.k_raw is None else new.keys[0]
        v_raw = None if cache.v_raw is None else new.values[0]
        k_slc, v_slc = new.selected
        k_win, v_win = (None, None) if cache.k_win is None else (new.keys[-1], new.values[-1])
        branches = k_raw, v_raw, k_slc, v_slc, k_win, v_win
        index = None
        if new.index is not None and self._tables.index_tokens is not None:
            index = Index(*new.index, self._tables.index_tokens)
        scores = append_sparse(cache, batch, *branches, geometry, rotary, self._learned, backend, index)
        has_window = new.gates is not None
        return decode_attention(
            new.q, new.gates, cache, batch, geometry, rotary, window=has_window, backend=backend, scores=scores
        )


def _weights_of(phi: MLPCompressor) -> LearnedCompressor:
    weights = phi.positions, phi.up_proj.weight, phi.down_proj.weight
    return LearnedCompressor(*(weight.detach().contiguous() for weight in weights))
