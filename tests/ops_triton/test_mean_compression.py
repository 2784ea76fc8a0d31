"""Mean compression's kernels against the reference in float64: in the interpreter, and on a GPU in three types."""

import pytest
import torch

from tests.devices import needs_gpu
from tests.ops import cases
from tests.ops.cases import Case
from tests.ops_triton.problems import DEVICE, FACTOR, ON_GPU, PAPER, SMALL, documents_of, problems
from trifocal import Geometry, ops
from trifocal.doctor.probes import _run_small_kernel
from trifocal.nn import NSAttention
from trifocal.ops import mean_compress, operators
from trifocal.testing.inputs import cotangent
from trifocal.testing.tolerances import allowed, error

interpreted = pytest.mark.skipif(ON_GPU, reason="the same on any device")
FOUR_SPLITS = cases.geometry(12, 3, 12, 2, 1, 1, 5)


def problem(why, rules, length, *, groups=2, dim=8, **rest):
    return Case(why, rules, length, heads=groups, groups=groups, dim=dim, **rest)


CASES = (
    problem("several tiles, two batch entries, a width that fills none", cases.USUAL, 1111, batch=2, dim=5),
    problem("widest, and rows to spare behind the last block", cases.USUAL, 51, dim=256),
    problem("no power of two, four splits", FOUR_SPLITS, 40),
    problem("blocks without overlap", cases.NO_OVERLAP, 50, batch=3),
    problem("a block at every token", cases.STRIDE_ONE, 29),
    problem("no block", cases.USUAL, 7),
    problem("packed: 1 token, under l, l, l + 1, long", cases.USUAL, 71, lengths=(1, 5, 8, 9, 16, 1, 31)),
    problem("packed: no power of two", FOUR_SPLITS, 61, lengths=(17, 2, 21, 12, 9)),
    problem("packed: only documents under l", cases.USUAL, 14, lengths=(7, 1, 6)),
)
LARGE = (
    problem("large: the paper's sizes, two batch entries", PAPER, 1111, groups=4, dim=128, batch=2),
    problem("large: a small model's batch", PAPER, 2048, dim=64, batch=16),
    problem("large: odd dim", SMALL, 257, groups=3, dim=71),
    problem("large: widest", SMALL, 300, dim=256),
    problem("large: no power of two", cases.ODD, 131, dim=192),
    problem("large: packed, 1 token, around l, long", PAPER, 900, dim=64, lengths=(1, 31, 32, 33, 500, 2, 301)),
)


