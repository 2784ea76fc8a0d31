"""The choice of blocks, by compressed keys and by an index: kernels against float64 scores, and exact ties."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from tests.ops.cases import Case, geometry
from tests.ops_triton.problems import documents_of
from trifocal.ops import Documents, dispatch, select_blocks, select_blocks_by_index
from trifocal.testing import oracle

pytest.importorskip("triton")

SMALL = geometry(8, 4, 16, 4, 1, 1, 11)
# A block that was not taken may be ahead of one that was by this share of the row's largest score: fp32 sums.
NEAR_TIE = 1e-5


@dataclass(frozen=True)
class Choice(Case):
    """One problem; heads: 0 for an index."""

    buffer_bytes: int = 2**28
    sign: int = 1


def choice(why, queries, keys, heads=2, groups=1, dim=16, rules=SMALL, **rest):
    return Choice(why, rules, queries, keys, heads=heads, groups=groups, dim=dim, **rest)


CASES = (
    choice("three heads a group, two batch entries, dim in two parts", 97, 97, 6, 2, 24, batch=2),
    choice("fewer queries than keys", 20, 170, 4, 1),
    choice("packed: the last queries", 64, 190, 2, lengths=(17, 150, 1, 22)),
    choice("packed: fewer lines of blocks than a row of all", 40, 600, 2, lengths=(200, 200, 200)),
    choice("three taps a block, no initial block", 90, 290, rules=geometry(32, 16, 48, 2, 0, 1, 11)),
    choice("more taps than a tile holds", 20, 300, rules=geometry(4, 1, 128, 2, 1, 0, 11)),
    choice("everything forced", 60, 60, rules=geometry(8, 4, 16, 3, 1, 2, 11)),
    choice("chunks of queries", 150, 150, 2, 2, buffer_bytes=1),
    choice("no compressed block", 7, 7),
    choice("index: two batch entries, dim in two parts", 97, 97, 0, 3, 24, batch=2),
    choice("index: more lines of blocks than a program takes", 30, 1500, 0, 2, rules=geometry(4, 4, 16, 5, 1, 2, 11)),
    choice("index: packed: the last queries", 64, 190, 0, 2, lengths=(17, 150, 1, 22)),
    choice("index: blocks of 48 tokens, no initial block", 90, 400, 0, rules=geometry(16, 8, 48, 2, 0, 1, 11)),
    choice("index: blocks of more keys than a product", 20, 700, 0, rules=geometry(4, 1, 128, 2, 1, 0, 11)),
    choice("index: chunks of queries", 100, 100, 0, 2, buffer_bytes=1),
    choice("index: negative scores, own block free", 60, 60, 0, 8, rules=geometry(4, 4, 16, 2, 1, 0, 11), sign=-1),
)


def draw(case):
    """The arguments of the choice in fp32: q, k_cmp and the log-sum-exp, or index queries and keys."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(case.batch, case.queries, case.heads or case.groups, case.dim, generator=generator)
    if not case.heads:
        k = torch.randn(case.batch, case.keys, case.dim, generator=generator)
        return (q, k) if case.sign > 0 else (q.abs(), -k.abs())
    k_cmp = torch.randn(case.batch, case.num_compressed, case.groups, case.dim, generator=generator)
    return q, k_cmp, lse_of(case, q, k_cmp)


def lse_of(case, q, k_cmp):
    rules = {"num_keys": case.keys, "lengths": case.document_lengths}
    return oracle.compressed_attention(q, k_cmp, k_cmp, case.geometry, **rules)[1].float()


def run(case, device, inputs):
    choose = select_blocks if case.heads else select_blocks_by_index
    rules = {"num_keys": case.keys, "cu_seqlens": documents_of(case, device), "backend": "triton"}
    with mock.patch.object(dispatch, "IMPORTANCE_BUFFER_BYTES", case.buffer_bytes):
        return choose(*(x.to(device) for x in inputs), case.geometry, **rules).cpu()


