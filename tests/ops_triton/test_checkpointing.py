"""Activation checkpointing of layers whose operators are kernels."""

import torch

from trifocal.models import DecoderLM, ModelConfig
from trifocal.models.choice_teaching import ChoiceTeaching
from trifocal.ops import Geometry
from trifocal.ops.triton import choice_loss as kernels

LAYERS, LENGTH = 1, 64


def test_the_loss_of_an_index_is_kept(device, monkeypatch):
    """It is made once; loss, recall and gradients are those without checkpointing."""
    model = DecoderLM(
        ModelConfig(
            num_layers=LAYERS, dim=32, num_heads=2, num_kv_heads=1, head_dim=16, value_dim=16, mlp_dim=32,
            vocab_size=64, chooser="index", geometry=Geometry(8, 4, 16, 3, 1, 1, 8),
        )
    )  # fmt: skip
    model.init_weights(0)
    model.to(device)
    for block in model.blocks:
        block.attention.backend = "triton"
    tokens = torch.randint(64, (1, LENGTH), generator=torch.Generator().manual_seed(0)).to(device)
    calls = []
    forward = kernels.index_loss_forward
    monkeypatch.setattr(kernels, "index_loss_forward", lambda *args: calls.append(1) or forward(*args))

    def taught(last):
        model.set_activation_checkpointing(0, last)
        model.zero_grad()
        step = torch.zeros((), dtype=torch.int64, device=device)
        scales, totals = torch.ones(LAYERS, device=device), torch.zeros(LAYERS, 2, device=device)
        teaching = ChoiceTeaching(step, scales, totals, row_length=LENGTH, stretch=7)
        model(tokens, tokens, teaching=teaching).backward()
        return [totals, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    plain = taught(0)
    assert len(calls) == LAYERS and plain[0].all()
    kept = taught(LAYERS)
    assert len(calls) == 2 * LAYERS
    torch.testing.assert_close(kept, plain, rtol=1e-5, atol=1e-6)
