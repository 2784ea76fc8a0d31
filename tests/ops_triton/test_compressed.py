"""Compressed attention's kernels, interpreted, against the float64 oracle."""

import pytest
import torch

from tests.ops.cases import ODD, Case, draw
from tests.ops_triton.forced import interval_tile_rule
from tests.ops_triton.problems import INTERVALS, compare, documents_of, suits_copy_engine
from trifocal.ops import dispatch
from trifocal.ops.triton.interval.compressed import compressed_backward, compressed_forward
from trifocal.testing import oracle
from trifocal.testing.inputs import cotangent

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on a GPU")

ALL = (*INTERVALS, Case("no power of two anywhere", ODD, 31, batch=2, heads=3, groups=3, dim=5, value_dim=9))
PATHS = [(case, False, 3) for case in ALL]
PATHS += [(case, True, 1) for case in ALL if suits_copy_engine(case) and case.num_compressed]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(dispatch, "interval_tile", interval_tile_rule)


each_path = pytest.mark.parametrize(
    ("case", "tma", "parts"),
    PATHS,
    ids=[f"{case.why}, {parts} parts, {'copy engine' if tma else 'pointers'}" for case, tma, parts in PATHS],
)


def exact_results(case, inputs, d_o, d_lse):
    """o, lse and the gradients of q, k_cmp, v_cmp; zeros where nothing is compressed."""
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k_cmp, inputs.v_cmp)]
    o, lse = oracle.compressed_attention(*leaves, case.geometry, num_keys=case.num_keys, lengths=case.document_lengths)
    seen = lse.isfinite()
    total = (o * d_o.double()).sum() + (lse.where(seen, 0.0) * d_lse.double()).sum()
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return o, lse, *gradients


@each_path
def test_values_and_gradients(case, tma, parts, monkeypatch):
    monkeypatch.setattr(dispatch, "tma_fits", lambda *tensors: tma)
    monkeypatch.setattr(dispatch, "interval_parts", lambda *sizes: parts)
    inputs = draw(case, torch.float32)
    q, k, v = inputs.q, inputs.k_cmp, inputs.v_cmp
    scale, documents = case.dim**-0.5, documents_of(case)
    filled = k.shape[1]
    if documents is not None:
        # Slots that no document fills hold garbage, which may not matter.
        spare = case.num_keys // case.geometry.compression_stride - filled
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, spare), value=torch.nan) for x in (k, v))
    o, lse = compressed_forward(q, k, v, case.geometry, case.num_keys, scale, documents)
    d_o, d_lse = cotangent(o), cotangent(lse, seed=2).where(lse.isfinite(), 0.0)
    d_q, d_k, d_v = compressed_backward(
        d_o,
        q,
        k,
        v,
        o,
        lse,
        case.geometry,
        case.num_keys,
        scale,
        documents,
        d_lse=d_lse,
    )
    assert d_k[:, filled:].eq(0).all()
    assert d_v[:, filled:].eq(0).all()
    actual = (o, lse, d_q, d_k[:, :filled], d_v[:, :filled])
    compare("o lse d_q d_k d_v", actual, exact_results(case, inputs, d_o, d_lse))


def test_queries_that_see_nothing_give_zeros():
    case = INTERVALS[0]
    inputs = draw(case, torch.float32)
    q, k, v = inputs.q, inputs.k_cmp, inputs.v_cmp
    o, lse = compressed_forward(q, k, v, case.geometry, case.num_keys, 0.3, None)
    blind = case.geometry.compression_block_size - 1
    assert o[:, :blind].eq(0).all()
    assert lse[:, :blind].eq(-torch.inf).all()
    assert lse[:, blind:].isfinite().all()
    d_q, _, _ = compressed_backward(cotangent(o), q, k, v, o, lse, case.geometry, case.num_keys, 0.3, None)
    assert d_q[:, :blind].eq(0).all()
