"""The loss of the choice on the kernels: loss, recall and every gradient against float64."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from tests.ops.cases import geometry
from trifocal import Geometry
from trifocal.ops import dispatch, operators
from trifocal.ops.choice_loss import FLOOR, LEAST_MASS, Sample, choice_loss, free_places, num_free
from trifocal.ops.layout import Documents, pad_boundaries

pytest.importorskip("triton")

SMALL = geometry(8, 4, 16, 4, 1, 1, 11)
# fp32 sums of products of normal numbers, exponentials and logarithms, of the largest number of a tensor.
BOUND = 1e-5


@dataclass(frozen=True)
class Case:
    """One problem; `why` is the reason for it."""

    why: str
    keys: int
    stretch: int = 5
    heads: int = 2
    groups: int = 1
    dim: int = 16
    batch: int = 1
    geometry: Geometry = SMALL
    lengths: tuple[int, ...] | None = None
    buffer_bytes: int = 2**28


CASES = (
    Case("three heads a group, dim that is no power of two, two batch entries", 133, 7, 6, 2, 24, batch=2),
    Case("16 heads a group, chunks of queries", 149, 9, 16, 1, 64, buffer_bytes=1),
    Case("eight groups of one head, one query a tile", 149, 30, 8, 8, 128),
    Case("more lines of blocks than one program takes", 1300, 100, geometry=geometry(4, 4, 16, 5, 1, 2, 11)),
    Case("packed: short, 1 token, many, empty ones as padding", 250, 9, 4, 2, lengths=(17, 1, 90, 5, 42, 95)),
    Case("packed: blocks of 48 tokens, tiles of keys across documents", 420, 30, lengths=(30, 201, 189),
         geometry=geometry(16, 8, 48, 2, 0, 1, 11)),
    Case("a row of more blocks than a program has at least", 4120, 900),
    Case("nothing to choose beside the forced blocks", 133, 20, geometry=geometry(8, 4, 16, 2, 1, 1, 11)),
    Case("blocks of more keys than a product", 700, 30, 3, 3, geometry=geometry(4, 1, 128, 2, 1, 0, 11)),
    Case("blocks of more keys than a byte numbers", 1600, 190, geometry=geometry(16, 16, 512, 2, 1, 0, 11)),
)  # fmt: skip
# For what does not depend on sizes.
PACKED = Case("packed: short, 1 token, long enough to choose", 108, 4, 4, 2, lengths=(17, 1, 90))
each_case = pytest.mark.parametrize("case", CASES, ids=[case.why for case in CASES])


def draw(case, device):
    """Documents, a sample, and q, k, q_idx, k_idx in float64, with many equal index scores."""
    generator = torch.Generator().manual_seed(0)
    documents, positions = None, torch.arange(case.keys)
    if case.lengths is not None:
        borders = pad_boundaries(torch.tensor([0, *case.lengths]).cumsum(0), case.keys)
        documents = Documents.from_checked(borders, case.keys, case.keys)
        positions, documents = documents.positions.long(), documents.to(device)
    first = torch.arange(0, case.keys, case.stretch).expand(case.batch, -1)
    tokens = (first + torch.randint(0, case.stretch, first.shape, generator=generator)).clamp(max=case.keys - 1)
    free = num_free(positions[tokens] // case.geometry.selection_block_size, case.geometry)
    sample = Sample(tokens, tokens - positions[tokens], free > free_places(case.geometry))
    assert 0 < sample.eligible.sum() < sample.eligible.numel()
    shapes = ((case.heads, case.dim), (case.groups, case.dim), (case.groups, case.dim), (case.dim,))
    drawn = [torch.randn(case.batch, case.keys, *shape, generator=generator) for shape in shapes]
    # Products of an index are exact, so that what ties does so in any order of their sums.
    drawn[2:] = [x.mul(16).round().div(16) for x in drawn[2:]]
    # Neighbours and the halves of a block of 128 tie.
    token, size = torch.arange(case.keys), case.geometry.selection_block_size
    drawn[3] = drawn[3][:, token - token % size + token % size % 64 // 2 * 2]
    return documents, Sample(*(x.to(device) for x in sample)), [x.double().to(device) for x in drawn]


def taught(case, backend, documents, sample, q, k, q_idx, k_idx):
    """Loss, recall and gradients of the index."""
    leaves = {"q_idx": q_idx.detach().requires_grad_(), "k_idx": k_idx.detach().requires_grad_()}
    with mock.patch.object(dispatch, "IMPORTANCE_BUFFER_BYTES", case.buffer_bytes):
        loss, recall = choice_loss(q, k, sample, case.geometry, documents, backend=backend, **leaves)
    return [loss, recall, *torch.autograd.grad(loss, list(leaves.values()))]


def by_kernels(case, documents, sample, inputs):
    return taught(case, "triton", documents, sample, *(x.float() for x in inputs))


def assert_near(case, documents, sample, inputs, exact=None):
    """The kernels' results, to those of the reference in float64 unless others are given; returns both."""
    exact = exact or taught(case, "reference", documents, sample, *inputs)
    got = by_kernels(case, documents, sample, inputs)
    for a, e in zip(got, exact, strict=True):
        assert (a.double() - e).abs().max() <= BOUND * e.abs().max()
    return got, exact


@each_case
def test_loss_and_gradients_of_an_index(case, device):
    problem = case, *draw(case, device)
    got, _ = assert_near(*problem)
    if device == "cuda":
        again = by_kernels(*problem)
        assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True)), "two runs differ"


