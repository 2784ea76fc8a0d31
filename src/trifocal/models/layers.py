"""The layers of a decoder: how they are built, run, compiled and checkpointed, and how weights begin."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trifocal.models.choice_teaching import ChoiceSamples
from trifocal.models.model_config import ModelConfig
from trifocal.nn import Block, DenseAttention, NSAttention, SelectedAttention, WindowAttention
from trifocal.nn.attention_base import AttentionBase, KVCache, RotaryTables, documents_and_positions
from trifocal.nn.chooser import random_blocks
from trifocal.nn.context import TokenShard
from trifocal.nn.rope import RopeScaling
from trifocal.ops import Documents

SMALL_STD = 0.02


def make_blocks(config: ModelConfig) -> nn.ModuleList:
    """The layers of a decoder, first to last."""
    kinds = enumerate(config.attention_of_layers)
    attentions = [_attention(config, kind, config.rope_scaling_of(index)) for index, kind in kinds]
    return nn.ModuleList(
        Block(attention, config.dim, config.mlp_dim, config.norm_eps, config.mlp_bias, config.norm_after)
        for attention in attentions
    )


Shared = tuple[tuple[Tensor, Tensor] | None, tuple[tuple[Tensor, Tensor] | None, ...]]
"""What layers have in common: the places of compressed blocks in documents, and rotary tables."""


def share_places(
    layer: AttentionBase, x: Tensor, documents: Documents | None, local_tokens: TokenShard | None
) -> Shared:
    """What layers like this one have in common, in plain tuples: PyTorch 2.11 compiles nothing that returns others."""
    places = None
    if documents is not None and local_tokens is None and layer.geometry is not None:
        documents = documents.with_blocks(layer.geometry)
        places = documents.placed_blocks(layer.geometry)
    return places, tuple(layer.rotary_tables(x, documents, local_tokens))


def run_blocks(
    blocks: nn.ModuleList,
    config: ModelConfig,
    x: Tensor,
    documents: Documents | None,
    caches: Sequence[KVCache] = (),
    choice_samples: ChoiceSamples | None = None,
    local_tokens: TokenShard | None = None,
    share: Callable[..., Shared] = share_places,
) -> Iterator[Tensor]:
    """Run the layers of a decoder on embedded tokens x [B, T, E], and yield the residual stream after each, [B, T, E].

    Documents go with B == 1. Caches, one for each layer, have earlier tokens and say where these ones lie; without
    documents. `choice_samples` teach the choice of the layers, and take their figures. Where processes share each
    sequence, `local_tokens` are the tokens of x; documents are of all. `share` is `share_places`, or compiled from it.
    """
    if caches:
        for block, cache in zip(blocks, caches, strict=True):
            x = block(x, cache=cache)
            yield x
        return
    layers: list[AttentionBase] = [block.attention for block in blocks]  # type: ignore[misc]
    scalings = [layer.rope_scaling for layer in layers]
    rotary: dict[RopeScaling, RotaryTables] = {}
    for scaling in dict.fromkeys(scalings):
        alike = [layer for layer in layers if layer.rope_scaling == scaling]
        # A layer with compressed blocks has what the others need, too.
        first = next((layer for layer in alike if layer.geometry is not None), alike[0])
        places, tables = share(first, x, documents, local_tokens)
        rotary[scaling] = RotaryTables(*tables)  # type: ignore[arg-type]
        if documents is not None and first.geometry is not None and places is not None:
            documents = documents.with_blocks(first.geometry, places)
    shared: dict[str, Any] = {} if local_tokens is None else {"local_tokens": local_tokens}
    for index, (block, kind) in enumerate(zip(blocks, config.attention_of_layers, strict=True)):
        given = dict(shared)
        if kind in ("nsa", "selected") and config.selection == "random":
            positions = documents_and_positions(x, documents, local_tokens)[1]
            chosen = random_blocks(positions, config.geometry, config.num_kv_heads, index)
            given["selected_blocks"] = chosen.expand(x.shape[0], -1, -1, -1)
        tables = rotary[scalings[index]]
        choice_sample = None if choice_samples is None else choice_samples.of_layer(index)
        if choice_samples is None or choice_sample is None:
            x = block(x, cu_seqlens=documents, rotary=tables, **given)
        else:
            x, figures = block(x, cu_seqlens=documents, rotary=tables, choice_sample=choice_sample, **given)
            choice_samples.add(index, figures)
        yield x


def wrap_blocks(blocks: nn.ModuleList, checkpointed_layers: range, run: Callable[..., Tensor]) -> None:
    """Wrap compiled and checkpointed blocks anew, inside of hooks; `run` is `run_block`, or compiled from it."""
    for index, block in enumerate(blocks):
        block.__dict__.pop("forward", None)
        checkpointed = index in checkpointed_layers
        if checkpointed or run is not run_block:
            block.forward = functools.partial(train_block, run, checkpointed, block.forward)


def train_block(
    run: Callable[..., Tensor], checkpointed: bool, forward: Callable[..., Tensor], x: Tensor, **given: Any
) -> Tensor:
    """A wrapped block: `run`, which is `run_block` or compiled from it, in training; else the block's own forward."""
    if not torch.is_grad_enabled():
        return forward(x, **given)
    block: nn.Module = forward.__self__  # type: ignore[attr-defined]
    # A layer that is frozen, and all before it, keeps nothing; the compiler refuses to checkpoint its dense attention.
    kept = x.requires_grad or any(parameter.requires_grad for parameter in block.parameters())
    return run(checkpointed and kept, forward, x, **given)


