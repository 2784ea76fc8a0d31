"""Backward of the compressed and the window branch on Hopper, whole and in chunks, against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.ops_triton import problems
from tests.ops_triton.problems import PAPER
from trifocal import ops
from trifocal.ops import dispatch
from trifocal.testing.inputs import cotangent
from trifocal.testing.tolerances import error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

DOCUMENTS = (200, 1, 64, 65, 970)


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("heads", [1, 6, 16])
@pytest.mark.parametrize(
    ("window", "lengths", "queries"),
    [(False, None, 1300), (False, None, 700), (True, None, 1300), (True, None, 700), (True, DOCUMENTS, 1300)],
    ids=["compressed", "compressed, last queries", "window", "window, last queries", "window, packed"],
)
def test_gradients(window, lengths, queries, heads, dim, monkeypatch):
    """The kernels that the window takes in larger calls alone; d_scores of all, of a batch entry, and
    of a part of one at a time, with NaN where none are written. At 64 columns d_q is the portable kernel's."""
    from trifocal.ops.hopper.interval import backward
    from trifocal.ops.triton.interval.compressed import compressed_backward, compressed_forward
    from trifocal.ops.triton.interval.window import window_backward, window_forward

    if dim == 64 and not window:
        pytest.skip("runs the portable kernels")
    batch = 1 if lengths else 2
    case = problems.large(
        "backward on Hopper", PAPER, queries, 2 * heads, 2, dim, 128, lengths=lengths, batch=batch, keys=1300
    )
    inputs = problems.draw(case, torch.bfloat16)
    scale, documents, rules = case.dim**-0.5, problems.documents_of(case), case.geometry
    if window:
        q, k, v = inputs.q, inputs.k_win, inputs.v_win
        options = (rules.window_size, scale, documents)
        forward, backward_of = window_forward, window_backward
        reference = partial(ops.window_attention, window_size=rules.window_size, cu_seqlens=documents)
    else:
        q, k, v = inputs.q, inputs.k_cmp, inputs.v_cmp
        options = (rules, case.num_keys, scale, documents)
        forward, backward_of = compressed_forward, compressed_backward
        reference = partial(ops.compressed_attention, geometry=rules, num_keys=case.num_keys)
    o, lse = forward(q, k, v, *options)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    o_exact = reference(*exact, backend="reference")
    o_exact = o_exact if window else o_exact[0]
    expected = torch.autograd.grad(o_exact, exact, cotangent(o).double())
    bound = problems.allowed(case, inputs, problems.choice(case, inputs), 2 if window else 0)

    monkeypatch.setattr(dispatch, "FEWEST_PROGRAMS_OF_WINDOW_DKDV", 0)
    packed = documents is not None
    assert dispatch.interval_on_hopper("dkdv", q, k, v, o, window=window, packed=packed), (
        "the portable kernel would run"
    )
    buffers = []
    make_buffer = backward._buffer

    def poisoned_buffer(*arguments):
        buffers.append(make_buffer(*arguments))
        buffers[-1].tensor.fill_(torch.nan)
        return buffers[-1]

    monkeypatch.setattr(backward, "_buffer", poisoned_buffer)

    def check():
        got = backward_of(cotangent(o), q, k, v, o, lse, *options)
        errors = [error(a, e) for a, e in zip(got, expected, strict=True)]
        assert max(errors) <= bound, (errors, bound)
        again = backward_of(cotangent(o), q, k, v, o, lse, *options)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "two runs differ"

    check()
    assert len(buffers) == (0 if dim == 64 else 2)
    if dim != 64:
        bytes_of_entry = buffers[0].tensor.nbytes // batch
        for budget in (bytes_of_entry, bytes_of_entry // 3):
            monkeypatch.setattr(dispatch, "D_SCORES_BUFFER_BYTES", budget)
            check()
        assert all(x.tensor.nbytes < bytes_of_entry for x in buffers[-2:])


@pytest.mark.parametrize(("heads", "dim"), [(16, 128), (4, 128), (6, 192)])
def test_both_branches(heads, dim, monkeypatch):
    """Gradients of the whole attention where d_scores of all, of a batch entry, or of a part of one fit the buffer."""
    from trifocal.ops.hopper.interval import backward

    case = problems.large("both branches on Hopper", PAPER, 2100, 2 * heads, 2, dim, 128, batch=2)
    inputs = problems.draw(case, torch.bfloat16)
    chosen = problems.choice(case, inputs)
    leaves = [x.detach().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    monkeypatch.setattr(dispatch, "FEWEST_PROGRAMS_OF_WINDOW_DKDV", 0)

    def attention(tensors, backend):
        return ops.nsa_attention(*tensors, case.geometry, selected_blocks=chosen, backend=backend)

    d_o = cotangent(attention(inputs, "triton"))
    expected = torch.autograd.grad(attention(exact, "reference"), exact, d_o.double())
    bound = problems.allowed(case, inputs, chosen)
    launches = []
    launch_d_q = backward.launch_d_q
    monkeypatch.setattr(backward, "launch_d_q", lambda *a, **b: (launches.append(a), launch_d_q(*a, **b)))
    counts = []
    for budget in (2**30, 2**25, 2**21):
        monkeypatch.setattr(dispatch, "D_SCORES_BUFFER_BYTES", budget)
        launches.clear()
        got = torch.autograd.grad(attention(leaves, "triton"), leaves, d_o)
        errors = [error(a, e) for a, e in zip(got, expected, strict=True)]
        assert max(errors) <= bound, (budget, errors, bound)
        assert all(compressed and window for _, compressed, window, *_ in launches)
        counts.append(len(launches))
    assert counts[0] == 1 < counts[1] < counts[2], counts
