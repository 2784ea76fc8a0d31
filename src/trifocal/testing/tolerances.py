"""The one source of allowed errors: the error of PyTorch's own attention in the same precision.

`error(actual, exact)` is the largest absolute difference over the largest exact value, or over 1 where everything
is smaller: inputs and gradients of outputs are unit-normal, so 1 is the natural size of outputs and gradients, and
a tensor of zeros (the gradient of a softmax over one key) does not turn rounding into an infinite error.

`allowed(dtype, device)` measures, once a process, the worst `error` of `scaled_dot_product_attention` (its plain math
path) against float64 on the same rounded inputs, over output and every gradient. An NSA output adds up three
attentions, so it is allowed three times that. float64 is compared with another float64
result, and both round: its bound is twice float32's, scaled by the ratio of the two machine epsilons.
"""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from trifocal.testing.inputs import Inputs

BRANCHES = 3
FULL_COVERAGE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Largest difference of sparse attention that covers everything from dense attention: fixed, not measured."""
SHAPES = ((33, 4, 4, 8), (97, 6, 2, 16), (257, 8, 1, 64))
"""Length, query heads, KV heads, dim: as long as the inputs of tests are, grouped and not, small and large dims."""
CPU = torch.device("cpu")


def error(actual: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest exact value or 1; NaN in `actual` is an infinite error."""
    if actual.shape != exact.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}")
    if exact.numel() == 0:
        return 0.0
    exact = exact.detach().double()
    actual = actual.detach().to(exact.device).double()
    same_infinity = actual.isinf() & (actual == exact)
    difference = (actual - exact).abs().masked_fill(same_infinity, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    finite = exact.masked_fill(~exact.isfinite(), 0.0)
    return difference.max().item() / max(1.0, finite.abs().max().item())


def output_and_gradients(o: Tensor, inputs: Inputs, rounded_to: torch.dtype | None = None) -> dict[str, Tensor]:
    """An output, and the gradients of the inputs for the same random gradient of it, by name; of an exact side, that
    gradient is `rounded_to` the other's type first.
    """
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(0))
    d_o = d_o.to(rounded_to or o.dtype).to(o.device, o.dtype)
    names = "o", *(f"the gradient of {name}" for name in Inputs._fields)
    return dict(zip(names, (o.detach(), *torch.autograd.grad(o, inputs, d_o)), strict=True))


def errors(actual: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """The error of each tensor, by name."""
    return {name: error(actual[name], exact[name]) for name in exact}


@functools.cache
def cost_in_torch(dtype: torch.dtype, device: torch.device = CPU) -> float:
    """Worst error of PyTorch's attention, output and gradients, in one precision."""
    if dtype == torch.float64:
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return 2 * cost_in_torch(torch.float32, device) * ratio
    worst = 0.0
    for length, num_heads, num_kv_heads, dim in SHAPES:
        generator = torch.Generator().manual_seed(length)
        q, d_o = (torch.randn(1, num_heads, length, dim, generator=generator) for _ in range(2))
        k, v = (torch.randn(1, num_kv_heads, length, dim, generator=generator) for _ in range(2))
        rounded = [x.to(device, dtype) for x in (q, k, v, d_o)]
        got, exact = _attention_and_gradients(*rounded), _attention_and_gradients(*(x.double() for x in rounded))
        worst = max(worst, *(error(a, e) for a, e in zip(got, exact, strict=True)))
    return worst


def _attention_and_gradients(q: Tensor, k: Tensor, v: Tensor, d_o: Tensor) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return [o, *torch.autograd.grad(o, (q, k, v), d_o)]


def allowed(dtype: torch.dtype, device: torch.device = CPU) -> float:
    """The error that a result computed in `dtype` on `device` may have."""
    return BRANCHES * cost_in_torch(dtype, device)


def assert_close(name: str, actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Compare `actual`, computed in `dtype`, with `exact`: AssertionError if it is farther off than is `allowed`."""
    found, bound = error(actual, exact), allowed(dtype)
    if not found <= bound:
        raise AssertionError(f"{name} in {dtype}: error {found:.3g}, allowed {bound:.3g}")
