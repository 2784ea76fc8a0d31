"""Attention of new tokens to a cache of transformers.

Up to eight new tokens a row go through the decoding kernels, all rows at once. More of them, a prompt, go through the
kernels of training row by row, so that a row's length is its own.
"""

import torch
from torch import Tensor

from trifocal.hf.layer_cache import TrifocalLayer
from trifocal.hf.row_layout import masked_layout
from trifocal.inference.cached_attention import AttentionRule
from trifocal.inference.prefill import Chunk
from trifocal.models.model_config import Attention, ModelConfig
from trifocal.nn.attention_base import AttentionBase, Projected, RotaryTables
from trifocal.ops import DecodeBatch
from trifocal.ops.decode.caches import MAX_NEW_TOKENS, Place


class NewTokens:
    """A batch's new tokens: `counts` of each row behind `lengths` earlier ones, in `num_pages` pages a row; `rows` has
    each row's tokens from the first column on.
    """

    def __init__(
        self, lengths: list[int], counts: list[int], num_pages: int, page_size: int, device: torch.device
    ) -> None:
        batch = len(counts)
        self.num_pages, self.page_size = num_pages, page_size
        self.rows = masked_layout(torch.arange(max(counts)) < torch.tensor(counts)[:, None], device)
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
            return tokens.rows.pack(rule.decode(new.map(tokens.rows.unpack), cache, tokens.decode_batch))
        outputs, first = [], 0
        for chunk in tokens.chunks:
            here = slice(first, first := first + chunk.stop - chunk.first)
            outputs.append(rule.prefill(new.map(lambda x, here=here: x[:, here]), cache, chunk))  # type: ignore[misc]
        return torch.cat(outputs, dim=1)
