"""Layers of every type in one model on a GPU: the kernels give the reference's loss and gradients, compiled too."""

from dataclasses import replace

import pytest
import torch

from tests.devices import QUIET_GPU
from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import Documents, Geometry
from trifocal.testing.small_models import make_model, random_tokens

pytestmark = list(QUIET_GPU)

CUDA = torch.device("cuda")
# Heads as in the production model; sequences have more blocks than are selected.
CONFIG = ModelConfig(
    vocab_size=257, dim=128, num_layers=4, num_heads=12, num_kv_heads=2, head_dim=64, value_dim=64, mlp_dim=256,
    layer_types=("dense", "selected", "window", "nsa"), geometry=Geometry(num_selected_blocks=6),
)  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kernels_give_the_references_loss(precision, packed):
    tokens = random_tokens((1, 2048), 257, CUDA)
    documents = Documents.from_cu_seqlens(torch.tensor([0, 900, 901, 2048]), 2048).to(CUDA) if packed else None
    found = {}
    for name, backend in (("reference", "reference"), ("kernels", "auto"), ("compiled", "auto")):
        config = replace(CONFIG, backend=backend)
        # Large weights tell layers apart, but pass a rounding to 8 bits on a hundred times as large: the reference's
        # own gradient then changes by 4 %.
        model = (make_model(config, CUDA) if precision == "fp32" else first_model(config)).train()
        if name == "compiled":
            model.compile_training()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = model(tokens, tokens.roll(-1, 1), cu_seqlens=documents)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        found[name] = float(loss.detach()), norm
    # Where scores are rounded, another block may be chosen here and there.
    loss_bound, norm_bound = (1e-4, 2e-3) if precision == "fp32" else (1e-3, 5e-3)
    for name in ("kernels", "compiled"):
        assert found[name][0] == pytest.approx(found["reference"][0], rel=loss_bound)
        torch.testing.assert_close(found[name][1], found["reference"][1], rtol=norm_bound, atol=0.0)


def first_model(config):
    """A model as training begins with it."""
    model = DecoderLM(config)
    model.init_weights(0)
    return model.to(CUDA)
