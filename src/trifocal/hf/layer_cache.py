"""Keys and values of one layer as a cache layer of transformers.

`DynamicCache(config=model.config)` makes one for every layer, and `generate` does so by itself. Each row of a batch has
its own length: padding takes no place.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from trifocal.inference.paged_cache import LayerCache, layer_cache, layer_shapes
from trifocal.models.model_config import Attention, ModelConfig
from trifocal.nn.attention_base import RotaryTables
from trifocal.ops.geometry import LARGEST_SIZE

LAYER_TYPE = "trifocal"
NO_GRADIENTS = "caches are for decoding without gradients: use torch.no_grad() from the first token on"
SLACK = 64
"""Tokens that the rings hold beyond what is read, so that as many can be taken back before others come."""


class TrifocalLayer(DynamicLayer):
    """Keys and values of one layer, in pages of tokens and in rings of the last ones, as `trifocal.ops` decodes them.

    The pages of a row lie one after the other, and none is shared: a beam that splits is copied.

    Attributes:
        columns: Which columns of the batch it has tokens of, without padding, [B, columns], bool, on the host.
        spare: Tokens that can still be taken back.
        num_pages: Pages of each row.
        pages, rings: [B, pages, *] and [B, *] by name; see `trifocal.inference.paged_cache.layer_shapes`.
        tables: Rotary tables of each layer, kept by the first one.
    """

    _layer_type = LAYER_TYPE

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.columns = torch.zeros(0, 0, dtype=torch.bool)
        self.spare = SLACK
        self.num_pages = 0
        self.pages: dict[str, Tensor] = {}
        self.rings: dict[str, Tensor] = {}
        self.tables: list[RotaryTables] = []
        self.is_initialized = False

    def reserve(self, config: ModelConfig, kind: Attention, num_pages: int, page_size: int, like: Tensor) -> LayerCache:
        """The cache for `trifocal.ops`, with room for this many pages a row, of the type and device of `like`."""
        shapes, rows = layer_shapes(config, kind, page_size, LARGEST_SIZE, SLACK), len(self.columns)
        if not torch.is_inference_mode_enabled():
            # Those of an earlier pass under inference_mode can be written to only there.
            for tensors in (self.pages, self.rings):
                tensors.update({name: x.clone() for name, x in tensors.items() if x.is_inference()})
        if num_pages > self.num_pages:
            before, self.pages, self.num_pages = self.pages, {}, num_pages
            for name, shape in shapes.pages.items():
                self.pages[name] = like.new_zeros(rows, num_pages, *shape)
                if before:
                    self.pages[name][:, : before[name].shape[1]] = before[name]
        if not self.rings:
            self.rings = {name: like.new_zeros(rows, *shape) for name, shape in shapes.rings.items()}
        self.is_initialized = True
        return layer_cache({name: x.flatten(0, 1) for name, x in self.pages.items()} | self.rings)

    def get_seq_length(self) -> int:
        """Columns of the batch so far, with padding."""
        return self.columns.shape[1]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Not for this layer: a model of Trifocal appends to it."""
        raise ValueError("this cache layer is filled only by a model of Trifocal")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first tokens say what is kept."""

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last columns, padding too, at most 64 in all crops since as many came; ValueError if too many
        would go.

        Given a negative number, that many columns go; given a positive one, as by older callers, that many stay.
        """
        before = self.get_seq_length()
        length = min(tokens_to_remove, before) if tokens_to_remove > 0 else before + tokens_to_remove
        if length < 0:
            raise ValueError(f"crop cannot take {-tokens_to_remove} tokens of {before}")
        if before - length > self.spare:
            raise ValueError(f"crop can take back {self.spare} tokens, got {before - length}")
        self.columns = self.columns[:, :length]
        self.spare -= before - length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; one may occur several times."""
        if not self.is_initialized:
            return
        self.columns = self.columns[indices.cpu()]
        for tensors in (self.pages, self.rings):
            for name, x in tensors.items():
                tensors[name] = x.index_select(0, indices.to(x.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row several times, one after the other."""
        self.batch_select_indices(torch.arange(len(self.columns)).repeat_interleave(repeats))


class NoCache(DynamicCache):
    """Stands in for the cache of a pass with gradients, which makes none; no pass continues with it."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Refuse, with a ValueError."""
        raise ValueError(NO_GRADIENTS)


class NoStaticLayer(StaticLayer):
    """Refuses static caches: their tensors have one length for all rows, which compiled code reads."""

    _layer_type = LAYER_TYPE

    def __init__(self, max_cache_len: int, **_: Any) -> None:
        raise ValueError("static caches are not possible for Trifocal's models: leave cache_implementation out")