def run_block(checkpointed: bool, forward: Callable[..., Tensor], x: Tensor, **given: Any) -> Tensor:
    """One layer in training, by its `Block.forward`; `checkpointed` computes it again in backward."""
    if not checkpointed:
        return forward(x, **given)
    # Only dropout, which adapters bring, is random in a block: a CUDA graph could not read the random state.
    block: nn.Module = forward.__self__  # type: ignore[attr-defined]
    random = any(isinstance(part, nn.Dropout) and part.p > 0 for part in block.modules())
    return checkpoint(forward, x, use_reentrant=False, preserve_rng_state=random, context_fn=_save_attention, **given)


# Non-reentrant checkpointing that keeps the results of some operators. The choice, because one made again costs as
# much as the first and in another precision might turn out otherwise: 4 bytes a slot. For the same reason the loss of
# an index: 5 bytes a block and group of a sampled query, so by the square of the length: with one query in 64, blocks
# of 64 and 12/2 heads of 64 as much as the outputs below at 1.9 million tokens. The branches' outputs and
# log-sum-exps, where the kernels make them: 2V + 4 bytes a head each, together 1.5 times the layer's input at H*V = E.
# They give back the most time for their bytes. At 65,536 tokens and 64/4 heads of 128, an H200 saves for each KiB kept
# about 380 ns with the choice, 14 with the selected, 8 with the compressed branch (in proportion to the length) and 3
# with the window; the products of an MLP on 768 dims would save about 1.
_save_attention = functools.partial(
    create_selective_checkpoint_contexts,
    [
        torch.ops.trifocal.select_blocks.default,
        torch.ops.trifocal.select_blocks_by_index.default,
        torch.ops.trifocal.index_loss.default,
        torch.ops.trifocal.compressed_attention.default,
        torch.ops.trifocal.selected_attention.default,
        torch.ops.trifocal.window_attention.default,
    ],
)


def _attention(config: ModelConfig, kind: str, rope_scaling: RopeScaling) -> AttentionBase:
    names = ("dim", "num_heads", "num_kv_heads", "head_dim", "value_dim", "rope_theta", "qk_norm", "qk_norm_all_heads")
    sizes: dict[str, Any] = {name: getattr(config, name) for name in names}
    sizes |= {"qkv_bias": config.qkv_bias, "o_bias": config.o_bias, "norm_eps": config.norm_eps}
    sizes["rope_scaling"] = rope_scaling
    if kind == "dense":
        return DenseAttention(**sizes)
    sizes["backend"] = config.backend
    if kind == "window":
        return WindowAttention(window_size=config.window_of_layers, **sizes)
    sizes["geometry"] = config.geometry
    sizes["chooser"] = "exact" if config.selection == "exact" else "index" if config.has_index else "compressed"
    if kind == "selected":
        return SelectedAttention(**sizes)
    return NSAttention(**sizes, compressor=config.compressor, shared_kv=config.shared_kv)


def draw_weights(weights: Tensor, name: str, config: ModelConfig, generator: torch.Generator | None) -> None:
    """Fill a tensor in place with the initial weights of a parameter, by the rules in `DecoderLM.init_weights`."""
    if name.endswith("norm.weight"):
        weights.fill_(1.0)
    elif name.endswith(".bias"):
        weights.zero_()
    else:
        weights.normal_(std=_initial_std(name, weights.shape, config), generator=generator)
        if name.endswith(".k_proj.weight"):
            # Each branch starts with the keys of the first one.
            branches = weights.unflatten(0, (-1, config.num_kv_heads * config.head_dim))
            branches[1:] = branches[0]


def _initial_std(name: str, shape: torch.Size, config: ModelConfig) -> float:
    if name.endswith(("_compressor.positions", "_compressor.down_proj.weight")):
        return SMALL_STD
    if name == "embedding.weight" and not config.tie_embeddings:
        return SMALL_STD
    std: float = shape[1] ** -0.5
    if name.endswith((".attention.o_proj.weight", ".mlp.down_proj.weight")) and not config.norm_after:
        std /= (2 * config.num_layers) ** 0.5
    return std
