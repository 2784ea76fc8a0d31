"""A sparse model trains under bf16 autocast on a CPU as it does in fp32, with fp32 weights and gradients."""

import pytest
import torch

from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import Geometry
from trifocal.testing.tolerances import cost_in_torch

CONFIG = ModelConfig(
    vocab_size=257,
    dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    value_dim=16,
    mlp_dim=128,
    geometry=Geometry(8, 4, 16, 3, 1, 1, 24),
)
STEPS = 12


def losses(bf16: bool, checkpointing: bool = False, num_rows: int = 2, steps: int = STEPS) -> list[float]:
    model = DecoderLM(CONFIG)
    model.init_weights(0)
    if checkpointing:
        model.set_activation_checkpointing(0, CONFIG.num_layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = torch.randint(0, CONFIG.vocab_size, (num_rows, 97), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(p.dtype == p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.fixture(scope="module")
def in_bf16() -> list[float]:
    return losses(True)


def test_it_learns_as_in_fp32(in_bf16: list[float]) -> None:
    # Before the first update only the arithmetic differs; a mean over many tokens errs less than one attention does.
    (first,), (exact,) = losses(True, num_rows=16, steps=1), losses(False, num_rows=16, steps=1)
    assert abs(first - exact) <= cost_in_torch(torch.bfloat16)
    assert first != exact, "the forward pass did not run in bf16"
    in_fp32 = losses(False)
    assert in_fp32[-1] < 0.2 * in_fp32[0]
    assert abs(in_bf16[-1] - in_fp32[-1]) < 0.05 * in_fp32[0]


def test_checkpointing_changes_no_bit(in_bf16: list[float]) -> None:
    assert losses(True, checkpointing=True) == in_bf16
