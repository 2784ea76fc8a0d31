"""The products of a decode step, interpreted and by the reference: against float64, and equal bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from trifocal.ops.decode.linear import Norm, Residual, embedding, normed_linear, normed_swiglu, residual_linear
from trifocal.testing.tolerances import error

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on a GPU")

EPS = 1e-6
# A product of 70 or 135 numbers in fp32; both sides round.
BOUND = 2e-6
WIDTH = 135  # One step of the kernel in fp32 is 32: the last one is cut.
both_backends = pytest.mark.parametrize("backend", ["reference", "triton"])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stream(rows: int, parts: int = 3) -> Residual:
    x = draw(rows, WIDTH)
    squares = torch.stack([part.square().sum(-1) for part in x.chunk(parts, dim=1)], dim=1)
    return Residual(x, squares)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x.double(), (x.shape[1],), weight.double(), EPS)


@both_backends
@pytest.mark.parametrize("rows", [1, 17])
def test_norm_bias_and_gates(backend, rows):
    residual, norm_weight, weight, bias = stream(rows), draw(WIDTH, seed=1), draw(50, WIDTH, seed=2), draw(50, seed=3)
    out, gates = normed_linear(residual, Norm(norm_weight, EPS), weight, bias, num_sigmoids=9, backend=backend)
    exact = normed(residual.x, norm_weight) @ weight.double().T + bias
    assert error(out, exact[:, :-9]) < BOUND
    assert error(gates, exact[:, -9:].sigmoid()) < BOUND
    out, gates = normed_linear(residual, Norm(norm_weight, EPS), weight, backend=backend)
    assert error(out, exact - bias) < BOUND
    assert gates is None
    in_full, _ = normed_linear(residual, Norm(norm_weight, EPS), weight, out_dtype=torch.float64, backend=backend)
    assert torch.equal(in_full, out.double())
    out, gates = normed_linear(residual, None, weight, bias, num_sigmoids=9, backend=backend)
    exact = residual.x.double() @ weight.double().T + bias
    assert error(out, exact[:, :-9]) < BOUND
    assert error(gates, exact[:, -9:].sigmoid()) < BOUND


@both_backends
def test_swiglu(backend):
    residual, norm_weight, weight = stream(3), draw(WIDTH, seed=1), draw(2 * 21, WIDTH, seed=2)
    gate, up = (normed(residual.x, norm_weight) @ weight.double().T).chunk(2, -1)
    out = normed_swiglu(residual, Norm(norm_weight, EPS), weight, backend=backend)
    assert error(out, functional.silu(gate) * up) < BOUND


@both_backends
@pytest.mark.parametrize("bias", [None, draw(WIDTH, seed=4)], ids=["no bias", "bias"])
def test_residual_and_its_squares(backend, bias):
    residual, x, weight = stream(3), draw(3, 70, seed=1), draw(WIDTH, 70, seed=2)
    out = residual_linear(x, weight, residual, bias, backend=backend)
    exact = residual.x + x.double() @ weight.double().T + (0 if bias is None else bias)
    assert error(out.x, exact) < BOUND
    assert error(out.sum_of_squares.sum(1), exact.square().sum(1)) < BOUND


@both_backends
def test_embedding(backend):
    table = draw(11, WIDTH)
    out = embedding(torch.tensor([3, 0, 10]), table, backend)
    assert torch.equal(out.x, table[[3, 0, 10]])
    assert error(out.sum_of_squares.sum(1), out.x.double().square().sum(1)) < BOUND


@both_backends
def test_embedding_of_a_column_of_tokens(backend):
    tokens = torch.tensor([[3, 9], [0, 8], [10, 7]])
    table = draw(11, WIDTH)
    assert torch.equal(embedding(tokens[:, 0], table, backend).x, table[[3, 0, 10]])


def gaps(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]


def test_the_kernels_take_rows_with_gaps():
    norm, weight, down, found = Norm(draw(WIDTH, seed=1), EPS), draw(50, WIDTH, seed=2), draw(WIDTH, 70, seed=3), []
    for layout in (torch.clone, gaps, lambda x: gaps(x.T).T):
        residual = Residual(*map(layout, stream(3)))
        out, gates = normed_linear(residual, norm, weight, num_sigmoids=9, backend="triton")
        added = residual_linear(layout(draw(3, 70)), down, residual, backend="triton")
        found.append((out, gates, normed_swiglu(residual, norm, weight, "triton"), *added))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("name", ["weight", "bias", "norm_weight", "table"])
def test_the_kernels_refuse_weights_with_gaps(name):
    given = {"weight": draw(8, WIDTH), "bias": draw(8), "norm_weight": draw(WIDTH), "table": draw(8, WIDTH)}
    given[name] = gaps(given[name])
    norm = Norm(given["norm_weight"], EPS)
    with pytest.raises(ValueError, match=f"{name} must be contiguous, got strides of"):
        embedding(torch.tensor([3]), given["table"], "triton")
        normed_linear(stream(1), norm, given["weight"], given["bias"], backend="triton")


def test_a_token_outside_of_the_table_poisons_its_row_alone():
    out = embedding(torch.tensor([3, 11, -1]), draw(11, WIDTH), "triton")
    assert out.x.isnan().all(1).tolist() == [False, True, True]


@both_backends
def test_equal_bits_whatever_else_is_in_the_batch(backend):
    norm, weight = Norm(draw(WIDTH, seed=1), EPS), draw(20, WIDTH, seed=2)
    gate_up, down = draw(2 * 20, WIDTH, seed=3), draw(WIDTH, 20, seed=4)

    def step(residual):
        out, _ = normed_linear(residual, norm, weight, backend=backend)
        return (
            out,
            normed_swiglu(residual, norm, gate_up, backend),
            *residual_linear(out, down, residual, backend=backend),
        )

    everyone = stream(19)
    together = step(everyone)
    for rows in (slice(0, 1), slice(7, 10), slice(5, 19)):
        alone = step(Residual(everyone.x[rows], everyone.sum_of_squares[rows]))
        assert all(torch.equal(a, t[rows]) for a, t in zip(alone, together, strict=True))


def test_wider_tiles_of_many_rows():
    """In half precision 33 rows are taken 32 at a time, 17 by 16, one by 8; on a CPU their sums have any order."""
    norm, gate_up, down = Norm(draw(WIDTH, seed=1), EPS), draw(2 * 20, WIDTH, seed=3).half(), draw(WIDTH, 20, seed=4)
    everyone = stream(33)

    def step(rows):
        residual = Residual(everyone.x[:rows], everyone.sum_of_squares[:rows])
        hidden = normed_swiglu(residual, norm, gate_up, "triton")
        return hidden, *residual_linear(hidden, down.half(), residual, backend="triton")

    alone = step(1)
    for rows in (17, 33):
        together = step(rows)
        assert all(error(t[:1], a) < 1e-3 for t, a in zip(together, alone, strict=True))
    reference = residual_linear(together[0], down.half(), everyone, backend="reference")
    assert error(together[1], reference.x) < 1e-3
    assert error(together[2].sum(1), reference.sum_of_squares.sum(1)) < 1e-3
