"""Attention of new tokens to a cache of transformers.

Up to eight new tokens a row go through the decoding kernels, all rows at once. More of them, a prompt, go through the
kernels of training row by row, so that a row's length is its own.
"""

import torch
from torch import Tensor

from trifocal.hf.layer_cache import TrifocalLayer
from trifocal.inference.cached_attention import AttentionRule
from trifocal.inference.prefill import Chunk
from trifocal.models.model_config import Attention, ModelConfig
from trifocal.nn.attention_base import AttentionBase, Projected, RotaryTables
from trifocal.ops import DecodeBatch
from trifocal.ops.decode.caches import MAX_NEW_TOKENS, Place


class NewTokens:
    """A batch's new tokens: `counts` of each row behind `lengths` earlier ones, in `num_pages` pages a row."""

    def __init__(
        self, lengths: list[int], counts: list[int], num_pages: int, page_size: int, device: torch.device
    ) -> None:
        batch = len(counts)
        self.counts, self.num_pages, self.page_size = counts, num_pages, page_size
        table = torch.arange(batch * num_pages, device=device).view(batch, num_pages)
        own = torch.tensor([*enumerate(counts)], dtype=torch.int64).to(device)
        self.chunks = [
            Chunk(Place(own[row, :1], own[row, 1:], table[row]), length, count)
            for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
            if count
        ]
        self.decode_batch: DecodeBatch | None = None
        if max(counts) <= MAX_NEW_TOKENS:
            numbers = torch.tensor([list(range(batch)), lengths, counts], dtype=torch.int32).to(device)
            rows, before, new = numbers
            self.decode_batch = DecodeBatch(rows, before, new, table.to(torch.int32))
        self._places: Tensor | None = None
        if min(counts) < max(counts):
            places = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
            self._places = places.flatten().nonzero()[:, 0].to(device)

    def align(self, x: Tensor) -> Tensor:
        """[1, N, ...] -> each row's tokens one after the other from the first column on, [B, T, ...]."""
        shape = (len(self.counts), max(self.counts), *x.shape[2:])
        if self._places is None:
            return x.reshape(shape)
        return x.new_zeros(shape).flatten(0, 1).index_copy(0, self._places, x[0]).view(shape)

    def pack(self, x: Tensor) -> Tensor:
        """The way back: [B, T, ...] -> [1, N, ...]."""
        flat = x.flatten(0, 1)
        return (flat if self._places is None else flat[self._places])[None]


class LayerPast:
    """`trifocal.nn.attention_base.KVCache` of one layer."""

    def __init__(
        self, layer: TrifocalLayer, new: NewTokens, tables: RotaryTables, config: ModelConfig, kind: Attention
    ) -> None:
        self._layer, self._new, self._tables, self._config, self._kind = layer, new, tables, config, kind

    def attend(self, attention: AttentionBase, new: Projected) -> Tensor:
        """Append and attend."""
        tokens, rule = self._new, AttentionRule(attention, self._config.geometry, self._tables)
        cache = self._layer.reserve(self._config, self._kind, tokens.num_pages, tokens.page_size, new.q)
        if tokens.decode_batch is not None and rule.plain:
            return tokens.pack(rule.decode(new.map(tokens.align), cache, tokens.decode_batch))
        outputs, first = [], 0
        for chunk in tokens.chunks:
            here = slice(first, first := first + chunk.stop - chunk.first)
            outputs.append(rule.prefill(new.map(lambda x, here=here: x[:, here]), cache, chunk))  # type: ignore[misc]
        return torch.cat(outputs, dim=1)
