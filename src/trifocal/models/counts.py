"""Parameters and floating-point operations of a model, by formula.

Counted are the multiplications and additions (two operations a pair) of every matrix product that the mathematics
needs. Norms, rotary positions, softmax, gates' mixing, the mean compressor and the choice of blocks are
not products and are not counted; an embedding is a look-up. Attention counts the keys that each query sees, exactly,
averaged over the positions of a sequence: early queries see fewer. Backward counts twice the forward;
recomputation by activation checkpointing or a kernel is not counted.

The reference computes more: it multiplies every query with every key of the sequence in the selected
and window branches and with every compressed key in the compressed one, and masks; it makes the compressed scores
once more to choose blocks, and all scores once more in backward. `computed_flops_per_token` counts this too.
"""

from dataclasses import dataclass, replace

import numpy as np

from trifocal.models.model_config import ModelConfig
from trifocal.nn.compressor import MLPCompressor
from trifocal.nn.gate import NUM_BRANCHES
from trifocal.ops import Geometry
from trifocal.ops.validation import check_whole_number


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token.

    Attributes:
        executed_forward: Of the model itself.
        executed_training: Forward and backward of the model itself.
        dense_equivalent_forward: Of its dense twin: the same model with causal attention over the whole past.
        dense_equivalent_training: Forward and backward of the dense twin.
    """

    executed_forward: float
    executed_training: float
    dense_equivalent_forward: float
    dense_equivalent_training: float


@dataclass(frozen=True)
class ComputedFlops:
    """Floating-point operations per token that a training step really computes.

    Attributes:
        matrices: In products with weights, in the type that autocast gives them.
        attention: In products of queries, keys, values and scores; the reference computes them in fp32.
    """

    matrices: float
    attention: float


def parameter_count(config: ModelConfig) -> int:
    """All trainable parameters, embeddings included."""
    layer = _projection_weights(config) + 2 * config.dim
    if config.attention == "nsa":
        # Gate weights are among the projections; its biases and the positions of φ multiply nothing.
        layer += NUM_BRANCHES * (config.num_heads if config.gate == "sigmoid" else 1)
        if config.gate == "softmax":
            # One projection, applied once a group.
            layer -= (config.num_kv_heads - 1) * config.head_dim * NUM_BRANCHES
        if config.compressor == "mlp":
            for features in (config.head_dim, config.value_dim):
                layer += _compressor_weights(config.geometry, features)
                layer += config.geometry.compression_block_size * features
    embeddings = config.vocab_size * config.dim * (1 if config.tie_embeddings else 2)
    return config.num_layers * layer + config.dim + embeddings


def flops_per_token(config: ModelConfig, sequence_length: int) -> Flops:
    """Operations per token, averaged over a sequence.

    Args:
        config: The model.
        sequence_length: Tokens of the sequence, all in one document.

    Raises:
        ValueError: If the length is no positive integer.
    """
    check_whole_number("sequence_length", sequence_length, 1)
    executed = _forward_flops(config, sequence_length)
    dense = _forward_flops(replace(config, attention="dense"), sequence_length)
    return Flops(executed, 3 * executed, dense, 3 * dense)


def computed_flops_per_token(
    config: ModelConfig, sequence_length: int, *, backend: str, checkpointed_layers: int = 0
) -> ComputedFlops:
    """Operations per token that a training step really computes: for estimates of time, not of utilisation.

    Beside `flops_per_token`: scores made again in backward and to choose blocks, forward passes made again by
    activation checkpointing, and under the reference the products that a mask then hides.

    Args:
        config: The model.
        sequence_length: Tokens of a row as the model sees it: of all its documents together.
        backend: What runs the sparse attention, resolved: "reference" or "triton".
        checkpointed_layers: Layers that recompute their activations.
    """
    keys_dim, values_dim = 2 * config.num_heads * config.head_dim, 2 * config.num_heads * config.value_dim
    scoring = 0.0
    if config.attention == "dense":
        keys = (sequence_length + 1) / 2
    elif backend == "reference":
        compressed = config.geometry.num_compressed_blocks(sequence_length)
        keys = compressed + 2 * sequence_length
        scoring = keys_dim * compressed
    else:
        keys = attended_keys(config.geometry, sequence_length) / sequence_length
        # Each query sees half of the compressed keys on average.
        scoring = keys_dim * config.geometry.num_compressed_blocks(sequence_length) / 2
    forward = (keys_dim + values_dim) * keys
    # Scores again, then gradients of probabilities, queries, keys and values.
    backward = (3 * keys_dim + 2 * values_dim) * keys
    # The kernels' results and every choice are kept.
    again = 0.0 if config.attention == "nsa" and backend == "triton" else forward
    matrices = _matrix_flops(config, sequence_length)
    head = 2 * config.dim * config.vocab_size
    return ComputedFlops(
        matrices=(3 * config.num_layers + checkpointed_layers) * matrices + 3 * head,
        attention=config.num_layers * (forward + backward + scoring) + checkpointed_layers * again,
    )


def attended_keys(geometry: Geometry, sequence_length: int) -> int:
    """Keys of all three branches together that the queries of one sequence see, summed over its positions.

    The sum of `Geometry.keys_read_per_step` over all positions.
    """
    num_keys = np.arange(1, sequence_length + 1, dtype=np.int64)
    block, stride = geometry.compression_block_size, geometry.compression_stride
    compressed = np.maximum(0, (num_keys - block) // stride + 1)
    chosen = np.full_like(num_keys, geometry.num_selected_blocks * geometry.selection_block_size)
    if geometry.num_local_blocks:
        chosen -= -num_keys % geometry.selection_block_size
    everything_chosen = num_keys <= geometry.num_selected_blocks * geometry.selection_block_size
    selected = np.where(everything_chosen, num_keys, chosen)
    window = np.minimum(num_keys, geometry.window_size)
    return int((compressed + selected + window).sum())


def _forward_flops(config: ModelConfig, sequence_length: int) -> float:
    if config.attention == "nsa":
        keys = attended_keys(config.geometry, sequence_length)
    else:
        keys = sequence_length * (sequence_length + 1) // 2
    attention = 2 * config.num_heads * (config.head_dim + config.value_dim) * keys / sequence_length
    layer = _matrix_flops(config, sequence_length) + attention
    return config.num_layers * layer + 2 * config.dim * config.vocab_size


def _matrix_flops(config: ModelConfig, sequence_length: int) -> float:
    """Forward operations per token in the matrices of one layer."""
    layer = 2.0 * _projection_weights(config)
    if config.attention == "nsa" and config.compressor == "mlp":
        blocks = config.geometry.num_compressed_blocks(sequence_length) * config.num_kv_heads
        weights = sum(
            _compressor_weights(config.geometry, features) for features in (config.head_dim, config.value_dim)
        )
        layer += 2 * weights * blocks / sequence_length
    return layer


def _projection_weights(config: ModelConfig) -> int:
    """Multiplications that one token costs in the linear maps of one layer."""
    queries = config.dim * config.num_heads * config.head_dim
    output = config.dim * config.num_heads * config.value_dim
    keys_and_values = config.dim * config.num_kv_heads * (config.head_dim + config.value_dim)
    mlp = 3 * config.dim * config.mlp_dim
    if config.attention == "dense":
        return queries + output + keys_and_values + mlp
    branches = 1 if config.shared_kv else NUM_BRANCHES
    if config.gate == "sigmoid":
        gate = config.dim * config.num_heads * NUM_BRANCHES
    else:
        gate = config.num_kv_heads * config.head_dim * NUM_BRANCHES
    return queries + output + branches * keys_and_values + mlp + gate


def _compressor_weights(geometry: Geometry, features: int) -> int:
    """Multiplications that one block of one group costs in the learned compressor."""
    hidden = MLPCompressor.hidden_features(features)
    return geometry.compression_block_size * features * hidden + hidden * features