def test_pieces_of_a_program_change_no_bit(device):
    from trifocal.ops.triton import index_scoring

    case, sizes = CASES[3], index_scoring.PIECES_OF_PROGRAM
    problem = case, *draw(case, device)
    with mock.patch.object(index_scoring, "PIECES_OF_PROGRAM", sizes[:1]):
        large = by_kernels(*problem)
    with mock.patch.object(index_scoring, "PIECES_OF_PROGRAM", sizes[-1:]):
        small = by_kernels(*problem)
    assert all(torch.equal(one, other) for one, other in zip(large, small, strict=True))


def test_loss_of_an_index_in_parts(device, monkeypatch):
    case = PACKED
    documents, sample, inputs = draw(case, device)
    exact = taught(case, "reference", documents, sample, *inputs)
    monkeypatch.setattr("trifocal.ops.choice_loss._MAX_NUMBERS", 300)
    assert_near(case, documents, sample, inputs, exact=exact)


def test_last_queries_alone(device):
    """Queries that are the last ones of the keys, as a process has them that shares a sequence."""
    case, begin = PACKED, 61
    documents, sample, (q, k, q_idx, k_idx) = draw(case, device)
    inside = sample.tokens.clamp(min=begin)
    eligible = sample.eligible & (sample.tokens >= begin)
    sample = Sample(inside, sample.starts.minimum(inside), eligible)
    assert eligible.any()
    assert_near(case, documents, sample, (q[:, begin:], k, q_idx[:, begin:], k_idx))


def test_what_is_not_eligible_is_zero_and_harms_nobody(device):
    """A query that is drawn and does not exist has the token of the last that does, whose gradient must stay."""
    case = PACKED
    documents, sample, inputs = draw(case, device)
    # Each query twice, eligible once, first or last.
    twice = Sample(*(field.repeat_interleave(2, 1) for field in sample))
    turn = (
        torch.arange(twice.tokens.shape[1], device=device) // 2 % 2
        == torch.arange(twice.tokens.shape[1], device=device) % 2
    )
    twice = twice._replace(eligible=twice.eligible & turn)
    assert_near(case, documents, twice, inputs, exact=taught(case, "reference", documents, sample, *inputs))
    nobody = twice._replace(eligible=torch.zeros_like(twice.eligible))
    assert all((x == 0).all() for x in by_kernels(case, documents, nobody, inputs))


def test_a_query_of_the_first_key_of_a_tile(device):
    """Its own block, which is not forced here, has that key alone: no other query gives it a gradient."""
    case = Case("", 133, geometry=geometry(4, 4, 16, 2, 1, 0, 11))
    documents, sample, inputs = draw(case, device)
    tokens = torch.tensor([[50, 64]], device=device)
    sample = Sample(tokens, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool))
    _, exact = assert_near(case, documents, sample, inputs)
    assert exact[3][0, 64].any()


def test_a_teacher_without_mass_on_free_blocks_teaches_nothing(device):
    """The free blocks have 1e-11 of the mass, until one of them gets as much as the forced one."""
    case = Case("", 133, 20)
    documents, sample, (q, k, *others) = draw(case, device)
    q, k = torch.ones_like(q), torch.zeros_like(k)
    k[:, :16] = 30 / case.dim**0.5
    inputs = [q, k, *others]
    assert all((x == 0).all() for found in assert_near(case, documents, sample, inputs) for x in found)
    k[:, 16:32] = k[:, :16]
    _, exact = assert_near(case, documents, sample, inputs)
    assert exact[0] > 0 and exact[1] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the same on any device")
def test_operators_pass_pytorch_s_own_check_and_compile_whole():
    """Schema, fake tensors and autograd, judged by PyTorch's own tool; and one graph with eager's bits."""
    case = PACKED
    documents, sample, inputs = draw(case, "cpu")
    q, k, q_idx, k_idx = (x.float() for x in inputs)
    where = (case.geometry, 7)
    leaves = (q_idx.requires_grad_(), k_idx.requires_grad_())
    index_loss = operators.flat((*leaves, q, k, *sample, *where, FLOOR, LEAST_MASS, documents))
    # Dispatch ahead of time is that of the compiled call below.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.trifocal.index_loss.default, index_loss, test_utils=checks)

    eager = by_kernels(case, documents, sample, inputs)
    with mock.patch(f"{__name__}.choice_loss", torch.compile(choice_loss, fullgraph=True, backend="aot_eager")):
        compiled = by_kernels(case, documents, sample, inputs)
    assert all(torch.equal(one, other) for one, other in zip(compiled, eager, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the same on any device")
@pytest.mark.filterwarnings("ignore")
def test_sizes_of_a_geometry_may_be_symbols_of_a_compiler():
    """They are where dynamic shapes are asked for and the geometry is an argument."""
    case = PACKED
    documents, sample, inputs = draw(case, "cpu")
    q, k, *index = (x.float() for x in inputs)

    def figures(*index_and_rules):
        *index, rules = index_and_rules
        return operators.index_loss(*index, q, k, *sample, rules, 7, FLOOR, LEAST_MASS, documents)[0]

    torch._dynamo.reset()
    compiled = torch.compile(figures, backend="eager", dynamic=True, fullgraph=True)
    assert torch.equal(compiled(*index, case.geometry), figures(*index, case.geometry))
