"""The smallest model with every part, as the benches take it."""

from trifocal.models import ModelConfig
from trifocal.ops import Geometry

MODEL = ModelConfig(
    vocab_size=32,
    dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    value_dim=8,
    mlp_dim=16,
    geometry=Geometry(4, 2, 8, 3, 1, 1, 8),
)
