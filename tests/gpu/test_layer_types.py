"""Layers of every type in one model on a GPU: the kernels give the reference's loss and gradients, compiled too."""

from dataclasses import replace

import pytest
import torch

from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import Documents, Geometry
from trifocal.testing.small_models import make_model, random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of the compiler itself, and of the mode that finds waits.
    pytest.mark.filterwarnings("ignore"),
]

CUDA = torch.device("cuda")
# Heads as in the production model; sequences have more blocks than are selected.
CONFIG = ModelConfig(
    vocab_size=257, dim=128, num_layers=4, num_heads=12, num_kv_heads=2, head_dim=64, value_dim=64, mlp_dim=256,
    layer_types=("dense", "selected", "window", "nsa"), geometry=Geometry(num_selected_blocks=6),
)  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_kernels_give_the_references_loss(packed: bool) -> None:
    tokens = random_tokens((1, 2048), 257, CUDA)
    documents = Documents.from_cu_seqlens(torch.tensor([0, 900, 901, 2048]), 2048).to(CUDA) if packed else None
    found: dict[str, tuple[float, torch.Tensor]] = {}
    for name, backend in (("reference", "reference"), ("kernels", "auto"), ("compiled", "auto")):
        model: DecoderLM = make_model(replace(CONFIG, backend=backend), CUDA).train()
        if name == "compiled":
            model.compile_training()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(tokens, tokens.roll(-1, 1), cu_seqlens=documents)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        found[name] = float(loss.detach()), norm
    for name in ("kernels", "compiled"):
        # Where scores are rounded to 8 bits, another block may be chosen here and there.
        assert found[name][0] == pytest.approx(found["reference"][0], rel=5e-3)
        torch.testing.assert_close(found[name][1], found["reference"][1], rtol=0.05, atol=0.0)
