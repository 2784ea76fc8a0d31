"""Backward from stored d_scores, interpreted: d_q's kernel and the chunks, behind a dkdv written in PyTorch."""

from unittest import mock

import pytest
import torch

from trifocal.ops import dispatch
from trifocal.ops.tiles import Tile, cdiv
from trifocal.ops.triton.interval.common import Branch, IntervalProblem

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on a GPU")

BLOCK, STRIDE = 8, 4
KEYS, ROWS = 32, 16  # Keys of a program of dkdv, two planes; rows of a tile.
DOCUMENTS = (30, 1, 70, 28)


def _visible(branch, num_queries, num_keys):
    """Which keys, [queries, keys], each query sees."""
    token = torch.arange(num_queries) + branch.query_shift
    key = torch.arange(num_keys)
    if not branch.is_window:
        return key < ((token[:, None] + 1 - BLOCK + STRIDE).clamp(min=0) // STRIDE)
    visible = (key <= token[:, None]) & (key > token[:, None] - branch.window_size)
    if branch.is_packed:
        visible &= key >= (token - branch.positions[token])[:, None]
    return visible


def _attention(q, k, v, visible, scale):
    groups = k.shape[2]
    q = q.unflatten(2, (groups, -1))
    scores = torch.einsum("btgrd,bsgd->btgrs", q, k) * scale
    scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.where(lse.isfinite(), 0.0)[..., None]).exp()
    return torch.einsum("btgrs,bsgv->btgrv", p, v).flatten(2, 3), lse.flatten(2, 3)


