"""Models that take milliseconds, their geometries, and random tokens for them."""

from typing import Any

import torch
from torch import Tensor, nn

from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import Geometry

MINIMAL = Geometry(
    compression_block_size=16,
    compression_stride=8,
    selection_block_size=32,
    num_selected_blocks=8,
    num_initial_blocks=1,
    num_local_blocks=2,
    window_size=64,
)
"""Geometry of the model that was reported to hang at five layers."""

SMALL = Geometry(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=8,
    num_selected_blocks=3,
    num_initial_blocks=1,
    num_local_blocks=1,
    window_size=7,
)
"""So small that a short sequence passes every boundary many times, and that most blocks are not chosen."""

MIX: dict[str, Any] = {"layer_types": ("window", "selected"), "chooser": "index"}
"""The attention of the presets that we recommend, in two layers."""


def minimal_config(num_layers: int) -> ModelConfig:
    """The reported minimal model."""
    widths = {"dim": 128, "head_dim": 16, "value_dim": 16, "mlp_dim": 512}
    return small_config(vocab_size=256, num_layers=num_layers, num_heads=8, geometry=MINIMAL, **widths)


def small_config(**changes: Any) -> ModelConfig:
    """Two layers of a model that takes milliseconds."""
    sizes = {"vocab_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    widths = {"dim": 32, "head_dim": 8, "value_dim": 12, "mlp_dim": 64}
    return ModelConfig(**{"geometry": SMALL, **sizes, **widths, **changes})


def make_model(config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> DecoderLM:
    """A model with weights larger than at the start of training, so that attention is far from uniform."""
    model = DecoderLM(config)
    model.init_weights(0)
    draw_keys_apart(model)
    model.to(device, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("norm.weight", ".bias")):
                parameter.mul_(5)
    return model


@torch.no_grad()
def draw_keys_apart(model: nn.Module) -> None:
    """Give each branch its own keys, as training does; with equal ones a test would not notice a branch mistaken."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(".k_proj.weight"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)


def random_tokens(shape: tuple[int, ...], vocab_size: int, device: torch.device, seed: int = 1) -> Tensor:
    """Uniformly random tokens, the same on every device."""
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed)).to(device)
