"""The importance kernel for Hopper against float64, the choice against the rule on the same fp32 importance, and the
Hopper kernel for keys and values of the window."""

from typing import NamedTuple

import pytest
import torch

from tests.ops.cases import geometry
from tests.ops_triton import problems
from tests.ops_triton.problems import PAPER, SMALL
from trifocal import Geometry, ops
from trifocal.ops import dispatch
from trifocal.testing.inputs import cotangent
from trifocal.testing.tolerances import error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

# Error of an importance, of the row's largest: fp32 sums, scores and exponentials against float64.
BOUND = 1e-5


class Case(NamedTuple):
    """One problem; `why` says what only it covers. S = T unless given."""

    why: str
    geometry: Geometry
    queries: int
    heads: int
    groups: int
    dim: int
    keys: int = 0
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_keys(self):
        return self.keys or self.queries


CASES = (
    Case("16 heads a group, odd length, two batch entries", PAPER, 1333, 32, 2, 128, batch=2),
    Case("the same in fp16", PAPER, 1333, 32, 2, 128, batch=2, dtype=torch.float16),
    Case("4 heads, two pairs of key tiles, a stack with an empty tile", PAPER, 4500, 16, 4, 128),
    Case("8 heads, fewer queries than keys", PAPER, 200, 16, 2, 128, keys=6001, batch=2),
    Case("64 heads, short blocks", SMALL, 700, 64, 1, 128),
    Case("192 wide", PAPER, 2500, 32, 2, 192, batch=2),
    Case("no overlap, two compressed blocks a selection block", geometry(16, 16, 32, 3, 1, 1, 40), 1111, 16, 1, 128),
    Case("no overlap, four a selection block", geometry(16, 16, 64, 3, 1, 1, 40), 2100, 16, 1, 128),
    Case("8 a selection block, of which 2 reach over", geometry(48, 16, 128, 3, 0, 1, 40), 3000, 8, 1, 128),
)


@pytest.fixture(autouse=True)
def also_for_few_queries(monkeypatch):
    """The rule would leave these cases to the portable kernel."""
    monkeypatch.setattr(dispatch, "MAX_QUERIES_OF_PORTABLE_IMPORTANCE", 0)


each_case = pytest.mark.parametrize("case", CASES, ids=[case.why for case in CASES])


def draw(case, *, equal_keys=False):
    """q, compressed keys and the log-sum-exp."""
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(case.batch, case.queries, case.heads, case.dim, generator=generator, device="cuda")
    size = case.geometry.num_compressed_blocks(case.num_keys)
    k = torch.randn(case.batch, size, case.groups, case.dim, generator=generator, device="cuda")
    if equal_keys:
        k = k[:, :1].expand(-1, size, -1, -1).contiguous()
    q, k = q.to(case.dtype), k.to(case.dtype)
    exact = (q.double(), k.double(), k.double())
    _, lse = ops.compressed_attention(*exact, case.geometry, num_keys=case.num_keys, backend="reference")
    return q, k, lse.float()


