"""The smallest model with every part, as the benches take it."""

from trifocal.ops import Geometry
from trifocal.testing.small_models import small_config

MODEL = small_config(vocab_size=32, dim=16, value_dim=8, mlp_dim=16, geometry=Geometry(4, 2, 8, 3, 1, 1, 8))
