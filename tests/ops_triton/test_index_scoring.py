"""The choice of index heads: the kernels' blocks against scores in float64, and exact ties against the rule."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from tests.ops.cases import geometry
from trifocal.testing import oracle

pytest.importorskip("triton")

SMALL = geometry(8, 4, 16, 4, 1, 1, 11)
# A block that was not taken may be ahead of one that was by this much: fp32 sums of 64 products of normal numbers.
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Case:
    """One problem; `why` is the reason for it."""

    why: str
    queries: int
    keys: int
    groups: int = 1
    dim: int = 16
    batch: int = 1
    geometry: object = SMALL
    lengths: tuple[int, ...] | None = None
    buffer_bytes: int = 2**28


CASES = (
    Case("two batch entries, dim in two parts", 97, 97, 3, 24, batch=2),
    Case("more lines of blocks than one program takes", 30, 1500, 2, geometry=geometry(4, 4, 16, 5, 1, 2, 11)),
    Case("fewer queries than keys", 20, 170, 2),
    Case("one query", 1, 170, 2),
    Case("packed: short, 1 token, longer than a choice", 150, 150, 2, lengths=(17, 1, 90, 42)),
    Case("blocks of 48 tokens, no initial block", 90, 400, geometry=geometry(16, 8, 48, 2, 0, 1, 11)),
    Case("blocks of more keys than a product", 20, 700, geometry=geometry(4, 1, 128, 2, 1, 0, 11)),
    Case("chunks of queries", 150, 150, 2, buffer_bytes=1),
    Case("nothing to choose: fewer blocks than may be selected", 40, 40),
)


def run(case: Case, q_idx, k_idx, device: str):
    from trifocal.ops import dispatch, select_blocks_by_index

    boundaries = None if case.lengths is None else torch.tensor([0, *case.lengths], device=device).cumsum(0)
    with mock.patch.object(dispatch, "IMPORTANCE_BUFFER_BYTES", case.buffer_bytes):
        return select_blocks_by_index(
            q_idx.to(device), k_idx.to(device), case.geometry, cu_seqlens=boundaries, backend="triton"
        ).cpu()


def draw(case: Case):
    generator = torch.Generator().manual_seed(0)
    q_idx = torch.randn(case.batch, case.queries, case.groups, case.dim, generator=generator)
    return q_idx, torch.randn(case.batch, case.keys, case.dim, generator=generator)


def block_scores(q_idx, k_idx, case: Case, b: int, t: int, g: int) -> tuple[int, list[float]]:
    """The query's position in its document, and the largest score of each candidate block's visible tokens."""
    position = case.keys - case.queries + t
    start = oracle.document_at(position, case.keys, case.lengths and list(case.lengths)).start
    scores = (k_idx[b, start : position + 1].double() @ q_idx[b, t, g].double()).split(
        case.geometry.selection_block_size
    )
    return position - start, [float(block.max()) for block in scores]


@pytest.mark.parametrize("case", CASES, ids=[case.why for case in CASES])
def test_choice_has_the_largest_scores(case: Case, device: str) -> None:
    """Scores of the chosen blocks, not indices: where fp32 cannot tell two blocks apart, either is right."""
    q_idx, k_idx = draw(case)
    chosen = run(case, q_idx, k_idx, device)
    assert chosen.shape == (case.batch, case.queries, case.groups, case.geometry.num_selected_blocks)
    assert chosen.dtype == torch.int32
    for b, t, g in torch.cartesian_prod(*(torch.arange(n) for n in chosen.shape[:3])).tolist():
        local, scores = block_scores(q_idx, k_idx, case, b, t, g)
        row = chosen[b, t, g].tolist()
        expected = oracle.choose(scores, local, case.geometry)
        taken = [block for block in row if block >= 0]
        assert row == sorted(set(taken)) + [-1] * (len(row) - len(taken))
        assert len(taken) == len(expected) and oracle.forced_blocks(local, case.geometry) <= set(taken)
        for one, other in zip(sorted(scores[j] for j in taken), sorted(scores[j] for j in expected), strict=True):
            assert abs(one - other) <= NEAR_TIE, (b, t, g, row, expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_exact_ties_go_to_the_lower_index(sign: int, device: str) -> None:
    """Scores that are all equal, of either sign."""
    case = Case("ties", 150, 150, 2)
    ones = torch.ones(1, 150, 2, 16), sign * torch.ones(1, 150, 16)
    chosen = run(case, *ones, device)
    for t in range(case.queries):
        expected = oracle.choose([0.0] * (t // 16 + 1), t, case.geometry)
        assert [block for block in chosen[0, t, 0].tolist() if block >= 0] == expected, t


def test_order_of_scores_is_kept_by_their_bits() -> None:
    """The map of the kernel, in NumPy's place: order of all signs and sizes, and no NaN among its results."""
    scores = torch.tensor([-torch.inf, -3e38, -1.0, -1e-30, 0.0, 1e-30, 1e-3, 1.0, 3.0, 1e4])
    bits = scores.view(torch.int32)
    ordered = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 1) + 0x40000000
    assert (ordered.diff() > 0).all() and (ordered >= 0).all() and (ordered <= 0x7F800000).all()