def importance_parts(case, q, k, lse):
    """`direct` and `overflow` of all queries, NaN where the kernel wrote nothing; zero where no block reaches over."""
    from trifocal.ops.hopper.scoring import launch_importance
    from trifocal.ops.triton.common import LOG2_E
    from trifocal.ops.triton.scoring import LINE, Chunk

    configuration = dispatch.importance_on_hopper(q, k, case.geometry, packed=False)
    assert configuration is not None, "the portable kernel would run"
    blocks = case.geometry.num_selection_blocks(case.num_keys)
    lines = -(-blocks // LINE.value)
    sizes = (case.batch, case.queries, case.groups, lines * LINE.value)
    direct, overflow = (torch.full(sizes, torch.nan, device="cuda") for _ in range(2))
    shift = case.num_keys - case.queries
    chunk = Chunk(0, case.queries, shift, blocks, lines)
    launch_importance(
        q, k, lse, direct, overflow, case.geometry, chunk, case.dim**-0.5 * LOG2_E, **configuration
    )  # fmt: skip
    if case.geometry.compression_block_size == case.geometry.compression_stride:
        assert overflow.isnan().all()
        overflow.zero_()
    return direct[..., :blocks], overflow[..., :blocks]


def candidates(case):
    """Whether a block is a candidate of a query whose blocks are scored, [T, J]."""
    position = torch.arange(case.num_keys - case.queries, case.num_keys, device="cuda")
    count = position // case.geometry.selection_block_size + 1
    blocks = torch.arange(case.geometry.num_selection_blocks(case.num_keys), device="cuda")
    return (blocks < count[:, None]) & (count > case.geometry.num_selected_blocks)[:, None]


def added(direct, overflow):
    """Importance: nothing reaches over into the first block."""
    return torch.cat((direct[..., :1], direct[..., 1:] + overflow[..., 1:]), -1)


def exact_importance(case, q, k, lse):
    """Equations 8 to 10 in float64, [B, T, G, J]."""
    rules, heads = case.geometry, case.heads // case.groups
    q, lse = q.double().unflatten(2, (case.groups, heads)), lse.double().unflatten(2, (case.groups, heads))
    first = torch.arange(k.shape[1], device="cuda") * rules.compression_stride
    position = torch.arange(case.num_keys - case.queries, case.num_keys, device="cuda")
    visible = first + rules.compression_block_size - 1 <= position[:, None]
    start = torch.arange(rules.num_selection_blocks(case.num_keys), device="cuda") * rules.selection_block_size
    ends = torch.minimum(first[:, None] + rules.compression_block_size, start + rules.selection_block_size)
    overlap = (ends - torch.maximum(first[:, None], start)).clamp(min=0).double() / rules.compression_stride
    total = 0.0
    for head in range(heads):
        scores = torch.einsum("btgd,bcgd->btgc", q[:, :, :, head], k.double()) * case.dim**-0.5
        p = (scores - lse[:, :, :, head, None]).exp().where(visible[:, None], 0.0)
        total = total + p
    return total @ overlap


@each_case
def test_importance(case):
    inputs = draw(case)
    parts, again = importance_parts(case, *inputs), importance_parts(case, *inputs)
    assert all(map(torch.equal, (x.nan_to_num(-1.0) for x in parts), (x.nan_to_num(-1.0) for x in again)))
    importance = added(*parts)
    exact, scored = exact_importance(case, *inputs), candidates(case)[:, None]
    difference = (importance.double() - exact).abs().where(scored, 0.0).amax(-1)
    assert scored.any()
    assert not difference.isnan().any(), "a candidate has no importance"
    assert (difference <= BOUND * exact.amax(-1)).all(), (difference / exact.amax(-1)).max()


@pytest.mark.parametrize(
    ("case", "buffer_bytes"),
    [*((case, 2**28) for case in CASES), (CASES[0], 1)],
    ids=lambda value: getattr(value, "why", value),
)
def test_the_choice_is_the_rule_on_the_same_importance(case, buffer_bytes, monkeypatch):
    """Exactly: forced blocks, then the most important, ties to the lower index."""
    from trifocal.ops.triton.scoring import select_blocks_forward

    q, k, lse = draw(case)
    rules = case.geometry
    monkeypatch.setattr(dispatch, "IMPORTANCE_BUFFER_BYTES", buffer_bytes)
    chosen = select_blocks_forward(q, k, lse, rules, case.num_keys, case.dim**-0.5, None)
    importance = added(*importance_parts(case, q, k, lse))
    position = torch.arange(case.num_keys - case.queries, case.num_keys, device="cuda")
    home = (position // rules.selection_block_size)[:, None, None]
    block = torch.arange(importance.shape[-1], device="cuda")
    importance = importance.nan_to_num(0.0)
    forced = (block < rules.num_initial_blocks) | (block > home - rules.num_local_blocks)
    importance = importance.masked_fill(forced, torch.inf)
    importance = importance.masked_fill(block > home, -torch.inf)
    ranked, order = importance.sort(dim=-1, descending=True, stable=True)
    ranked, order = (x[..., : rules.num_selected_blocks] for x in (ranked, order))
    order = order.masked_fill(ranked == -torch.inf, len(block)).sort(-1).values
    assert torch.equal(chosen, order.masked_fill(order == len(block), -1).to(torch.int32))


def test_equal_keys_make_equal_blocks():
    """In every bit, or ties would not go to the lower index."""
    case = Case("ties", PAPER, 2300, 16, 1, 128)
    direct, overflow = importance_parts(case, *draw(case, equal_keys=True))
    query = 2299
    whole = (query + 1 - PAPER.compression_block_size) // PAPER.selection_block_size
    assert whole > 32
    for part in (direct[0, query, 0, :whole], overflow[0, query, 0, 1:whole]):
        assert (part == part[0]).all(), part


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("heads", [1, 6, 16])
@pytest.mark.parametrize("lengths", [None, (200, 1, 64, 65, 970)], ids=["one document", "packed"])
def test_keys_of_the_window_on_hopper(dim, heads, lengths, monkeypatch):
    """The Hopper kernel for d_k and d_v, which only calls with more programs than these take by themselves."""
    from trifocal.ops.triton.interval.window import window_backward, window_forward

    case = problems.large("window on Hopper", PAPER, 1300, 2 * heads, 2, dim, 128, lengths=lengths)
    inputs = problems.draw(case, torch.bfloat16)
    q, k, v = inputs.q, inputs.k_win, inputs.v_win
    window, scale, documents = case.geometry.window_size, case.dim**-0.5, problems.documents_of(case)
    o, lse = window_forward(q, k, v, window, scale, documents)

    monkeypatch.setattr(dispatch, "FEWEST_PROGRAMS_OF_WINDOW_DKDV", 0)
    packed = documents is not None
    assert dispatch.interval_on_hopper("dkdv", q, k, v, o, window=True, packed=packed), "the portable kernel would run"

    def gradients():
        return window_backward(cotangent(o), q, k, v, o, lse, window, scale, documents)

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    o_exact = ops.window_attention(*exact, window, backend="reference", cu_seqlens=documents)
    expected = torch.autograd.grad(o_exact, exact, cotangent(o).double())
    bound = problems.allowed(case, inputs, problems.choice(case, inputs), 2)
    got = gradients()
    errors = [error(a, e) for a, e in zip(got, expected, strict=True)]
    assert max(errors) <= bound, (errors, bound)
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(), strict=True)), "two runs differ"