def exact_scores(case, inputs):
    """Scores of the candidates, by batch entry, query, group and block, in float64."""
    if case.heads:
        return oracle.importance(*inputs, case.geometry, num_keys=case.keys, lengths=case.document_lengths)
    q, k, size = *(x.double() for x in inputs), case.geometry.selection_block_size

    def scores(b, t, g):
        position = case.keys - case.queries + t
        start = oracle.document_at(position, case.keys, case.document_lengths).start
        return [float(block.max()) for block in (k[b, start : position + 1] @ q[b, t, g]).split(size)]

    return [[[scores(b, t, g) for g in range(case.groups)] for t in range(case.queries)] for b in range(case.batch)]


@pytest.mark.parametrize("case", CASES, ids=[case.why for case in CASES])
def test_choice_has_the_largest_scores(case, device):
    """Scores of the chosen blocks, not indices: where fp32 cannot tell two blocks apart, either is right."""
    inputs = draw(case)
    chosen, exact = run(case, device, inputs), exact_scores(case, inputs)
    assert chosen.shape == (case.batch, case.queries, case.groups, case.geometry.num_selected_blocks)
    assert chosen.dtype == torch.int32
    if device == "cuda":
        assert torch.equal(chosen, run(case, device, inputs)), "two runs differ"
    for b, t, g in torch.cartesian_prod(*(torch.arange(n) for n in chosen.shape[:3])).tolist():
        position, scores = case.keys - case.queries + t, exact[b][t][g]
        local = position - oracle.document_at(position, case.keys, case.document_lengths).start
        row, expected = chosen[b, t, g].tolist(), oracle.choose(scores, local, case.geometry)
        taken = [block for block in row if block >= 0]
        assert row == sorted(set(taken)) + [-1] * (len(row) - len(taken))
        assert len(taken) == len(expected) and oracle.forced_blocks(local, case.geometry) <= set(taken)
        bound = NEAR_TIE * max(map(abs, scores), default=0.0)
        for one, other in zip(sorted(scores[j] for j in taken), sorted(scores[j] for j in expected), strict=True):
            assert abs(one - other) <= bound, (b, t, g, row, expected)


# Blocks of the longer document that nobody scored: their places hold any numbers.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("heads", [4, 0], ids=["compressed keys", "index"])
def test_a_longest_length_that_is_too_small(heads, device):
    """On a GPU it is trusted: shorter documents are as they were, and no block behind it is chosen."""
    case = choice("packed", 330, 330, heads, 1, lengths=(20, 290, 20))
    inputs = [x.to(device) for x in draw(case)]
    boundaries = torch.tensor([0, *case.lengths], device=device).cumsum(0)
    choose = select_blocks if heads else select_blocks_by_index
    right, wrong = (
        choose(*inputs, SMALL, **({"num_keys": 330} if heads else {}), cu_seqlens=documents, backend="triton")
        for documents in (
            Documents.from_checked(boundaries, 330), Documents.from_checked(boundaries, 330, row_length=100)
        )
    )  # fmt: skip
    assert torch.equal(wrong[:, :20], right[:, :20]) and torch.equal(wrong[:, 310:], right[:, 310:])
    assert right.max() == 290 // 16 and wrong.max() <= 15


@pytest.mark.parametrize(("lengths", "sign"), [(None, 1), ((60, 90), -1)], ids=["plus", "packed, minus"])
@pytest.mark.parametrize("heads", [4, 0], ids=["compressed keys", "index"])
def test_exact_ties_go_to_the_lower_index(heads, lengths, sign, device):
    """With equal keys all blocks that see as many of them are equal, in fp32 too, whatever the sign of their scores."""
    case = choice("ties", 150, 150, heads, 2, lengths=lengths)
    q, k, *_ = draw(case)
    k = sign * k[:, :1].expand_as(k)
    inputs = (q, k, lse_of(case, q, k)) if heads else (q.abs(), k.abs() * sign)
    chosen, exact = run(case, device, inputs), exact_scores(case, inputs)
    for t in range(case.queries):
        start = oracle.document_at(t, case.keys, case.document_lengths).start
        for g in range(case.groups):
            # The oracle's sums in float64 differ in the last bits; its ties are exact after rounding.
            expected = oracle.choose([round(score, 9) for score in exact[0][t][g]], t - start, case.geometry)
            assert [block for block in chosen[0, t, g].tolist() if block >= 0] == expected, (t, g)
