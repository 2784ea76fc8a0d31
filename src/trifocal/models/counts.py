"""Parameters of a model, and its floating-point operations by formula.

Counted are the multiplications and additions (two operations a pair) of every matrix product that the mathematics
needs. Norms, rotary positions, softmax, gates' mixing, the mean compressor and the choice of blocks are
not products and are not counted; an embedding is a look-up. Attention counts the keys that each query sees, exactly,
averaged over the positions of a document: early queries see fewer. Backward counts twice the forward;
recomputation by activation checkpointing or a kernel is not counted.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from trifocal.models.decoder import meta_model
from trifocal.models.model_config import Attention, ModelConfig
from trifocal.nn.chooser import INDEX_DIM
from trifocal.ops import Geometry
from trifocal.ops.validation import check_whole_number


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token: of the model itself, and of its dense baseline.

    The baseline is the same model with causal attention over the whole past; training is forward and backward.
    """

    executed_forward: float
    executed_training: float
    dense_equivalent_forward: float
    dense_equivalent_training: float


def parameter_count(config: ModelConfig) -> int:
    """All trainable parameters, embeddings included."""
    return sum(parameter.numel() for parameter in meta_model(config).parameters())


def flops_per_token(config: ModelConfig, sequence_length: int | Sequence[int]) -> Flops:
    """Operations per token, averaged over a sequence.

    Args:
        config: The model.
        sequence_length: Tokens of the sequence, all in one document; or those of each of its packed documents.

    Raises:
        ValueError: If a length is no positive integer.
    """
    lengths = sequence_length if isinstance(sequence_length, Sequence) else [sequence_length]
    for length in lengths:
        check_whole_number("sequence_length", length, 1)
    executed, choosing = _forward_flops(config, lengths)
    dense, _ = _forward_flops(replace(config, attention="dense", layer_types=()), lengths)
    return Flops(executed + choosing, 3 * executed + choosing, dense, 3 * dense)


def compressed_keys(geometry: Geometry, sequence_length: int) -> int:
    """Compressed blocks that the queries of one sequence see, summed over its positions."""
    num_keys = np.arange(1, sequence_length + 1, dtype=np.int64)
    blocks = (num_keys - geometry.compression_block_size) // geometry.compression_stride + 1
    return int(np.maximum(0, blocks).sum())


def selected_keys(geometry: Geometry, sequence_length: int) -> int:
    """Keys in the selected blocks of the queries of one sequence, summed over its positions."""
    num_keys = np.arange(1, sequence_length + 1, dtype=np.int64)
    most = geometry.selected_tokens
    chosen = np.full_like(num_keys, most)
    if geometry.num_local_blocks:
        chosen -= -num_keys % geometry.selection_block_size
    return int(np.where(num_keys <= most, num_keys, chosen).sum())


def window_keys(window_size: int, sequence_length: int) -> int:
    """Keys in the windows of the queries of one sequence, summed over its positions."""
    return int(np.minimum(np.arange(1, sequence_length + 1, dtype=np.int64), window_size).sum())


def dense_keys(sequence_length: int) -> int:
    """Keys that causal attention sees, summed over positions."""
    return sequence_length * (sequence_length + 1) // 2


def _attended(config: ModelConfig, kind: Attention, sequence_length: int) -> int:
    """Keys whose values the queries of a sequence read in one layer, summed over its positions."""
    geometry = config.geometry
    if kind == "nsa":
        window = window_keys(geometry.window_size, sequence_length)
        return compressed_keys(geometry, sequence_length) + selected_keys(geometry, sequence_length) + window
    if kind == "selected":
        return selected_keys(geometry, sequence_length)
    if kind == "window":
        return window_keys(config.window_of_layers, sequence_length)
    return dense_keys(sequence_length)


def _forward_flops(config: ModelConfig, lengths: Sequence[int]) -> tuple[float, float]:
    """Operations per token, and of them those that only choose blocks and are not gone back through."""
    geometry, tokens = config.geometry, sum(lengths)
    kinds = config.attention_of_layers
    keys = {kind: sum(_attended(config, kind, length) for length in lengths) / tokens for kind in set(kinds)}
    blocks = sum(map(geometry.num_compressed_blocks, lengths)) * config.num_kv_heads / tokens
    total = 2.0 * config.dim * config.vocab_size
    for kind, (weights, of_phi) in zip(kinds, _matrices(config), strict=True):
        total += 2 * (weights + of_phi * blocks)
        total += 2 * config.num_heads * (config.head_dim + config.value_dim) * keys[kind]
    if config.has_index:
        choice = 2 * config.num_kv_heads * INDEX_DIM * sum(map(dense_keys, lengths)) / tokens
        return total, choice * (kinds.count("nsa") + kinds.count("selected"))
    compressed = sum(compressed_keys(geometry, length) for length in lengths) / tokens if "selected" in kinds else 0.0
    return total, 2 * config.num_heads * config.head_dim * compressed * kinds.count("selected")


@functools.cache
def _matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """Weights in the matrices of each layer: those of all tokens, and those of a learned φ, which run once a block."""
    found = []
    for block in meta_model(config).blocks:
        weights = {name: part.weight.numel() for name, part in block.named_modules() if isinstance(part, nn.Linear)}
        of_phi = sum(count for name, count in weights.items() if "_compressor." in name)
        found.append((sum(weights.values()) - of_phi, of_phi))
    return found
