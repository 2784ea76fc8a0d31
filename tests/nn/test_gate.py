"""Gates: shapes, ranges, how they start, and their precision."""

import torch

from trifocal.nn import SigmoidGate


def test_sigmoid_gates_are_per_head_and_start_open() -> None:
    torch.manual_seed(0)
    gate = SigmoidGate(dim=64, num_heads=4)
    gates = gate(torch.randn(2, 50, 64))
    assert gates.shape == (2, 50, 4, 3)
    assert ((gates > 0) & (gates < 1)).all()
    assert ((gates.mean((0, 1)) - 0.5).abs() < 0.1).all()


def test_sigmoid_gate_formula() -> None:
    torch.manual_seed(0)
    gate = SigmoidGate(dim=8, num_heads=2).double()
    torch.nn.init.normal_(gate.proj.bias)
    x = torch.randn(1, 3, 8, dtype=torch.float64)
    gates = gate(x)
    for head in range(2):
        for branch in range(3):
            row = head * 3 + branch
            expected = torch.sigmoid(x @ gate.proj.weight[row] + gate.proj.bias[row])
            torch.testing.assert_close(gates[:, :, head, branch], expected, rtol=0, atol=1e-14)


def test_gates_are_fp32_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert SigmoidGate(8, 2)(torch.randn(1, 3, 8)).dtype == torch.float32
