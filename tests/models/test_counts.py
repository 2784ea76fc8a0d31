"""Counts by formula against the model itself and against PyTorch's counter of matrix products."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trifocal.models import DecoderLM, ModelConfig, flops_per_token
from trifocal.models.counts import compressed_keys, selected_keys, window_keys
from trifocal.ops import Geometry

OPTIONS = [
    {"shared_kv": True, "num_layers": 3},
    {"compressor": "mlp", "tie_embeddings": True},
    {"attention": "dense", "tie_embeddings": True, "qk_norm": True, "o_bias": True},
    {"attention": "window", "sliding_window": 9, "qkv_bias": True, "mlp_bias": True},
    {"attention": "selected", "qk_norm": True, "head_dim": 24},
    {"layer_types": ("dense", "nsa"), "qk_norm": True, "qk_norm_all_heads": True, "norm_after": True, "qkv_bias": True},
]


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(4, 2, 8, 3, 1, 1, 7),
        Geometry(4, 4, 4, 2, 0, 2, 1),
        Geometry(8, 4, 8, 2, 1, 0, 20),
        Geometry(),
    ],
    ids=str,
)
def test_keys_of_the_branches_sum_over_positions(geometry):
    expected = 0
    for position in range(1500):
        window = window_keys(geometry.window_size, position)
        assert compressed_keys(geometry, position) + selected_keys(geometry, position) + window == expected
        expected += geometry.keys_read_per_step(position)


def counted_flops(model, tokens):
    """PyTorch's count of the forward pass, and of forward and backward together."""
    with FlopCounterMode(display=False) as forward:
        loss = model(tokens, tokens)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


def attention_tiles(config, kind, length):
    """Pairs of query and key that the code multiplies in one layer: whole tiles, masked afterwards."""
    if kind == "nsa":
        return length * (2 * length + config.geometry.num_compressed_blocks(length))
    return length * length


def attention_pairs(config, kind, length):
    """Pairs of query and key that the mathematics needs in one layer."""
    geometry, positions = config.geometry, range(length)
    window = config.sliding_window or geometry.window_size
    every = sum(geometry.keys_read_per_step(position) for position in positions)
    compressed = sum(geometry.num_compressed_blocks(position + 1) for position in positions)
    return {
        "nsa": every,
        "dense": length * (length + 1) // 2,
        "window": sum(min(position + 1, window) for position in positions),
        "selected": every - compressed - sum(min(position + 1, geometry.window_size) for position in positions),
    }[kind]


def choosing_excess(config, kind, length):
    """Operations of a head for selected attention's choice: those of the code less those of the formula."""
    if kind != "selected":
        return 0
    blocks = config.geometry.num_compressed_blocks
    needed = config.head_dim * sum(blocks(position + 1) for position in range(length))
    return 2 * ((config.head_dim + min(16, config.head_dim)) * length * blocks(length) - needed)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_flops_match_the_counter(make_config, options):
    config = make_config(**options)
    batch, length = 2, 48
    with sdpa_kernel(SDPBackend.MATH):
        forward, training = counted_flops(DecoderLM(config), torch.randint(31, (batch, length)))

    formula = flops_per_token(config, length)
    # The formula counts needed pairs, the counter whole tiles: exchange one for the other, all else must agree.
    heads, kinds = batch * config.num_heads, config.attention_of_layers
    excess = heads * sum(attention_tiles(config, k, length) - attention_pairs(config, k, length) for k in kinds)
    choosing = heads * sum(choosing_excess(config, kind, length) for kind in kinds)
    pair_forward = 2 * (config.head_dim + config.value_dim)
    executed = formula.executed_forward * batch * length
    assert forward == pytest.approx(executed + pair_forward * excess + choosing, rel=1e-12)

    expected_training = formula.executed_training * batch * length + 3 * pair_forward * excess + choosing
    # Our backward makes the scores again: one more product of D for every pair of the tiles.
    again = heads * sum(attention_tiles(config, kind, length) for kind in kinds if kind != "dense")
    assert training == pytest.approx(expected_training + 2 * config.head_dim * again, rel=1e-12)


def test_dense_equivalent_is_the_dense_baseline(make_config):
    sparse = flops_per_token(make_config(), 500)
    dense = flops_per_token(make_config(attention="dense"), 500)
    assert sparse.dense_equivalent_forward == dense.executed_forward == dense.dense_equivalent_forward
    assert sparse.dense_equivalent_training == dense.executed_training == 3 * dense.executed_forward
    assert sparse.executed_training == 3 * sparse.executed_forward


@pytest.mark.parametrize("options", [{}, {"attention": "dense"}, {"compressor": "mlp"}, {"chooser": "index"}], ids=str)
def test_packed_documents_count_as_sequences_of_their_own(make_config, options):
    config, lengths = make_config(**options), [70, 3, 200]
    apart = sum(length * flops_per_token(config, length).executed_training for length in lengths)
    assert flops_per_token(config, lengths).executed_training == pytest.approx(apart / sum(lengths), rel=1e-12)


@pytest.mark.parametrize(("length", "message"), [(0, "at least 1, got 0"), (2.5, "an integer, got 2.5")])
def test_a_length_must_be_a_positive_integer(length, message):
    with pytest.raises(ValueError, match=f"sequence_length must be {message}"):
        flops_per_token(ModelConfig(), length)


def test_an_index_is_counted(make_config):
    """Its weights, and its products with the keys of all tokens up to each, which no gradient goes back through."""
    length, without, index = 99, make_config(), make_config(chooser="index")
    pairs = length * (length + 1) // 2
    heads = index.num_layers * index.num_kv_heads
    weights, scores = (heads + index.num_layers) * 2 * index.dim * 64, heads * 2 * 64 * pairs / length
    before, after = flops_per_token(without, length), flops_per_token(index, length)
    assert after.executed_forward - before.executed_forward == pytest.approx(weights + scores, rel=1e-12)
    assert after.executed_training - before.executed_training == pytest.approx(3 * weights + scores, rel=1e-12)
