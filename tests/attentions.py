"""The attentions that a model may have, for tests that walk all of them."""

from trifocal.models.conversion import MIX
from trifocal.nn import RopeScaling

ATTENTIONS = {
    "nsa": {},
    "selected": {"attention": "selected", "chooser": "index"},
    "window": {"attention": "window"},
    "dense": {"attention": "dense"},
    "mix": {"layer_types": MIX, "num_layers": 4, "chooser": "index"},
    "mix-unrotated": {
        "layer_types": MIX, "num_layers": 4, "chooser": "index", "unrotated_layers": (3,), "rope_theta": 5e6,
    },
    "mix-dense": {"layer_types": (*MIX[:3], "dense"), "num_layers": 4},
}  # fmt: skip
"""How each differs from three branches in two layers."""
LINEAR = RopeScaling(rope_type="linear", factor=4.0)
YARN = RopeScaling(rope_type="yarn", factor=2.0, original_max_position_embeddings=12, attention_factor=1.2)
OPTIONS = [
    {},
    {"compressor": "mlp", "shared_kv": True, "rope_scaling": LINEAR},
    {"shared_kv": True, "layer_types": ("dense", "nsa"), "unrotated_layers": (1,)},
    {"attention": "dense"},
    {"compressor": "mlp", "chooser": "index"},
    {"attention": "selected", "chooser": "index", "unrotated_layers": (1,)},
    {
        "layer_types": ("window", "selected"), "sliding_window": 11, "rope_scaling": YARN,
        **dict.fromkeys(("qk_norm", "qkv_bias", "o_bias", "mlp_bias"), True),
    },
    {
        "layer_types": ("window", "nsa"), "unscaled_layers": (0,), "rope_scaling": LINEAR,
        **dict.fromkeys(("norm_after", "qk_norm", "qk_norm_all_heads", "tie_embeddings"), True),
    },
]  # fmt: skip
"""Models that have together every option of an attention and of the layer around it, one in more than one company."""
TRAINED_OPTIONS = [*OPTIONS, {"layer_types": ("nsa", "selected"), "selection": "random", "rope_scaling": YARN}]
"""And one that is for training only."""


def flags(changes):
    """Changes of a model as flags of the command."""
    words = []
    for name, value in changes.items():
        words += [f"--model.{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return words
