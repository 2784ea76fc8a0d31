"""The products of a decode step on a GPU: as exact as PyTorch's, and equal bits for any number of rows."""

import pytest
import torch
from torch.nn import functional

from tests.gpu.cases import FACTOR
from trifocal.ops.decode_linear import Norm, Residual, embedding, normed_linear, normed_swiglu, residual_linear
from trifocal.testing.tolerances import error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

EPS = 1e-6
# Width of the residual stream, columns of queries, keys, values and gates, hidden width of the MLP; the last are odd.
SIZES = ((768, 1572, 2048), (4096, 6336, 11008), (200, 333, 150))


def draw(*shape, dtype, scale=1.0, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, device="cuda")).to(dtype)


def layer(sizes, dtype):
    width, columns, hidden = sizes
    return {
        "norm": draw(width, dtype=torch.float32),
        "qkv": draw(columns, width, dtype=dtype, scale=width**-0.5, seed=1),
        "bias": draw(columns, dtype=dtype, seed=2),
        "gate_up": draw(2 * hidden, width, dtype=dtype, scale=width**-0.5, seed=3),
        "down": draw(width, hidden, dtype=dtype, scale=hidden**-0.5, seed=4),
    }


def run(residual, weights):
    norm = Norm(weights["norm"], EPS)
    out, gates = normed_linear(residual, norm, weights["qkv"], weights["bias"], num_sigmoids=36, backend="triton")
    hidden = normed_swiglu(residual, norm, weights["gate_up"], backend="triton")
    after = residual_linear(hidden, weights["down"], residual, backend="triton")
    return {"out": out, "gates": gates, "hidden": hidden, "after": after.x, "squares": after.squares}


def torchs(x, weights, dtype):
    normed = functional.rms_norm(x, x.shape[1:], weights["norm"].to(x.dtype), EPS).to(dtype)
    linear = {name: weight.to(dtype) for name, weight in weights.items()}
    out = functional.linear(normed, linear["qkv"], linear["bias"])
    gate, up = functional.linear(normed, linear["gate_up"]).chunk(2, -1)
    hidden = functional.silu(gate) * up
    after = x + functional.linear(hidden, linear["down"])
    gates = out[:, -36:].to(x.dtype).sigmoid()
    return {"out": out[:, :-36], "gates": gates, "hidden": hidden, "after": after}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_values(sizes, dtype):
    weights = layer(sizes, dtype)
    residual = embedding(torch.arange(70, device="cuda"), draw(70, sizes[0], dtype=dtype, seed=5), "triton")
    got = run(residual, weights)
    plain = torchs(residual.x, weights, dtype)
    exact = torchs(residual.x.double(), weights, torch.float64)
    for name, value in plain.items():
        assert error(got[name], exact[name]) <= FACTOR * max(error(value, exact[name]), torch.finfo(dtype).eps), name
    assert error(got["squares"].sum(1), got["after"].square().sum(1)) < 1e-5


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equal_bits_for_any_number_of_rows(sizes, dtype):
    weights = layer(sizes, dtype)
    table = draw(600, sizes[0], dtype=dtype, seed=5)
    together = run(embedding(torch.arange(600, device="cuda"), table, "triton"), weights)
    for first, last in ((0, 1), (3, 11), (100, 164), (530, 600), (5, 500)):
        residual = embedding(torch.arange(first, last, device="cuda"), table, "triton")
        alone = run(Residual(*(part.contiguous() for part in residual)), weights)
        for name, value in alone.items():
            assert torch.equal(value, together[name][first:last]), (name, first, last)
