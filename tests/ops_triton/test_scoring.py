"""Scoring and top-n: the kernels' choice against the float64 oracle's, and exact ties against the rule."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from tests.ops.cases import geometry
from trifocal.testing import oracle

pytest.importorskip("triton")

SMALL = geometry(8, 4, 16, 4, 1, 1, 11)
# A block that was not taken may be ahead of one that was by this share of the row's largest importance: fp32 sums.
NEAR_TIE = 1e-5


@dataclass(frozen=True)
class Case:
    """One problem; `why` is the reason for it."""

    why: str
    queries: int
    keys: int
    heads: int = 2
    groups: int = 1
    dim: int = 16
    batch: int = 1
    geometry: object = SMALL
    lengths: tuple[int, ...] | None = None
    buffer_bytes: int = 2**28


CASES = (
    Case("three heads a group, two batch entries, dim in two parts", 97, 97, 6, 2, 24, batch=2),
    Case("fewer queries than keys", 20, 170, 4, 1),
    Case("one query", 1, 170, 4, 2),
    Case("packed: short, 1 token, longer than a choice", 150, 150, 2, lengths=(17, 1, 90, 42)),
    Case("paper's proportions", 40, 330, geometry=geometry(32, 16, 64, 3, 1, 1, 11)),
    Case("three taps a block, no initial block", 90, 90, geometry=geometry(16, 8, 24, 2, 0, 1, 11)),
    Case("no overlap", 100, 100, geometry=geometry(16, 16, 16, 3, 1, 2, 11)),
    Case("more taps than a tile holds", 20, 300, geometry=geometry(4, 1, 128, 2, 1, 0, 11)),
    Case("everything forced", 60, 60, geometry=geometry(8, 4, 16, 3, 1, 2, 11)),
    Case("chunks of queries", 150, 150, 2, 2, buffer_bytes=1),
    Case("nothing to choose: fewer blocks than may be selected", 40, 40),
    Case("no compressed block", 7, 7),
)


def run(case: Case, q, k_cmp, lse, device: str):
    from trifocal.ops import dispatch
    from trifocal.ops.layout import Documents
    from trifocal.ops.triton.scoring import select_blocks_forward

    documents = None
    if case.lengths is not None:
        borders = torch.tensor([0, *case.lengths], device=device).cumsum(0)
        documents = Documents.from_cu_seqlens(borders, case.keys)
    scale = case.dim**-0.5
    with mock.patch.object(dispatch, "IMPORTANCE_BUFFER_BYTES", case.buffer_bytes):
        return select_blocks_forward(
            q.to(device), k_cmp.to(device), lse.to(device), case.geometry, case.keys, scale, documents
        ).cpu()


def draw(case: Case, equal_keys: bool = False):
    """q, k_cmp and the log-sum-exp in fp32, and the oracle's importance."""
    generator = torch.Generator().manual_seed(0)
    lengths = case.lengths and list(case.lengths)
    compressed = len(oracle.compression_spans(case.geometry, case.keys, lengths))
    q = torch.randn(case.batch, case.queries, case.heads, case.dim, generator=generator)
    k_cmp = torch.randn(case.batch, compressed, case.groups, case.dim, generator=generator)
    if equal_keys:
        k_cmp = k_cmp[:, :1].expand(-1, compressed, -1, -1)
    _, lse = oracle.compressed_attention(q, k_cmp, k_cmp, case.geometry, num_keys=case.keys, lengths=lengths)
    importance = oracle.importance(q, k_cmp, lse, case.geometry, num_keys=case.keys, lengths=lengths)
    return q, k_cmp, lse.float(), importance


@pytest.mark.parametrize("case", CASES, ids=[case.why for case in CASES])
def test_choice_is_the_most_important(case: Case, device: str) -> None:
    """Scores of the chosen blocks, not indices: where fp32 cannot tell two blocks apart, either is right."""
    q, k_cmp, lse, importance = draw(case)
    chosen = run(case, q, k_cmp, lse, device)
    lengths = case.lengths and list(case.lengths)
    assert chosen.shape == (case.batch, case.queries, case.groups, case.geometry.num_selected_blocks)
    assert chosen.dtype == torch.int32
    for b, t, g in torch.cartesian_prod(*(torch.arange(n) for n in chosen.shape[:3])).tolist():
        scores = importance[b][t][g]
        position = case.keys - case.queries + t
        local = position - oracle.document_at(position, case.keys, lengths).start
        row = chosen[b, t, g].tolist()
        wanted = oracle.choose(scores, local, case.geometry)
        taken = [block for block in row if block >= 0]
        assert row == sorted(set(taken)) + [-1] * (len(row) - len(taken))
        assert len(taken) == len(wanted)
        forced = oracle.forced_blocks(local, case.geometry)
        assert forced <= set(taken)
        bound = NEAR_TIE * max(scores, default=0.0)
        for one, other in zip(sorted(scores[j] for j in taken), sorted(scores[j] for j in wanted), strict=True):
            assert abs(one - other) <= bound, (b, t, g, row, wanted)


@pytest.mark.parametrize("lengths", [None, (60, 90)], ids=["one sequence", "packed"])
def test_exact_ties_go_to_the_lower_index(lengths: tuple[int, ...] | None, device: str) -> None:
    """With equal keys all blocks that see as many compressed ones are equal, in fp32 too."""
    case = Case("ties", 150, 150, 4, 2, lengths=lengths)
    q, k_cmp, lse, importance = draw(case, equal_keys=True)
    chosen = run(case, q, k_cmp, lse, device)
    for t in range(case.queries):
        start = oracle.document_at(t, case.keys, lengths and list(lengths)).start
        for g in range(case.groups):
            # The oracle's sums in float64 differ in the last bits; its ties are exact after rounding.
            scores = [round(score, 9) for score in importance[0][t][g]]
            wanted = oracle.choose(scores, t - start, case.geometry)
            assert [block for block in chosen[0, t, g].tolist() if block >= 0] == wanted, (t, g)


def test_two_runs_agree(device: str) -> None:
    case = Case("twice", 97, 97, 6, 2, 24, batch=2)
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(2, 97, 6, 24, generator=generator)
    k_cmp = torch.randn(2, case.geometry.num_compressed_blocks(97), 2, 24, generator=generator)
    lse = torch.randn(2, 97, 6, generator=generator) + 4
    assert torch.equal(run(case, q, k_cmp, lse, device), run(case, q, k_cmp, lse, device))
