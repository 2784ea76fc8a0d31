"""With everything covered, sparse attention is dense attention: the bounds are the specification's."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.ops.cases import Case, draw, geometry
from trifocal import nsa_attention, ops
from trifocal.testing.inputs import cotangent
from trifocal.testing.tolerances import FULL_COVERAGE, error

ALL = geometry(4, 2, 8, 16, 1, 2, 128)  # 16 blocks of 8 and a window of 128: 121 tokens and more
SHAPES = (
    Case("odd length", ALL, 121, batch=2, heads=6, groups=2, dim=16, value_dim=12),
    Case("a prime length, multi-query", ALL, 67, heads=8, groups=1, dim=32),
    Case("the last queries only", ALL, 13, keys=127, heads=4, groups=4, value_dim=24),
    Case("one token", ALL, 1, batch=2),
)
each_shape = pytest.mark.parametrize("case", SHAPES, ids=[case.why for case in SHAPES])
each_precision = pytest.mark.parametrize("dtype", FULL_COVERAGE, ids=str)


def dense(q, k, v):
    """Causal attention of the last T queries over S keys, by PyTorch."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def close_to_dense(actual, leaves, dtype):
    expected = dense(*leaves)
    upstream = cotangent(expected)
    got, exact = (torch.autograd.grad(x, leaves, upstream) for x in (actual, expected))
    for name, a, e in zip(("o", "q", "k", "v"), (actual, *got), (expected, *exact), strict=True):
        assert error(a, e) <= FULL_COVERAGE[dtype], name


@each_precision
@each_shape
def test_selected_branch(case: Case, dtype):
    inputs = draw(case, dtype).leaves()
    _, lse = ops.compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, ALL, num_keys=case.num_keys)
    selected = ops.select_blocks(inputs.q, inputs.k_cmp, lse, ALL, num_keys=case.num_keys)
    leaves = (inputs.q, inputs.k_slc, inputs.v_slc)
    close_to_dense(ops.selected_attention(*leaves, selected, ALL), leaves, dtype)


@each_precision
@each_shape
def test_window_branch(case: Case, dtype):
    inputs = draw(case, dtype).leaves()
    leaves = (inputs.q, inputs.k_win, inputs.v_win)
    close_to_dense(ops.window_attention(*leaves, ALL.window_size), leaves, dtype)


@each_precision
@each_shape
def test_compressed_branch_with_blocks_of_one_token(case: Case, dtype):
    ones = geometry(1, 1, 4, 32, 1, 1, 1)
    inputs = draw(case, dtype).leaves()
    leaves = (inputs.q, inputs.k_slc, inputs.v_slc)
    o, lse = ops.compressed_attention(*leaves, ones, num_keys=case.num_keys)
    close_to_dense(o, leaves, dtype)
    scores = torch.einsum("bthd,bsgd->bthsg", inputs.q, inputs.k_slc) / case.dim**0.5
    own_group = torch.arange(case.heads) // (case.heads // case.groups)
    scores = scores.gather(-1, own_group.view(1, 1, -1, 1, 1).expand(*scores.shape[:-1], 1))[..., 0]
    future = torch.ones(case.queries, case.num_keys, dtype=torch.bool).triu(case.num_keys - case.queries + 1)
    expected = scores.masked_fill(future[:, None], -torch.inf).logsumexp(-1)
    assert error(lse, expected) <= FULL_COVERAGE[dtype]


@each_precision
@each_shape
def test_whole_attention(case: Case, dtype):
    """Selected and window branch at a half each; the compressed one shut."""
    inputs = draw(case, dtype).leaves()
    leaves = (inputs.q, inputs.k_slc, inputs.v_slc)
    gates = torch.tensor([0.0, 0.5, 0.5], dtype=dtype).expand(*inputs.gates.shape)
    k, v = inputs.k_slc, inputs.v_slc
    o = nsa_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, k, v, k, v, gates, ALL)
    close_to_dense(o, leaves, dtype)


def test_one_key_too_few_is_seen():
    """The comparison is sharp: a window one short of everything is not dense attention."""
    case = SHAPES[1]
    inputs = draw(case)
    o = ops.window_attention(inputs.q, inputs.k_win, inputs.v_win, case.num_keys - 1)
    exact = dense(inputs.q, inputs.k_win, inputs.v_win)
    assert error(o[:, :-1], exact[:, :-1]) <= FULL_COVERAGE[torch.float64]
    assert error(o, exact) > 1e-4
