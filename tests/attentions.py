"""The attentions that a model may have, for tests that walk all of them."""

from trifocal.models.conversion import MIX

ATTENTIONS = {
    "nsa": {},
    "selected": {"attention": "selected", "chooser": "index"},
    "window": {"attention": "window"},
    "dense": {"attention": "dense"},
    "mix": {"layer_types": MIX, "num_layers": 4, "chooser": "index"},
    "mix-dense": {"layer_types": (*MIX[:3], "dense"), "num_layers": 4},
}
"""How each differs from three branches in two layers."""


def flags(changes):
    """Changes of a model as flags of the command."""
    words = []
    for name, value in changes.items():
        words += [f"--model.{name}", *(value if isinstance(value, tuple) else [str(value)])]
    return words
