"""The model's configuration: refused values, and the way through plain values and back."""

from dataclasses import replace

import pytest

from trifocal.errors import UserError
from trifocal.models import ModelConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 4}, "num_heads must be a multiple of model.num_kv_heads, got 6 and 4"),
        ({"head_dim": 5}, "head_dim must be even for rotary positions, got 5"),
        ({"vocab_size": 0}, "model.vocab_size must be at least 1, got 0"),
        ({"dim": 12.5}, "model.dim must be an integer, got 12.5"),
        ({"attention": "sparse"}, "model.attention must be one of 'nsa', 'selected', 'window', 'dense', got 'sparse'"),
        ({"layer_types": ("nsa", "dense", "nsa")}, "or of a few that repeat: their number must divide 2 layers, got 3"),
        ({"sliding_window": -1}, "sliding_window must be at least 0, got -1"),
        ({"sliding_window": 2**31}, "sliding_window must be at most 2147483647, got 2147483648"),
        ({"selection": "all"}, "model.selection must be one of 'importance', 'exact', 'random', got 'all'"),
        ({"unrotated_layers": (2,)}, "unrotated_layers must be layers from 0 to 1, got "),
        ({"qk_norm": "yes"}, "model.qk_norm must be true or false, got 'yes'"),
        ({"qk_norm_all_heads": True}, "model.qk_norm_all_heads needs model.qk_norm = true, got false"),
        ({"rope_theta": 0.0}, "model.rope_theta must be positive, got 0.0"),
        ({"norm_eps": float("nan")}, "model.norm_eps must be a finite number, got nan"),
    ],
)
def test_bad_values_are_named(make_config, changes, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        make_config(**changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layer": 2}, 'unknown key "model.num_layer"; the nearest valid one is "model.num_layers"'),
        (
            {"geometry": {"window": 3}},
            'unknown key "model.geometry.window"; the nearest valid one is "model.geometry.window_size"',
        ),
        ({"geometry": {"window_size": 0}}, "Geometry.window_size must be at least 1, got 0"),
        ({"geometry": 3}, "model.geometry must be a table, got 3"),
    ],
)
def test_bad_keys_are_named(values, message):
    with pytest.raises(UserError, match=message):
        ModelConfig.from_dict(values)


def test_few_types_of_layers_repeat():
    config = ModelConfig(num_layers=8, layer_types=("window", "window", "window", "selected"))
    assert config.attention_of_layers == ("window", "window", "window", "selected") * 2
    assert config.to_dict()["layer_types"] == [*config.attention_of_layers]
    assert ModelConfig.from_dict(config.to_dict()) == config
    # Without its own size a window layer has that of the geometry.
    assert [replace(config, sliding_window=size).window_of_layers for size in (0, 9)] == [512, 9]
