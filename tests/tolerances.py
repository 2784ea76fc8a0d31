"""The one place where an allowed error comes from: what the same precision costs PyTorch's own attention.

`error(actual, exact)` is the largest absolute difference over the largest exact value, or over 1 where everything
is smaller: tests draw unit-normal inputs and cotangents, so 1 is the natural size of outputs and gradients, and
a tensor of zeros (the gradient of a softmax over one key) does not turn rounding into an infinite error.

`allowed(dtype)` measures, once a process, the worst `error` of `scaled_dot_product_attention` (its plain math
path) against float64 on the same rounded inputs, over output and every gradient. An NSA output adds up three
attentions, so it is allowed three times that. float64 is compared with another float64
result, and both round: its bound is twice float32's, scaled by the ratio of the two machine epsilons.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BRANCHES = 3
# Full coverage against dense attention: fixed by the project's specification, not measured.
FULL_COVERAGE = {torch.float32: 1e-5, torch.float64: 1e-12}
# (length, query heads, KV heads, dim): as long as the tests' inputs are, grouped and not, small and large dims.
SHAPES = ((33, 4, 4, 8), (97, 6, 2, 16), (257, 8, 1, 64))


def error(actual: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest exact value or 1; NaN in `actual` is an infinite error."""
    if actual.shape != exact.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}")
    if exact.numel() == 0:
        return 0.0
    actual, exact = actual.detach().cpu().double(), exact.detach().cpu().double()
    same_infinity = actual.isinf() & (actual == exact)
    difference = (actual - exact).abs().masked_fill(same_infinity, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    finite = exact.masked_fill(exact.isinf(), 0.0)
    return difference.max().item() / max(1.0, finite.abs().max().item())


@functools.cache
def cost_in_torch(dtype: torch.dtype) -> float:
    """Worst error of PyTorch's attention, output and gradients, in one precision."""
    if dtype == torch.float64:
        return 2 * cost_in_torch(torch.float32) * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    worst = 0.0
    for length, num_heads, num_groups, dim in SHAPES:
        generator = torch.Generator().manual_seed(length)
        q, cotangent = (torch.randn(1, num_heads, length, dim, generator=generator) for _ in range(2))
        k, v = (torch.randn(1, num_groups, length, dim, generator=generator) for _ in range(2))
        rounded = [tensor.to(dtype) for tensor in (q, k, v, cotangent)]
        got, exact = attention_and_gradients(*rounded), attention_and_gradients(*(t.double() for t in rounded))
        worst = max(worst, *(error(a, e) for a, e in zip(got, exact, strict=True)))
    return worst


def attention_and_gradients(q: Tensor, k: Tensor, v: Tensor, cotangent: Tensor) -> list[Tensor]:
    inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        output = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    return [output, *torch.autograd.grad(output, inputs, cotangent)]


def allowed(dtype: torch.dtype) -> float:
    """The error that a result computed in `dtype` may have."""
    return BRANCHES * cost_in_torch(dtype)


def assert_close(name: str, actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Fail with the name, the error and the bound if `actual`, computed in `dtype`, is too far from `exact`."""
    found, bound = error(actual, exact), allowed(dtype)
    assert found <= bound, f"{name} in {dtype}: error {found:.3g}, allowed {bound:.3g}"
