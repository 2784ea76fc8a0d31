"""The products and the draw of a decode step on a GPU: as exact as PyTorch's, equal bits for any number of rows."""

import pytest
import torch
from torch.nn import functional

from tests.ops_triton.problems import FACTOR
from trifocal.inference.sampler import Sampling, SamplingTensors, draw_step
from trifocal.ops import devices
from trifocal.ops.decode.linear import Norm, Residual, embedding, normed_linear, normed_swiglu, residual_linear
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
    unnormed, _ = normed_linear(residual, None, weights["qkv"], weights["bias"], num_sigmoids=36, backend="triton")
    found = {"out": out, "gates": gates, "hidden": hidden, "unnormed": unnormed}
    return found | {"after": after.x, "squares": after.sum_of_squares}


def torchs(x, weights, dtype):
    normed = functional.rms_norm(x, x.shape[1:], weights["norm"].to(x.dtype), EPS).to(dtype)
    linear = {name: weight.to(dtype) for name, weight in weights.items()}
    out = functional.linear(normed, linear["qkv"], linear["bias"])
    gate, up = functional.linear(normed, linear["gate_up"]).chunk(2, -1)
    hidden = functional.silu(gate) * up
    after = x + functional.linear(hidden, linear["down"])
    gates = out[:, -36:].to(x.dtype).sigmoid()
    unnormed = functional.linear(x.to(dtype), linear["qkv"], linear["bias"])[:, :-36]
    return {"out": out[:, :-36], "gates": gates, "hidden": hidden, "unnormed": unnormed, "after": after}


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
    # Tiles of 8, 16 and 32 rows, full and cut.
    for first, rows in ((0, 1), (3, 8), (40, 9), (8, 16), (60, 17), (7, 33), (100, 64), (5, 200)):
        last = first + rows
        residual = embedding(torch.arange(first, last, device="cuda"), table, "triton")
        alone = run(Residual(*(part.contiguous() for part in residual)), weights)
        for name, value in alone.items():
            assert torch.equal(value, together[name][first:last]), (name, first, last)


def chain(weights, table, tokens, layers):
    """Layers that each read at once what the kernel before wrote; with two, all results, else only the last layer's.

    Then the memory of a result is soon that of another one, which must not be written while it is still read.
    """
    residual = embedding(tokens, table, "triton")
    results = []
    for _ in range(layers):
        result = run(residual, weights)
        residual = Residual(result["after"], result["squares"])
        results = [*(results if layers == 2 else []), *result.values()]
    return results


@pytest.mark.parametrize("layers", [2, 12])
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_dependent_launches_give_the_bits_of_plain_ones_in_every_replay(monkeypatch, rows, layers):
    """The tokens change between replays: a kernel that does not wait would read what the last replay left."""
    weights, table = layer(SIZES[0], torch.bfloat16), draw(600, SIZES[0][0], dtype=torch.bfloat16, seed=5)
    tokens = torch.arange(rows, device="cuda")
    others = [torch.arange(first, first + rows, device="cuda") for first in (0, 100)]
    with monkeypatch.context() as patched:
        patched.setattr(devices, "has_dependent_launch", lambda device: False)
        expected = [[x.clone() for x in chain(weights, table, other, layers)] for other in others]
    chain(weights, table, tokens, layers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(weights, table, tokens, layers)
    for replay in range(200):
        tokens.copy_(others[replay % 2])
        graph.replay()
        assert all(map(torch.equal, found, expected[replay % 2])), replay


@pytest.mark.parametrize("vocab_size", [257, 4000, 50_000])
def test_draws(vocab_size):
    """Plain and filtered sequences: tokens and log-probabilities of the PyTorch draw, bit for bit, in any company."""
    samplings = (
        Sampling(seed=1), Sampling(temperature=0), Sampling(temperature=0.7, seed=-5, repetition_penalty=1.3),
        Sampling(top_k=30, seed=3), Sampling(top_p=0.6, seed=4), Sampling(min_p=0.2, temperature=2.0, seed=5),
    )  # fmt: skip
    count, plain = len(samplings), slice(3)
    logits = 2 * draw(count, vocab_size, dtype=torch.float32)
    logits[5, 20] = torch.nan

    def books():
        settings = SamplingTensors.empty(count, vocab_size, logits.device)
        for row, sampling in enumerate(samplings):
            settings.set_row(row, sampling, torch.arange(row, vocab_size, 3, device="cuda"))
        return settings, torch.zeros(count, 2, dtype=torch.float64, device="cuda")

    for length in range(20):
        drawn = []
        for backend, rows in (("reference", slice(count)), ("triton", slice(count)), ("triton", plain)):
            settings, found = books()
            lengths = torch.full((count,), length, dtype=torch.int32, device="cuda")
            tokens = torch.empty(count, dtype=torch.int64, device="cuda")
            draw_step(
                logits[rows], settings.rows(rows), lengths[rows], torch.ones_like(lengths)[rows], tokens[rows],
                found[rows], filtered=rows != plain, backend=backend,
            )  # fmt: skip
            assert lengths[rows].eq(length + 1).all()
            assert torch.equal(tokens[rows], found[rows, 0].long().clamp(min=0))
            drawn.append(found[rows].nan_to_num(7.0))
        assert torch.equal(drawn[1], drawn[0])
        assert torch.equal(drawn[2], drawn[1][plain])
