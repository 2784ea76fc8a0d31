"""The products of a decode step: against float64, equal bits in any company; on a GPU also at real sizes, in graphs."""

import pytest
import torch
from torch.nn import functional

from tests.devices import needs_gpu
from tests.models.conftest import make_config, make_model
from tests.ops_triton.problems import FACTOR
from trifocal.inference.cached_model import CachedModel
from trifocal.nn import RMSNorm
from trifocal.ops import devices
from trifocal.ops.decode import linear as decode_linear
from trifocal.ops.decode.linear import Norm, Residual, embedding, linear, normed_linear, normed_swiglu, residual_linear
from trifocal.testing.tolerances import error

__all__ = ["make_config", "make_model"]

EPS = 1e-6
# A product of 70 or 135 numbers in fp32; both sides round.
BOUND = 2e-6
WIDTH = 135  # One step of the kernel in fp32 is 32: the last one is cut.
both_backends = pytest.mark.parametrize("backend", ["reference", "triton"])


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, seed=0, dtype=torch.float32, scale=1.0):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def stream(rows, parts=3):
    """Without what a norm's product reads, so that it is made on the way."""
    x = draw(rows, WIDTH)
    squares = torch.stack([part.square().sum(-1) for part in x.chunk(parts, dim=1)], dim=1)
    return Residual(x, squares)


def tensors(*residuals):
    return tuple(part for residual in residuals for part in residual if part is not None)


def normed(x, weight):
    return functional.rms_norm(x.double(), (x.shape[1],), weight.double(), EPS)


@both_backends
def test_norm_bias_and_gates(backend):
    rows = 17
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
def test_residual_and_its_squares(backend):
    bias = draw(WIDTH, seed=4)
    residual, x, weight = stream(3), draw(3, 70, seed=1), draw(WIDTH, 70, seed=2)
    out = residual_linear(x, weight, residual, bias, backend=backend)
    exact = residual.x + x.double() @ weight.double().T + bias
    assert error(out.x, exact) < BOUND
    assert error(out.sum_of_squares.sum(1), exact.square().sum(1)) < BOUND
    assert error(linear(x, weight, bias, backend), exact - residual.x) < BOUND


@pytest.mark.parametrize("depth", [512, 1100])
def test_long_sums(depth):
    """Parts of 256: whole ones, and more with a cut one."""
    x, norm, before = draw(9, depth), draw(depth, seed=1), draw(9, 40, seed=2)
    residual = Residual(x, x.square().sum(1, keepdim=True))
    weight = draw(40, depth, seed=3, scale=depth**-0.5)
    exact = weight.double()
    added = residual_linear(x, weight, Residual(before, before[:, :0]), backend="triton")
    # Sums of up to 1,100 numbers with Kahan's compensation.
    assert error(added.x, before + x.double() @ exact.T) < BOUND
    gate, up = (normed(x, norm) @ exact.T).chunk(2, -1)
    assert error(normed_swiglu(residual, Norm(norm, EPS), weight, "triton"), functional.silu(gate) * up) < BOUND
    alone = residual_linear(x[4:5], weight, Residual(before[4:5], before[:0]), backend="triton")
    assert torch.equal(alone.x, added.x[4:5])


@both_backends
def test_embedding(backend):
    table = draw(11, WIDTH)
    # A column of tokens, as a batch has them.
    tokens = torch.tensor([[3, 9], [0, 8], [10, 7]], device=DEVICE)
    out = embedding(tokens[:, 0], table, backend)
    assert torch.equal(out.x, table[[3, 0, 10]])
    assert error(out.sum_of_squares.sum(1), out.x.double().square().sum(1)) < BOUND


def gaps(x):
    return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]


def test_the_kernels_take_rows_with_gaps():
    norm, weight, down, found = Norm(draw(WIDTH, seed=1), EPS), draw(50, WIDTH, seed=2), draw(WIDTH, 70, seed=3), []
    for layout in (torch.clone, gaps, lambda x: gaps(x.T).T):
        residual = Residual(*map(layout, tensors(stream(3))))
        out, gates = normed_linear(residual, norm, weight, num_sigmoids=9, backend="triton")
        added = residual_linear(layout(draw(3, 70)), down, residual, backend="triton")
        found.append((out, gates, normed_swiglu(residual, norm, weight, "triton"), *tensors(added)))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True))