def _dkdv(problem, stored, totals=None):
    """As the Hopper kernel: d_scores of all visited tiles of rows, garbage in between."""
    d_o, q, k, v, lse, delta, gate, scale, branch = problem
    (batch, num_queries, heads, _), (_, num_keys, groups, _) = q.shape, k.shape
    assert lse.is_contiguous() and delta.is_contiguous() and gate.shape == lse.shape
    q_per_kv = (heads // groups) & -(heads // groups)
    visible = _visible(branch, num_queries, num_keys)
    grouped = [x.unflatten(2, (groups, -1)) for x in (d_o, q, lse, delta, gate)]
    scores = torch.einsum("btgrd,bsgd->btgrs", grouped[1], k) * scale
    p = (scores - grouped[2][..., None]).exp() * grouped[4][..., None]
    p = p.masked_fill(~visible[:, None, None, :], 0.0)
    d_scores = p * (torch.einsum("btgrv,bsgv->btgrs", grouped[0], v) - grouped[3][..., None])
    d_scores = d_scores.masked_fill(~visible[:, None, None, :], 0.0)

    planes = stored.tensor.view(batch, heads // q_per_kv, stored.planes_of_group, -1, KEYS // 2)
    # [batch, share, rows, keys]
    by_row = d_scores.reshape(batch, num_queries, -1, q_per_kv, num_keys).transpose(1, 2).flatten(2, 3)
    for half in range(2 * cdiv(num_keys, KEYS)):
        plane = planes[:, :, stored.first_plane + half]
        plane[:] = torch.nan
        keys = slice(half * KEYS // 2, min((half + 1) * KEYS // 2, num_keys))
        seeing = visible[:, keys].any(1).nonzero()
        if keys.start >= num_keys or not len(seeing):
            continue
        program = visible[:, half // 2 * KEYS :][:, :KEYS].any(1).nonzero()
        origin = int(program[0]) * q_per_kv // 4 * 4
        first = (int(seeing[0]) * q_per_kv - origin) // ROWS * ROWS + origin
        last = cdiv((int(seeing[-1]) + 1) * q_per_kv - origin, ROWS) * ROWS + origin
        base = (keys.start - branch.query_shift) * q_per_kv if branch.is_window else 0
        for row in range(max(first, base), min(last, base + plane.shape[2])):
            inside = slice(0, keys.stop - keys.start)
            plane[:, :, row - base, inside] = by_row[:, :, row, keys] if row < by_row.shape[2] else 0.0
    d_k = torch.einsum("btgrs,btgrd->bsgd", d_scores, grouped[1]) * scale
    d_v = torch.einsum("btgrs,btgrv->bsgv", p, grouped[0])
    if totals is None:
        return d_k, d_v
    for total, x in zip(totals, (d_k, d_v), strict=True):
        total[:, :num_keys] += x
    return totals


def _branch(window_size, length, num_queries, packed):
    shift = length - num_queries
    if not window_size:
        return Branch(block=BLOCK, stride=STRIDE, query_shift=shift)
    branch = Branch(window_size=window_size, query_shift=shift)
    if not packed:
        return branch
    ids = torch.cat([torch.full((size,), n, dtype=torch.int32) for n, size in enumerate(DOCUMENTS)])
    positions = torch.cat([torch.arange(size, dtype=torch.int32) for size in DOCUMENTS])
    ends = torch.tensor([0, *DOCUMENTS]).cumsum(0).int()
    return branch._replace(ids=ids, positions=positions, query_begin=ids, query_end=ends)


@pytest.mark.parametrize("fits", ["all", "one batch entry", "a third of one"])
@pytest.mark.parametrize(
    ("window_sizes", "queries", "heads", "packed"),
    [
        ((0,), 129, 4, False), ((0,), 90, 6, False), ((0,), 129, 1, False),
        ((21,), 129, 4, False), ((1,), 129, 2, False), ((33,), 129, 4, True), ((50,), 90, 6, True),
        ((0, 21), 129, 4, False), ((0, 50), 90, 6, False), ((0, 129), 129, 2, False),
    ],
)  # fmt: skip
def test_gradients(window_sizes, queries, heads, packed, fits, monkeypatch):
    from trifocal.ops.hopper.interval import backward

    dim, length, groups, batch = 24, sum(DOCUMENTS), 2, 1 if packed else 2
    heads, scale = heads * groups, dim**-0.5
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    q, d_o, old = (draw(batch, queries, heads, dim) for _ in range(3))
    problems, expected = [], [old.double() if fits == "all" else torch.zeros_like(old, dtype=torch.float64)]
    for window_size in window_sizes:
        num_keys = length if window_size else (length - BLOCK) // STRIDE + 1
        k, v = (draw(batch, num_keys, groups, dim) for _ in range(2))
        gate = draw(batch, queries, heads)
        branch = _branch(window_size, length, queries, packed)
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        o, lse = _attention(*exact, _visible(branch, queries, num_keys), scale)
        d_q, d_k, d_v = torch.autograd.grad(o, exact, gate[..., None].double() * d_o)
        expected = [expected[0] + d_q, *expected[1:], d_k, d_v]
        # Rows that see nothing have probabilities of 0.
        lse = lse.detach().float().masked_fill(~lse.isfinite(), torch.inf)
        delta = (o * d_o).sum(-1).detach().float()
        problems.append(IntervalProblem(d_o, q, k, v, lse, delta, gate, scale, branch))

    monkeypatch.setattr(backward, "KEYS_OF_DKDV", KEYS)
    monkeypatch.setattr(backward, "KEYS_OF_PLANE", KEYS // 2)
    of_entry = max(backward._bytes_of_keys(x, x.k.shape[1]) for x in problems)
    budget = {"all": batch * of_entry, "one batch entry": of_entry, "a third of one": of_entry // 3}[fits]
    monkeypatch.setattr(dispatch, "D_SCORES_BUFFER_BYTES", budget)
    dkdv = mock.Mock(side_effect=_dkdv)
    monkeypatch.setattr(backward, "launch_dkdv", dkdv)
    found = backward.launch_backward(
        problems, old.clone() if fits == "all" else None, [{}] * len(problems), Tile(32, KEYS // 2, 4, 1)
    )
    calls = len(problems) * (1 if fits == "all" else batch)
    assert dkdv.call_count > calls if fits == "a third of one" else dkdv.call_count == calls
    for actual, x in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.double(), x, rtol=0, atol=2e-5)
