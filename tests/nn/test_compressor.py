"""φ against a loop over blocks, with and without documents, and where no block fits."""

import pytest
import torch

from trifocal.nn import MeanCompressor, MLPCompressor
from trifocal.nn.compressor import compress_keys_and_values
from trifocal.ops import Documents, Geometry

# Overlapping blocks (8 every 4), and strides that the lengths below do not divide.
GEOMETRY = Geometry(8, 4, 8, num_selected_blocks=3, window_size=6)
FEATURES = 6


def make(kind):
    torch.manual_seed(0)
    compressor = MeanCompressor(GEOMETRY) if kind == "mean" else MLPCompressor(GEOMETRY, FEATURES)
    return compressor.double()


def compress_one(compressor, block):
    """φ of one block [l, D], written out."""
    mean = block.mean(0)
    if isinstance(compressor, MeanCompressor):
        return mean
    hidden = compressor.up_proj.weight @ (block + compressor.positions).reshape(-1)
    return mean + compressor.down_proj.weight @ (hidden * torch.sigmoid(hidden))


def compress_by_loop(compressor, x):
    starts = range(0, x.shape[1] - 8 + 1, 4)
    return torch.stack(
        [
            torch.stack([compress_one(compressor, x[0, start : start + 8, group]) for group in range(x.shape[2])])
            for start in starts
        ]
    )[None]


@pytest.mark.parametrize("kind", ["mean", "mlp"])
@pytest.mark.parametrize("lengths", [[8], [33], [5, 1, 8, 21, 7, 13]], ids=str)
def test_keys_and_gradients_are_those_of_the_loop(kind, lengths):
    """Documents have grids of their own: of a block's length, shorter, not divided by the stride, of one token."""
    compressor = make(kind)
    total = sum(lengths)
    x = torch.randn(1, total, 2, FEATURES, dtype=torch.float64, requires_grad=True)
    borders = torch.tensor([0, *lengths]).cumsum(0)
    documents = Documents.from_cu_seqlens(borders, total) if len(lengths) > 1 else None
    by_loop = torch.cat(
        [compress_by_loop(compressor, part) for part in x.split(lengths, dim=1) if part.shape[1] >= 8], 1
    )
    direction = torch.randn_like(by_loop)
    parameters = [x, *compressor.parameters()]
    expected = torch.autograd.grad(by_loop, parameters, direction)
    compressed = compressor(x, documents)
    assert compressed.isfinite().all() and (documents is None or compressed.shape[1] == total // 4)
    torch.testing.assert_close(compressed[:, : by_loop.shape[1]], by_loop, rtol=0, atol=1e-13)
    given = torch.autograd.grad(compressed[:, : by_loop.shape[1]], parameters, direction)
    torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_keys_without_a_gradient_are_the_same_bits(dtype):
    """Where no gradient is asked for, blocks are not copied together."""
    compressor = make("mlp").to(dtype)
    rows = torch.randn(2, 33, 4 * FEATURES, dtype=dtype).chunk(2, dim=-1)[1].unflatten(-1, (2, -1))
    expected = compressor(rows.detach().requires_grad_())
    with torch.no_grad():
        assert torch.equal(compressor(rows), expected)


def test_no_block_gives_no_row_and_a_zero_gradient():
    compressor = make("mlp")
    x = torch.randn(2, 7, 2, FEATURES, dtype=torch.float64, requires_grad=True)
    compressed = compressor(x)
    assert compressed.shape == (2, 0, 2, FEATURES)
    compressed.sum().backward()
    for tensor in (x, *compressor.parameters()):
        assert not tensor.grad.any()


def test_learned_compressor_starts_near_the_mean():
    torch.manual_seed(0)
    x = torch.randn(1, 64, 2, 16)
    learned, mean = MLPCompressor(GEOMETRY, 16)(x), MeanCompressor(GEOMETRY)(x)
    assert (learned - mean).square().mean() < 0.1 * mean.square().mean()


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [("of one width", [5, 1, 8, 21, 7, 13]), ("of one width", [7]), ("of two widths", [33]), ("hooked", [33])],
    ids=str,
)
def test_keys_and_values_together_are_as_each_alone(kind, lengths, monkeypatch):
    torch.manual_seed(0)
    pair = (
        MLPCompressor(GEOMETRY, FEATURES).double(),
        MLPCompressor(GEOMETRY, 4 if "two" in kind else FEATURES).double(),
    )
    total, products = sum(lengths), []
    keys, values = (torch.randn(1, total, 2, phi.positions.shape[1], dtype=torch.float64) for phi in pair)
    borders = torch.tensor([0, *lengths]).cumsum(0)
    documents = Documents.from_cu_seqlens(borders, total) if len(lengths) > 1 else None
    if kind == "hooked":
        pair[1].down_proj.register_forward_hook(lambda module, args, output: 2 * output)
    multiply = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *args: products.append(args) or multiply(*args))
    inputs = [x.requires_grad_() for x in (keys, values)]
    leaves = [*inputs, *pair[0].parameters(), *pair[1].parameters()]
    together = compress_keys_and_values(pair, keys, values, documents)
    assert len(products) == (2 if kind == "of one width" else 0)
    alone = [phi(x, documents) for phi, x in zip(pair, inputs, strict=True)]
    directions = [torch.randn_like(x) for x in alone]
    torch.testing.assert_close(list(together), alone, rtol=0, atol=1e-13)
    given, expected = (torch.autograd.grad(outputs, leaves, directions) for outputs in (together, alone))
    torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)
    assert all(gradient.is_contiguous() for gradient in given)
    with torch.no_grad():
        torch.testing.assert_close(list(compress_keys_and_values(pair, keys, values, documents)), alone, rtol=0, atol=0)
