"""Small models, deep enough to tell their layers apart."""

import pytest
import torch

from tests.devices import WIDE
from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import Geometry
from trifocal.testing.small_models import draw_keys_apart, small_config


@pytest.fixture
def make_config():
    """A small configuration, changed by keywords."""
    return lambda **changes: small_config(**{"vocab_size": 31, "dim": 24, "value_dim": 6, "mlp_dim": 40} | changes)


@pytest.fixture
def make_model(make_config):
    """A small fp64 model, changed by keywords; weights large enough for attention to be far from uniform."""

    def make(**changes):
        model = DecoderLM(make_config(**changes))
        model.init_weights(0)
        draw_keys_apart(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "attention." in name and parameter.ndim > 1:
                    parameter.mul_(2)
                elif parameter.ndim == 1 and ".gate." not in name:
                    # Norms and biases that matter.
                    parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
        return model.double()

    return make


def gpu_model():
    """Two layers with the kernels, of the widths of training."""
    config = ModelConfig(vocab_size=257, num_layers=2, geometry=Geometry(), backend="triton", **WIDE)
    model = DecoderLM(config).cuda()
    model.init_weights(0)
    draw_keys_apart(model)
    return model


def gpu_tokens(batch=2):
    return torch.randint(257, (batch, 1100), generator=torch.Generator().manual_seed(0)).cuda()
