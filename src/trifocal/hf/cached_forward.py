"""A forward pass that continues after the tokens of a cache of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from trifocal.hf.cached_attention import LayerPast, NewTokens
from trifocal.hf.layer_cache import NO_GRADIENTS, SLACK, TrifocalLayer
from trifocal.hf.row_layout import RowLayout, masked_layout, real_tokens
from trifocal.inference.cached_attention import tables_of_layers
from trifocal.inference.paged_cache import PAGE_SIZE, page_size_of
from trifocal.models import ModelConfig


@contextmanager
def cached_tokens(
    cache: Any, config: ModelConfig, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> Iterator[tuple[RowLayout, list[LayerPast]]]:
    """Open a cache of transformers for a forward pass of x [B, T, E]: where the real new tokens lie in the batch, and
    the earlier ones for each layer. It takes the new tokens at the end; after an error it is unchanged.

    The mask is 1 for tokens in all columns, also the cache's, [B, S + T]; `position_ids` are those of the new tokens,
    [B, T]. Raises ValueError if the cache has another model or kind, or tokens do not follow those that it holds.
    """
    layers = _layers(cache, config)
    batch, num_new = x.shape[:2]
    before = layers[0].columns if len(layers[0].columns) else torch.zeros(batch, 0, dtype=torch.bool)
    if len(before) != batch:
        raise ValueError(f"past_key_values have {len(before)} rows, the tokens {batch}")
    earlier, new = real_tokens(attention_mask, (batch, before.shape[1] + num_new), may_be_empty=True).split(
        [before.shape[1], num_new], dim=1
    )
    if attention_mask is not None and not torch.equal(earlier, before):
        raise ValueError("attention_mask must hide the same earlier tokens as when they went into past_key_values")
    lengths, counts = before.sum(1).tolist(), new.sum(1).tolist()
    if not any(counts):
        raise ValueError("attention_mask hides every new token")
    _check_positions(position_ids, new, lengths)
    most_tokens = max(length + count for length, count in zip(lengths, counts, strict=True))
    page_size, num_pages = page_size_of(config, PAGE_SIZE), layers[0].num_pages
    if num_pages * page_size < most_tokens:
        # Twice as many, so that a token costs a constant number of copies.
        num_pages = max(-(-most_tokens // page_size), 2 * num_pages)
    tables = layers[0].tables
    if not tables or len(tables[0].tokens[0]) < num_pages * page_size:
        tables = layers[0].tables = tables_of_layers(config, num_pages * page_size, x.dtype, x.device)
    tokens = NewTokens(lengths, counts, num_pages, page_size, x.device)
    for layer in layers:
        layer.columns = before
    caches = [
        LayerPast(layer, tokens, own, config, kind)
        for layer, own, kind in zip(layers, tables, config.attention_of_layers, strict=True)
    ]
    yield masked_layout(new, x.device), caches
    for chunk in tokens.chunks:
        chunk.write_rings()
    columns = torch.cat((before, new), dim=1)
    for layer in layers:
        layer.columns = columns
        layer.spare = min(SLACK, layer.spare + min(counts))


def _layers(cache: Any, config: ModelConfig) -> list[TrifocalLayer]:
    layers = getattr(cache, "layers", None)
    if layers == [] and isinstance(cache, DynamicCache):
        # A cache that was made without the configuration would take transformers' own layers.
        layers.extend(TrifocalLayer() for _ in range(config.num_layers))
    if not isinstance(layers, list) or not all(isinstance(layer, TrifocalLayer) for layer in layers):
        raise ValueError(
            f"past_key_values must be a DynamicCache(config=model.config), got another {type(cache).__name__}: layers "
            "of transformers, as PEFT's prefix tuning fills them, do not hold what sparse attention needs"
        )
    if torch.is_grad_enabled():
        raise ValueError(NO_GRADIENTS)
    if getattr(cache, "offloading", False):
        raise ValueError("an offloaded cache is not possible for Trifocal's models")
    if len(layers) != config.num_layers:
        raise ValueError(f"past_key_values have {len(layers)} layers, the model {config.num_layers}")
    if obstacle := config.undecodable:
        raise ValueError(f"{obstacle}: leave past_key_values and use_cache out")
    return layers


def _check_positions(position_ids: Tensor | None, new: Tensor, lengths: list[int]) -> None:
    if position_ids is None:
        return
    expected = new.cumsum(1) - 1 + torch.tensor(lengths)[:, None]
    if not bool((position_ids.cpu().expand(new.shape) == expected)[new].all()):
        raise ValueError(
            "position_ids must count on from the tokens in past_key_values, without padding; packed documents need "
            "use_cache=False"
        )
