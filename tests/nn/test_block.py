"""Norm, SwiGLU, gates and the residual stream."""

import torch

from trifocal.nn import Block, DenseAttention, NSAttention, RMSNorm, SigmoidGate, SwiGLU
from trifocal.testing.small_models import SMALL


def test_norm_formula_and_types():
    torch.manual_seed(0)
    norm = RMSNorm(16, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    x = 3 * torch.randn(2, 5, 16)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)
    assert norm.double()(x.double()).dtype == torch.float64


def test_norm_of_bf16_is_computed_in_fp32():
    torch.manual_seed(0)
    norm = RMSNorm(16).bfloat16()
    x = torch.randn(2, 5, 16, dtype=torch.bfloat16)
    assert torch.equal(norm(x), RMSNorm(16)(x.float()).bfloat16())


def test_norm_gives_the_type_of_the_products_that_follow():
    with torch.autocast("cpu", torch.bfloat16):
        assert RMSNorm(16)(torch.randn(2, 5, 16)).dtype == torch.bfloat16


def test_swiglu_formula():
    torch.manual_seed(0)
    mlp = SwiGLU(6, 10).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    gate = x @ mlp.gate_proj.weight.T
    expected = (gate * torch.sigmoid(gate) * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), expected, rtol=0, atol=1e-13)


def test_residual_stream_stays_fp32_under_autocast():
    attention = DenseAttention(dim=16, num_heads=2, num_kv_heads=1, head_dim=8, value_dim=8)
    block = Block(attention, dim=16, mlp_dim=24)
    with torch.autocast("cpu", torch.bfloat16):
        assert block(torch.randn(1, 4, 16)).dtype == torch.float32


def test_gates_of_each_head_and_branch_start_half_open():
    torch.manual_seed(0)
    gate = SigmoidGate(dim=64, num_heads=4)
    x = torch.randn(2, 50, 64)
    gates = gate(x)
    assert ((gates.mean((0, 1)) - 0.5).abs() < 0.1).all()
    for head in range(4):
        for branch in range(3):
            expected = torch.sigmoid(x @ gate.proj.weight[head * 3 + branch])
            torch.testing.assert_close(gates[:, :, head, branch], expected, rtol=0, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert gate(x).dtype == torch.float32


def test_swiglu_of_a_long_sequence_in_parts(monkeypatch):
    torch.manual_seed(0)
    mlp = SwiGLU(6, 10, bias=True).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    d_y = torch.randn(2, 9, 6, dtype=torch.float64)

    def results():
        y = mlp(x)
        return [y, *torch.autograd.grad(y, [x, *mlp.parameters()], d_y)]

    whole, counts = results(), []
    mlp.up_proj.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[1]))
    monkeypatch.setattr("trifocal.nn.block.MAX_TOKENS", 4)
    parts = results()
    assert counts == [4, 4, 1]
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-13)


def test_layers_of_the_meta_device_are_reset_as_those_of_pytorch():
    with torch.device("meta"):
        attention = NSAttention(
            dim=16, num_heads=2, num_kv_heads=1, head_dim=8, value_dim=8, geometry=SMALL, compressor="mlp",
            chooser="index", qk_norm=True,
        )  # fmt: skip
        block = Block(attention, 16, 32)
    block.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(torch.nan)
    for module in block.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, parameter in block.named_parameters():
        assert parameter.isfinite().all(), name
        assert not name.endswith("norm.weight") or (parameter == 1).all(), name