def test_the_kernels_write_what_the_next_norm_s_product_reads():
    """With it the product is that of one that makes it itself; sums of squares may be added in another order."""
    norm, table, weight = Norm(draw(WIDTH, seed=1), EPS), draw(11, WIDTH), draw(50, WIDTH, seed=2)
    tokens, down, residual, x = torch.tensor([3, 0, 10], device=DEVICE), draw(WIDTH, 70, seed=3), stream(3), draw(3, 70)
    for told, untold in (
        (embedding(tokens, table, "triton", next_norm=norm), embedding(tokens, table, "triton")),
        (
            residual_linear(x, down, residual, next_norm=norm, backend="triton"),
            residual_linear(x, down, residual, backend="triton"),
        ),
    ):
        assert untold.scaled is None
        assert torch.equal(told.scaled, told.x * norm.weight)
        assert torch.equal(told.x, untold.x)
        assert error(told.sum_of_squares.sum(1), untold.sum_of_squares.double().sum(1)) < BOUND
        found = [normed_linear(residual, norm, weight, backend="triton")[0] for residual in (told, untold)]
        assert error(found[0], found[1].double()) < BOUND
        # It is what is read.
        other, _ = normed_linear(told._replace(scaled=2 * told.scaled), norm, weight, backend="triton")
        assert error(other, 2 * found[0].double()) < BOUND
    half = embedding(tokens, table, "triton", next_norm=norm, dtype=torch.float16)
    assert torch.equal(half.scaled, (half.x * norm.weight).half())


@pytest.mark.parametrize("name", ["weight", "bias", "next_norm", "table"])
def test_the_kernels_refuse_weights_with_gaps(name):
    given = {"weight": draw(8, WIDTH), "bias": draw(8), "next_norm": draw(WIDTH), "table": draw(8, WIDTH)}
    given[name] = gaps(given[name])
    norm = Norm(draw(WIDTH), EPS)
    with pytest.raises(ValueError, match=f"{name} must be contiguous, got strides of"):
        embedding(torch.tensor([3], device=DEVICE), given["table"], "triton", next_norm=Norm(given["next_norm"], EPS))
        normed_linear(stream(1), norm, given["weight"], given["bias"], backend="triton")


def test_a_token_outside_of_the_table_poisons_its_row_alone():
    out = embedding(torch.tensor([3, 11, -1], device=DEVICE), draw(11, WIDTH), "triton")
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
            *tensors(residual_linear(out, down, residual, backend=backend)),
        )

    everyone = stream(19)
    together = step(everyone)
    for rows in (slice(0, 1), slice(7, 10), slice(5, 19)):
        alone = step(Residual(everyone.x[rows], everyone.sum_of_squares[rows]))
        assert all(torch.equal(a, t[rows]) for a, t in zip(alone, together, strict=True))


def test_wider_tiles_of_many_rows():
    """In half precision 33 rows are taken 32 at a time, 17 by 16, one by 8; on a CPU their sums have any order."""
    norm, everyone = Norm(draw(WIDTH, seed=1), EPS), stream(33)
    gate_up, down = draw(2 * 20, WIDTH, seed=3).half(), draw(WIDTH, 20, seed=4).half()

    def step(rows):
        residual = Residual(everyone.x[:rows], everyone.sum_of_squares[:rows])
        hidden = normed_swiglu(residual, norm, gate_up, "triton")
        return hidden, *tensors(residual_linear(hidden, down, residual, backend="triton"))

    alone = step(1)
    for rows in (17, 33):
        together = step(rows)
        assert all(error(t[:1], a) < 1e-3 for t, a in zip(together, alone, strict=True))
    expected = normed_swiglu(everyone, norm, gate_up, "reference")
    assert error(together[0], expected) < 2e-3
    reference = residual_linear(together[0], down, everyone, backend="reference")
    assert error(together[1], reference.x) < 1e-3
    assert error(together[2].sum(1), reference.sum_of_squares.sum(1)) < 1e-3


@pytest.mark.parametrize("options", [{}, {"attention": "dense", "norm_after": True}], ids=str)
def test_a_model_s_kernels_know_the_next_norm(monkeypatch, make_model, options):
    """No product behind a norm makes what it reads; with the wrong norm's weight logits would be others."""
    model, tokens = make_model(**options).to(DEVICE, torch.float32), [[3], [4], [5]]
    norms = [module.weight for module in model.modules() if isinstance(module, RMSNorm)]
    for number, weight in enumerate(norms):
        weight.data += draw(len(weight), seed=number)

    def logits():
        cached = CachedModel(model, max_sequences=3, max_length=4)
        return cached.decode([cached.admit() for _ in tokens], tokens)

    expected = logits()
    made = []

    def scaled(residual, norm, dtype):
        made.append(norm is not None and residual.scaled is None)
        return scale(residual, norm, dtype)

    scale = decode_linear._scaled
    monkeypatch.setattr(decode_linear, "_runs_kernels", lambda weight, backend: True)
    monkeypatch.setattr(decode_linear, "_scaled", scaled)
    assert error(logits(), expected) < 1e-4
    assert len(made) == 2 * model.config.num_layers + 1 and not any(made)


# Width of the residual stream, columns of queries, keys, values and gates, hidden width of the MLP; the third are odd;
# the last take one matrix instruction a warp.
SIZES = ((768, 1572, 2048), (4096, 6336, 11008), (200, 333, 150), (48, 40, 16))


