"""Window attention's kernels, interpreted, against the float64 oracle."""

import pytest
import torch

from tests.ops.cases import Case, draw
from tests.ops_triton.forced import interval_tile_rule
from tests.ops_triton.problems import INTERVALS, compare, documents_of, suits_copy_engine
from trifocal.ops import dispatch
from trifocal.ops.triton.interval.window import window_backward, window_forward
from trifocal.testing import oracle
from trifocal.testing.inputs import cotangent

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on a GPU")

PATHS = [(case, False, 21) for case in INTERVALS] + [(case, True, 21) for case in INTERVALS if suits_copy_engine(case)]
PATHS += [(INTERVALS[0], False, 2), (INTERVALS[5], True, 2)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(dispatch, "interval_tile", interval_tile_rule)


each_path = pytest.mark.parametrize(
    ("case", "tma", "window_size"),
    PATHS,
    ids=[f"{case.why}, window {window}, {'copy engine' if tma else 'pointers'}" for case, tma, window in PATHS],
)


def exact_results(case: Case, inputs, d_o, window_size):
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k_win, inputs.v_win)]
    o = oracle.window_attention(*leaves, window_size, lengths=case.document_lengths)
    return o, *torch.autograd.grad(o, leaves, d_o.double())


@each_path
def test_values_and_gradients(case, tma, window_size, monkeypatch):
    monkeypatch.setattr(dispatch, "tma_fits", lambda *tensors: tma)
    inputs = draw(case, torch.float32)
    q, k, v = inputs.q, inputs.k_win, inputs.v_win
    scale, documents = case.dim**-0.5, documents_of(case)
    o, lse = window_forward(q, k, v, window_size, scale, documents)
    d_o = cotangent(o)
    gradients = window_backward(d_o, q, k, v, o, lse, window_size, scale, documents)
    compare("o d_q d_k d_v", (o, *gradients), exact_results(case, inputs, d_o, window_size))


def test_a_window_longer_than_the_keys():
    case = INTERVALS[0]
    inputs = draw(case, torch.float32)
    o, _ = window_forward(inputs.q, inputs.k_win, inputs.v_win, 2**40, case.dim**-0.5, None)
    compare("o", (o,), exact_results(case, inputs, cotangent(o), 10**6)[:1])


def test_a_window_of_one_key_gives_that_key_s_value():
    case = INTERVALS[1]
    inputs = draw(case, torch.float32)
    o, _ = window_forward(inputs.q, inputs.k_win, inputs.v_win, 1, 0.3, None)
    compare("o", (o,), (inputs.v_win.double().repeat_interleave(case.heads // case.groups, 2),))


def test_only_the_keys_in_reach_are_needed():
    case = INTERVALS[3]
    inputs = draw(case, torch.float32)
    window_size = 21
    reach = case.queries + window_size - 1
    whole, _ = window_forward(inputs.q, inputs.k_win, inputs.v_win, window_size, 0.25, None)
    k, v = inputs.k_win[:, -reach:], inputs.v_win[:, -reach:]
    part, _ = window_forward(inputs.q, k, v, window_size, 0.25, None)
    torch.testing.assert_close(part, whole)
