"""How exact a result must be: derived from what the same precision costs PyTorch's own attention, here and now."""

import functools

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from trifocal.checks.seeds import Inputs

FULL_COVERAGE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""What sparse attention that covers everything may differ from dense attention: fixed, not measured."""
BRANCHES = 3


def error(actual: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest exact value, or to 1 where everything is smaller.

    Inputs here are unit-normal, so 1 is the natural size. NaN where it should not be is an infinite error.
    """
    if actual.shape != exact.shape:
        return float("inf")
    if exact.numel() == 0:
        return 0.0
    actual, exact = (x.detach().cpu().double() for x in (actual, exact))
    difference = torch.where(actual == exact, 0.0, (actual - exact).abs()).nan_to_num(nan=torch.inf)
    size = exact.masked_fill(~exact.isfinite(), 0.0).abs().max().item()
    return difference.max().item() / max(1.0, size)


def errors_with_gradients(o: Tensor, inputs: Inputs, o_exact: Tensor, exact: Inputs) -> dict[str, float]:
    """Errors of an output, and of all its inputs' gradients for the same random gradient of the output, by name."""
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(0)).to(o.device, o.dtype)
    actual = o, *torch.autograd.grad(o, inputs, d_o)
    expected = o_exact, *torch.autograd.grad(o_exact, exact, d_o.to(o_exact.device, o_exact.dtype))
    names = "o", *(f"the gradient of {name}" for name in Inputs._fields)
    return {name: error(a, e) for name, a, e in zip(names, actual, expected, strict=True)}


@functools.cache
def allowed_error(dtype: torch.dtype, device: torch.device) -> float:
    """Three times the worst error, over output and gradients, of PyTorch's attention in this precision.

    Three, because Native Sparse Attention adds up three attentions. float64 has no exact partner here; its bound is
    `FULL_COVERAGE`'s.
    """
    worst = 0.0
    for length, num_heads, num_groups, dim in ((33, 4, 4, 8), (97, 6, 2, 16), (257, 8, 1, 64)):
        generator = torch.Generator().manual_seed(length)
        shapes = [(1, num_heads, length, dim), *[(1, num_groups, length, dim)] * 2, (1, num_heads, length, dim)]
        inputs = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
        pairs = zip(_attention(*inputs), _attention(*(x.cpu().double() for x in inputs)), strict=True)
        worst = max(worst, *(error(actual, exact) for actual, exact in pairs))
    return BRANCHES * worst


def _attention(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return [o, *torch.autograd.grad(o, (q, k, v), upstream)]