def layer(sizes, dtype):
    width, columns, hidden = sizes
    return {
        "norm": draw(width, dtype=torch.float32),
        "qkv": draw(columns, width, dtype=dtype, scale=width**-0.5, seed=1),
        "bias": draw(columns, dtype=dtype, seed=2),
        "gate_up": draw(2 * hidden, width, dtype=dtype, scale=width**-0.5, seed=3),
        "down": draw(width, hidden, dtype=dtype, scale=hidden**-0.5, seed=4),
    }


def embedded(tokens, table, weights):
    """As the first layer of a model gets it."""
    return embedding(tokens, table, "triton", next_norm=Norm(weights["norm"], EPS), dtype=table.dtype)


def run(residual, weights):
    norm = Norm(weights["norm"], EPS)
    out, gates = normed_linear(residual, norm, weights["qkv"], weights["bias"], num_sigmoids=36, backend="triton")
    hidden = normed_swiglu(residual, norm, weights["gate_up"], backend="triton")
    after = residual_linear(hidden, weights["down"], residual, next_norm=norm, backend="triton")
    unnormed, _ = normed_linear(residual, None, weights["qkv"], weights["bias"], num_sigmoids=36, backend="triton")
    found = {"out": out, "gates": gates, "hidden": hidden, "unnormed": unnormed}
    return found | {"after": after.x, "squares": after.sum_of_squares, "scaled": after.scaled}


def torchs(x, weights, dtype):
    normed = functional.rms_norm(x, x.shape[1:], weights["norm"].to(x.dtype), EPS).to(dtype)
    own = {name: weight.to(dtype) for name, weight in weights.items()}
    out = functional.linear(normed, own["qkv"], own["bias"])
    gate, up = functional.linear(normed, own["gate_up"]).chunk(2, -1)
    hidden = functional.silu(gate) * up
    after = x + functional.linear(hidden, own["down"])
    gates = out[:, -36:].to(x.dtype).sigmoid()
    unnormed = functional.linear(x.to(dtype), own["qkv"], own["bias"])[:, :-36]
    return {"out": out[:, :-36], "gates": gates, "hidden": hidden, "unnormed": unnormed, "after": after}


# Compiling is what takes the time: fp16 differs from bf16 in the type alone.
sizes_and_types = pytest.mark.parametrize(
    ("sizes", "dtype"),
    [*((sizes, dtype) for sizes in SIZES for dtype in (torch.bfloat16, torch.float32)), (SIZES[0], torch.float16)],
    ids=str,
)


@needs_gpu
@sizes_and_types
def test_values_at_real_sizes(sizes, dtype):
    weights = layer(sizes, dtype)
    residual = embedded(torch.arange(70, device=DEVICE), draw(70, sizes[0], dtype=dtype, seed=5), weights)
    got = run(residual, weights)
    plain = torchs(residual.x, weights, dtype)
    exact = torchs(residual.x.double(), weights, torch.float64)
    for name, value in plain.items():
        assert error(got[name], exact[name]) <= FACTOR * max(error(value, exact[name]), torch.finfo(dtype).eps), name
    assert error(got["squares"].sum(1), got["after"].square().sum(1)) < 1e-5
    assert torch.equal(got["scaled"], (got["after"] * weights["norm"]).to(dtype))


@needs_gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equal_bits_for_any_number_of_rows(sizes, dtype):
    weights = layer(sizes, dtype)
    table = draw(600, sizes[0], dtype=dtype, seed=5)
    together = run(embedded(torch.arange(600, device=DEVICE), table, weights), weights)
    # Tiles of 8, 16 and 32 rows, full and cut.
    for first, rows in ((0, 1), (3, 8), (40, 9), (8, 16), (60, 17), (7, 33), (100, 64), (5, 200)):
        last = first + rows
        residual = embedded(torch.arange(first, last, device=DEVICE), table, weights)
        alone = run(Residual(*(part.contiguous() for part in residual)), weights)
        for name, value in alone.items():
            assert torch.equal(value, together[name][first:last]), (name, first, last)


def chain(weights, table, tokens, layers):
    """Layers that each read at once what the kernel before wrote; with two, all results, else only the last layer's.

    Then the memory of a result is soon that of another one, which must not be written while it is still read.
    """
    residual = embedded(tokens, table, weights)
    results = []
    for _ in range(layers):
        result = run(residual, weights)
        residual = Residual(*(result[name] for name in ("after", "squares", "scaled")))
        results = [*(results if layers == 2 else []), *result.values()]
    return results


@needs_gpu
@pytest.mark.parametrize("layers", [2, 12])
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_dependent_launches_give_the_bits_of_plain_ones_in_every_replay(monkeypatch, rows, layers):
    """The tokens change between replays: a kernel that does not wait would read what the last replay left."""
    weights, table = layer(SIZES[0], torch.bfloat16), draw(600, SIZES[0][0], dtype=torch.bfloat16, seed=5)
    tokens = torch.arange(rows, device=DEVICE)
    others = [torch.arange(first, first + rows, device=DEVICE) for first in (0, 100)]
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
