"""Mean compression on a GPU against PyTorch's own means in float64: the kernels may err twice as much as those do."""

import pytest
import torch

from tests.gpu.cases import FACTOR, PAPER, SMALL, Case
from tests.ops.cases import NO_OVERLAP, ODD, STRIDE_ONE
from trifocal import ops
from trifocal.ops import mean_compress
from trifocal.testing.inputs import cotangent
from trifocal.testing.tolerances import error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = (
    Case("the paper's sizes, two batch entries", PAPER, 1111, 4, 4, 128, 0, batch=2),
    Case("a small model's batch", PAPER, 2048, 2, 2, 64, 0, batch=16),
    Case("odd dim", SMALL, 257, 3, 3, 71, 0),
    Case("widest", SMALL, 300, 2, 2, 256, 0),
    Case("no power of two", ODD, 131, 2, 2, 192, 0),
    Case("blocks without overlap", NO_OVERLAP, 500, 1, 1, 16, 0, batch=3),
    Case("a block at every token", STRIDE_ONE, 290, 2, 2, 32, 0),
    Case("no block", PAPER, 31, 2, 2, 64, 0),
    Case("packed: 1 token, around l, long", PAPER, 900, 2, 2, 64, 0, lengths=(1, 31, 32, 33, 500, 2, 301)),
    Case("packed: only documents under l", SMALL, 14, 2, 2, 128, 0, lengths=(7, 1, 6)),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
each_case = pytest.mark.parametrize("case", CASES, ids=[case.why for case in CASES])


def draw(case, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (case.batch, case.queries, case.groups, case.dim)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_()


def means_of_torch(x, case):
    """Document by document; without slots that no document fills."""
    size, stride = case.geometry.compression_block_size, case.geometry.compression_stride
    documents = x.split(list(case.lengths or (case.queries,)), 1)
    means = [part.unfold(1, size, stride).mean(-1) for part in documents if part.shape[1] >= size]
    return torch.cat(means, 1) if means else x[:, :0]


@each_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_gradient_and_equal_bits(case, dtype):
    x = draw(case, dtype)
    exact = x.detach().double().requires_grad_()
    sides = []
    for make, leaf in ((means_of_torch, exact), (means_of_torch, x), (ours, x), (ours, x)):
        x_cmp = make(leaf, case)
        d_x_cmp = cotangent(means_of_torch(x, case)).to(x_cmp.dtype)
        filled = x_cmp[:, : d_x_cmp.shape[1]]
        assert not x_cmp[:, d_x_cmp.shape[1] :].any()
        (d_x,) = torch.autograd.grad(filled, leaf, d_x_cmp, allow_unused=True, materialize_grads=True)
        sides.append((filled, d_x))
    expected, torchs, got, again = sides
    for name, a, t, e, b in zip(("x_cmp", "d_x"), got, torchs, expected, again, strict=True):
        bound = FACTOR * error(t, e)
        assert error(a, e) <= bound, (name, error(a, e), bound)
        assert torch.equal(a, b), "two runs differ"


def ours(x, case):
    before = ops.backend_choices().get(("mean_compress", "triton", "supported"), 0)
    x_cmp = mean_compress(x, case.geometry, cu_seqlens=case.documents)
    assert ops.backend_choices()["mean_compress", "triton", "supported"] == before + 1
    return x_cmp


def test_columns_of_a_projection_and_offsets_past_32_bits():
    """Rows so far apart that the last ones begin behind 2**31 numbers; what lies between them is never read."""
    case = CASES[2]
    x, far = draw(case, torch.bfloat16).detach(), 2**31 // 128
    memory = torch.empty(case.queries * far, device="cuda", dtype=torch.bfloat16)
    spread = memory.as_strided(x.shape, (0, far, case.dim, 1))
    spread.copy_(x)
    assert torch.equal(ours(spread, case), ours(x, case))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_call_waits_for_the_gpu_and_a_graph_records_it():
    case = CASES[8]
    x, documents = draw(case, torch.bfloat16), case.documents
    d_x_cmp = torch.randn(1, case.queries // 16, case.groups, case.dim, device="cuda").bfloat16()

    def step():
        x_cmp = mean_compress(x, case.geometry, cu_seqlens=documents)
        return x_cmp.detach(), *torch.autograd.grad(x_cmp, x, d_x_cmp)

    expected = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(recorded, expected, strict=True))


# What PyTorch's compiler warns of while it is imported is not ours.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [CASES[0], CASES[8]], ids=lambda case: case.why)
def test_compiled_whole_it_gives_the_same_bits(case):
    x, documents = draw(case, torch.bfloat16), case.documents

    def step(x):
        return mean_compress(x, case.geometry, cu_seqlens=documents)

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        x_cmp = function(x)
        results.append((x_cmp, *torch.autograd.grad(x_cmp, x, cotangent(x_cmp))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