def draw(case, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(case.batch, case.queries, case.groups, case.dim, generator=generator).to(DEVICE, dtype)


def means_of_torch(x, case):
    """Document by document; without slots that no document fills."""
    size, stride = case.geometry.compression_block_size, case.geometry.compression_stride
    documents = x.split(list(case.lengths or (case.queries,)), 1)
    means = [part.unfold(1, size, stride).mean(-1) for part in documents if part.shape[1] >= size]
    return torch.cat(means, 1) if means else x[:, :0]


def kernels(x, case):
    before = ops.backend_choices().get(("mean_compress", "triton", "supported"), 0)
    if not ON_GPU:
        return mean_compress(x, case.geometry, cu_seqlens=documents_of(case), backend="triton")
    x_cmp = mean_compress(x, case.geometry, cu_seqlens=documents_of(case))
    assert ops.backend_choices()["mean_compress", "triton", "supported"] == before + 1
    return x_cmp


@problems(CASES, LARGE, fewer=LARGE)
def test_values_and_gradient(case, dtype):
    """On a GPU they may err twice as much as PyTorch's own means; in the interpreter as fp32 does. Equal bits twice."""
    x = draw(case, dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    sides = []
    # The interpreter gives the same bits anyway.
    again_too = [(kernels, x)] if ON_GPU else []
    for make, leaf in ((means_of_torch, exact), (means_of_torch, x), (kernels, x), *again_too):
        x_cmp = make(leaf, case)
        d_x_cmp = cotangent(means_of_torch(x, case)).to(x_cmp.dtype)
        filled = x_cmp[:, : d_x_cmp.shape[1]]
        assert not x_cmp[:, d_x_cmp.shape[1] :].any()
        (d_x,) = torch.autograd.grad(filled, leaf, d_x_cmp, allow_unused=True, materialize_grads=True)
        sides.append((filled, d_x))
    expected, torchs, got, *_ = sides
    for name, a, t, e, b in zip(("x_cmp", "d_x"), got, torchs, expected, sides[-1], strict=True):
        bound = FACTOR * error(t, e) if ON_GPU else allowed(dtype)
        if case not in LARGE:
            # A few numbers round to almost nothing in PyTorch too.
            bound = max(bound, torch.finfo(dtype).eps)
        assert error(a, e) <= bound, (name, error(a, e), bound)
        assert torch.equal(a, b), "two runs differ"


@interpreted
@pytest.mark.parametrize("case", [CASES[0], CASES[6]], ids=lambda case: case.why)
def test_strides_are_taken_as_they_come(case):
    """Columns of a projection, every second number, features far apart; gradients expanded and transposed."""
    x, documents = draw(case), documents_of(case)
    shape = x.shape
    wide = torch.full((*shape[:2], 3, *shape[2:]), torch.nan)
    wide[:, :, 1] = x
    spread = torch.full((*shape[:3], 2 * shape[3]), torch.nan)
    spread[..., ::2] = x
    layouts = wide[:, :, 1], spread[..., ::2], x.movedim(3, 0).contiguous().movedim(0, 3)
    plain = operators.mean_compress(x, case.geometry, 12, documents)
    for strided in layouts:
        assert strided.stride() != x.stride()
        assert torch.equal(operators.mean_compress(strided, case.geometry, 12, documents), plain)
    d_x_cmp = cotangent(mean_compress(x, case.geometry, cu_seqlens=documents, backend="reference"))
    gradients = (d_x_cmp.transpose(1, 3).contiguous().transpose(1, 3), d_x_cmp[:1, :1, :1, :1].expand_as(d_x_cmp))
    for gradient in gradients:
        rules = (case.geometry, case.queries, documents)
        got = operators.mean_compress_backward(gradient, *rules)
        assert torch.equal(got, operators.mean_compress_backward(gradient.contiguous(), *rules))


@interpreted
def test_sums_of_half_precision_are_fp32():
    """A fp16 sum would overflow, or lose small numbers beside large ones."""
    x = torch.full((1, 64, 1, 16), 60000.0, dtype=torch.float16)
    assert (mean_compress(x, Geometry(), backend="triton") == 60000).all()


@interpreted
def test_a_nan_stays_in_the_blocks_that_hold_it():
    x = torch.randn(1, 40, 2, 8)
    x[0, 9, 0, 3] = torch.nan
    x_cmp = mean_compress(x, cases.USUAL, backend="triton")
    assert x_cmp.isnan().nonzero().tolist() == [[0, 1, 0, 3], [0, 2, 0, 3]]


@interpreted
def test_a_layer_compresses_on_its_own_backend_and_the_choice_is_counted():
    sizes = {"dim": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "value_dim": 6, "geometry": cases.USUAL}
    x = torch.randn(1, 20, 16)
    for backend in ("reference", "triton"):
        layer = NSAttention(**sizes, compressor="mean", backend=backend)
        before = ops.backend_choices()
        layer(x)
        after = ops.backend_choices()
        counted = {key[:2]: after[key] - before.get(key, 0) for key in after if key[0] == "mean_compress"}
        assert {key: count for key, count in counted.items() if count} == {("mean_compress", backend): 2}


@interpreted
@pytest.mark.filterwarnings("ignore")
def test_one_compiled_function_serves_other_heads():
    """From the second shape on, the compiler takes sizes for symbols."""

    def compress(x):
        return mean_compress(x, FOUR_SPLITS, backend="triton")

    torch._dynamo.reset()
    compiled = torch.compile(compress, fullgraph=True, backend="aot_eager")
    for heads, dim in ((2, 16), (3, 32), (4, 64)):
        x = torch.randn(1, 64, heads, dim)
        assert torch.equal(compiled(x), compress(x))


@needs_gpu
def test_columns_of_a_projection_and_offsets_past_32_bits():
    """Rows so far apart that the last ones begin behind 2**31 numbers; what lies between them is never read."""
    case = LARGE[2]
    x, far = draw(case, torch.bfloat16).detach(), 2**31 // 128
    memory = torch.empty(case.queries * far, device="cuda", dtype=torch.bfloat16)
    spread = memory.as_strided(x.shape, (0, far, case.dim, 1))
    spread.copy_(x)
    assert torch.equal(kernels(spread, case), kernels(x, case))


def test_the_kernel_that_doctor_runs_is_right(device):
    assert _run_small_kernel(torch.device(device))
