"""The judge is judged first: the oracle against small tables written by hand and against dense attention."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.ops.cases import ODD, PAPER, USUAL, Case, draw, geometry
from trifocal.testing import oracle
from trifocal.testing.tolerances import FULL_COVERAGE, error


def test_compressed_blocks_by_hand():
    # l = 8, d = 4: 19 tokens hold blocks at 0, 4 and 8 (the one at 12 would end at 20).
    assert [span.start for span in oracle.compression_spans(USUAL, 19)] == [0, 4, 8]
    # Documents of 7, 8 and 13 tokens: none, one, two; each grid starts with its document.
    spans = oracle.compression_spans(USUAL, 28, [7, 8, 13])
    assert [(span.start, span.end, span.document) for span in spans] == [(7, 15, 1), (15, 23, 2), (19, 27, 2)]


def test_importance_by_hand():
    # Scores of zero and lse of zero: every visible compressed block has probability 1. Paper geometry, position 255:
    # blocks 0 … 14 are visible; j takes 4j-1 … 4j+3 with 1 2 2 2 1; block 3 lacks 15, block 0 lacks -1.
    q, k_cmp, lse = torch.zeros(1, 1, 1, 2), torch.zeros(1, 15, 1, 2), torch.zeros(1, 1, 1)
    assert oracle.importance(q, k_cmp, lse, PAPER, num_keys=256) == [[[[7.0, 8.0, 8.0, 7.0]]]]
    # l = 6, d = 3, l' = 9, position 20: blocks at 0 3 6 9 12 15, each of two strides.
    # Tokens 0-8 take blocks 0, 1 whole and half of 2; tokens 9-17 half of 2, 3 and 4 whole, half of 5; 18-20 half of 5.
    k_cmp = torch.zeros(1, 6, 1, 2)
    assert oracle.importance(q, k_cmp, lse, ODD, num_keys=21) == [[[[5.0, 6.0, 1.0]]]]


def test_choice_by_hand():
    g = geometry(4, 2, 8, 4, 1, 2, 8)
    scores = [0.0, 5.0, 9.0, 9.0, 9.0, 0.0, 0.0]
    assert oracle.choose(scores, 6 * 8, g) == [0, 2, 5, 6]  # one free slot: 2 wins the tie with 3 and 4
    assert oracle.choose(scores[:3], 2 * 8 + 7, g) == [0, 1, 2]
    assert oracle.choose(scores[:1], 0, g) == [0]
    assert oracle.forced_blocks(9, g) == {0, 1}


def test_window_by_hand():
    v = torch.arange(6.0).view(1, 6, 1, 1)
    q = k = torch.zeros(1, 6, 1, 1)
    means = oracle.window_attention(q, k, v, 3).flatten().tolist()
    assert means == pytest.approx([0.0, 0.5, 1.0, 2.0, 3.0, 4.0])
    means = oracle.window_attention(q, k, v, 3, lengths=[4, 2]).flatten().tolist()
    assert means == pytest.approx([0.0, 0.5, 1.0, 2.0, 4.0, 4.5])


def test_full_coverage_is_dense_attention():
    case = Case("", geometry(4, 4, 4, 10, 1, 1, 40), 33, batch=2, heads=6, groups=2, value_dim=5)
    inputs = draw(case)
    q, k, v = inputs.q, inputs.k_slc, inputs.v_slc
    dense = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    everything = torch.arange(10).expand(2, 33, 2, 10)
    assert error(oracle.window_attention(q, k, v, 40), dense) < FULL_COVERAGE[torch.float64]
    selected = oracle.selected_attention(q, k, v, everything, case.geometry)
    assert error(selected, dense) < FULL_COVERAGE[torch.float64]
