"""Mean compression's kernels, interpreted, against the reference in float64: values and gradients, fp32."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.ops import cases
from tests.ops.cases import geometry
from trifocal import ops
from trifocal.nn import NSAttention
from trifocal.ops import Documents, Geometry, operators
from trifocal.ops.api import compress_by_mean
from trifocal.testing.inputs import cotangent
from trifocal.testing.tolerances import assert_close

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on a GPU")

FOUR_STRIPES = geometry(12, 3, 12, 2, 1, 1, 5)


@dataclass(frozen=True)
class Case:
    """One problem; `why` is the reason for it."""

    why: str
    geometry: Geometry
    length: int
    batch: int = 1
    groups: int = 2
    dim: int = 8
    lengths: tuple[int, ...] | None = None

    def draw(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.batch, self.length, self.groups, self.dim, generator=generator)

    def documents(self) -> Documents | None:
        if self.lengths is None:
            return None
        return Documents.from_cu_seqlens(torch.tensor([0, *self.lengths]).cumsum(0), self.length)


CASES = (
    Case("several tiles, two batch entries, a width that fills none", cases.USUAL, 1111, batch=2, dim=5),
    Case("widest, and rows to spare behind the last block", cases.USUAL, 51, dim=256),
    Case("the paper's sizes", Geometry(), 149, groups=1),
    Case("no power of two, four stripes", FOUR_STRIPES, 40),
    Case("blocks without overlap", cases.NO_OVERLAP, 50, batch=3),
    Case("a block at every token", cases.STRIDE_ONE, 29),
    Case("blocks of one token", cases.ONE_TOKEN_BLOCKS, 17),
    Case("exactly one block", cases.USUAL, 8),
    Case("no block", cases.USUAL, 7),
    Case("packed: 1 token, under l, l, l + 1, long", cases.USUAL, 71, lengths=(1, 5, 8, 9, 16, 1, 31)),
    Case("packed: long first, 1-token last", cases.USUAL, 42, lengths=(40, 1, 1)),
    Case("packed: no power of two", FOUR_STRIPES, 61, lengths=(17, 2, 21, 12, 9)),
    Case("packed: only documents under l", cases.USUAL, 14, lengths=(7, 1, 6)),
)
PADDING = {Documents: "S // d slots", torch.Tensor: "as many slots as blocks", type(None): ""}


def results(x, case, backend, borders):
    """Means, and the gradient of x for a cotangent that is the same in all types."""
    x_cmp = compress_by_mean(x, case.geometry, borders, backend)
    d_x_cmp = cotangent(x_cmp.float()).to(x_cmp.dtype)
    return x_cmp, *torch.autograd.grad(x_cmp, x, d_x_cmp)


@pytest.mark.parametrize(
    ("case", "borders"),
    [
        *((case, case.documents()) for case in CASES),
        *((case, case.documents().cu_seqlens) for case in CASES if case.lengths),
    ],
    ids=lambda value: value.why if isinstance(value, Case) else PADDING[type(value)],
)
def test_values_and_gradient(case: Case, borders: Documents | torch.Tensor | None):
    x = case.draw()
    exact = results(x.double().requires_grad_(), case, "reference", borders)
    got = results(x.requires_grad_(), case, "triton", borders)
    for name, a, e in zip(("x_cmp", "d_x"), got, exact, strict=True):
        assert_close(name, a, e, torch.float32)
    again = results(x, case, "triton", borders)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "two runs differ"


@pytest.mark.parametrize("case", [CASES[0], CASES[9]], ids=lambda case: case.why)
def test_strides_are_taken_as_they_come(case: Case):
    """Columns of a projection, every second number, features far apart; gradients expanded and transposed."""
    x, documents = case.draw(), case.documents()
    shape = x.shape
    wide = torch.full((*shape[:2], 3, *shape[2:]), torch.nan)
    wide[:, :, 1] = x
    spread = torch.full((*shape[:3], 2 * shape[3]), torch.nan)
    spread[..., ::2] = x
    layouts = wide[:, :, 1], spread[..., ::2], x.movedim(3, 0).contiguous().movedim(0, 3)
    plain = operators.mean_compress(x, operators.sizes_of(case.geometry), 12, *operators.tensors_of(documents))
    for strided in layouts:
        assert strided.stride() != x.stride()
        sizes = operators.sizes_of(case.geometry)
        assert torch.equal(operators.mean_compress(strided, sizes, 12, *operators.tensors_of(documents)), plain)
    d_x_cmp = cotangent(compress_by_mean(x, case.geometry, documents, "reference"))
    gradients = (d_x_cmp.transpose(1, 3).contiguous().transpose(1, 3), d_x_cmp[:1, :1, :1, :1].expand_as(d_x_cmp))
    for gradient in gradients:
        rules = (operators.sizes_of(case.geometry), case.length, *operators.tensors_of(documents))
        got = operators.mean_compress_backward(gradient, *rules)
        assert torch.equal(got, operators.mean_compress_backward(gradient.contiguous(), *rules))


def test_sums_of_half_precision_are_fp32():
    """A fp16 sum would overflow, or lose small numbers beside large ones."""
    x = torch.full((1, 64, 1, 16), 60000.0, dtype=torch.float16)
    assert (compress_by_mean(x, Geometry(), None, "triton") == 60000).all()


def test_a_nan_stays_in_the_blocks_that_hold_it():
    x = torch.randn(1, 40, 2, 8)
    x[0, 9, 0, 3] = torch.nan
    x_cmp = compress_by_mean(x, cases.USUAL, None, "triton")
    assert x_cmp.isnan().nonzero().tolist() == [[0, 1, 0, 3], [0, 2, 0, 3]]


@pytest.mark.parametrize("lengths", [None, (12, 5)], ids=["one document", "packed"])
def test_the_operator_passes_pytorch_s_own_check(lengths):
    case = Case("", cases.USUAL, 17, lengths=lengths)
    packed, slots = operators.tensors_of(case.documents()), 4 if lengths else 3
    arguments = (case.draw().requires_grad_(), operators.sizes_of(case.geometry), slots, *packed)
    torch.library.opcheck(torch.ops.trifocal.mean_compress.default, arguments)


def test_a_layer_compresses_on_its_own_backend_and_the_choice_is_counted():
    sizes = {"dim": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "value_dim": 6, "geometry": cases.USUAL}
    x = torch.randn(1, 20, 16)
    for backend in ("reference", "triton"):
        for compressor in ("mean", "mlp"):
            layer = NSAttention(**sizes, compressor=compressor, backend=backend)
            before = ops.backend_choices()
            layer(x)
            after = ops.backend_choices()
            counted = {key[:2]: after[key] - before.get(key, 0) for key in after if key[0] == "mean_compress"}
            assert {key: count for key, count in counted.items() if count} == {("mean_compress", backend): 2}


def test_auto_takes_the_reference_on_a_cpu_and_for_float64():
    before = ops.backend_choices()
    ops.mean_compress(torch.randn(1, 20, 1, 8, dtype=torch.float64), cases.USUAL)
    new = {key for key, count in ops.backend_choices().items() if count != before.get(key, 0)}
    assert new == {("mean_compress", "reference", "the tensors are not on a CUDA device")}
    with pytest.raises(ValueError, match=r"cannot run mean_compress here: .*float64"):
        compress_by_mean(torch.randn(1, 20, 1, 8, dtype=torch.float64), cases.USUAL, None, "triton")


@pytest.mark.filterwarnings("ignore")
def test_one_compiled_function_serves_other_heads():
    """From the second shape on, the compiler takes sizes for symbols."""

    def compress(x):
        return compress_by_mean(x, FOUR_STRIPES, None, "triton")

    torch._dynamo.reset()
    compiled = torch.compile(compress, fullgraph=True, backend="aot_eager")
    for heads, dim in ((2, 16), (3, 32), (4, 64)):
        x = torch.randn(1, 64, heads, dim)
        assert torch.equal(compiled(x), compress(x))
