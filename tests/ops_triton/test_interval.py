"""Compressed and window attention's kernels, interpreted, in small tiles, against the float64 oracle."""

import pytest
import torch

from tests.ops.cases import ODD, Case, draw
from tests.ops_triton.forced import interval_tile_rule
from tests.ops_triton.problems import INTERVALS, compare, documents_of, suits_copy_engine
from trifocal.ops import dispatch, tiles
from trifocal.ops.triton.interval.compressed import compressed_backward, compressed_forward
from trifocal.ops.triton.interval.window import window_backward, window_forward
from trifocal.testing import oracle
from trifocal.testing.inputs import cotangent

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_attention.py has these on a GPU")

NO_POWER = Case("no power of two anywhere", ODD, 31, batch=2, heads=3, groups=3, dim=5, value_dim=9)
POINTERS, COPY_ENGINE = ([INTERVALS[n] for n in numbers] for numbers in ((0, 2, 6, 7), (1, 3, 4, 5)))
COMPRESSED = [(case, False, 3) for case in (*POINTERS, NO_POWER, INTERVALS[8])]
COMPRESSED += [(case, True, 1) for case in COPY_ENGINE]
WINDOW = [(case, False, 21) for case in POINTERS] + [(case, True, 21) for case in COPY_ENGINE]
WINDOW += [(INTERVALS[7], False, 1), (INTERVALS[5], True, 2), (INTERVALS[4], False, 2**40)]
assert all(map(suits_copy_engine, COPY_ENGINE))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "interval_tile", interval_tile_rule)


def each_path(number, paths):
    names = [f"{case.why}, {n} {number}, {'copy engine' if tma else 'pointers'}" for case, tma, n in paths]
    return pytest.mark.parametrize(("case", "tma", number), paths, ids=names)


@each_path("parts", COMPRESSED)
def test_compressed_values_and_gradients(case, tma, parts, monkeypatch):
    monkeypatch.setattr(dispatch, "tma_fits", lambda *tensors: tma)
    monkeypatch.setattr(dispatch, "interval_parts", lambda *sizes: parts)
    inputs = draw(case, torch.float32)
    q, k, v = inputs.q, inputs.k_cmp, inputs.v_cmp
    documents, filled = documents_of(case), k.shape[1]
    if documents is not None:
        # Slots that no document fills hold garbage, which may not matter.
        spare = case.num_keys // case.geometry.compression_stride - filled
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, spare), value=torch.nan) for x in (k, v))
    rules = (case.geometry, case.num_keys, case.dim**-0.5, documents)
    o, lse = compressed_forward(q, k, v, *rules)
    d_o, d_lse = cotangent(o), cotangent(lse, seed=2).where(lse.isfinite(), 0.0)
    d_q, d_k, d_v = compressed_backward(d_o, q, k, v, o, lse, *rules, d_lse=d_lse)
    assert not d_k[:, filled:].any() and not d_v[:, filled:].any()

    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k_cmp, inputs.v_cmp)]
    lengths = case.document_lengths
    o_exact, lse_exact = oracle.compressed_attention(*leaves, case.geometry, num_keys=case.num_keys, lengths=lengths)
    seen = lse_exact.isfinite()
    total = (o_exact * d_o.double()).sum() + (lse_exact.where(seen, 0.0) * d_lse.double()).sum()
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    actual = (o, lse, d_q, d_k[:, :filled], d_v[:, :filled])
    compare("o lse d_q d_k d_v", actual, (o_exact, lse_exact, *gradients))
    assert not o[~seen].any() and not (d_q[~seen]).any()


@each_path("window_size", WINDOW)
def test_window_values_and_gradients(case, tma, window_size, monkeypatch):
    monkeypatch.setattr(dispatch, "tma_fits", lambda *tensors: tma)
    inputs = draw(case, torch.float32)
    tensors = (inputs.q, inputs.k_win, inputs.v_win)
    scale, documents = case.dim**-0.5, documents_of(case)
    o, lse = window_forward(*tensors, window_size, scale, documents)
    d_o = cotangent(o)
    gradients = window_backward(d_o, *tensors, o, lse, window_size, scale, documents)
    leaves = [x.double().requires_grad_() for x in tensors]
    o_exact = oracle.window_attention(*leaves, window_size, lengths=case.document_lengths)
    exact = (o_exact, *torch.autograd.grad(o_exact, leaves, d_o.double()))
    compare("o d_q d_k d_v", (o, *gradients), exact)
    if documents is None and window_size == 21:
        # The keys in reach are enough.
        reach = case.queries + window_size - 1
        cut = [x[:, -reach:] for x in tensors[1:]]
        torch.testing.assert_close(window_forward(inputs.q, *cut, window_size, scale, None)[0], o)
