"""The kernels on a GPU against the reference in float64: they may err twice as much as PyTorch's own attention.

Each case compiles its own kernels, so run them side by side: `pytest tests/gpu -n 12`.
"""

import pytest
import torch

from tests.gpu.cases import CASES, PAPER, SMALL, Case, allowed, branch_masks, choice, draw
from tests.ops_triton.forced import order_rule
from trifocal import Geometry, nsa_attention, ops
from trifocal.ops import dispatch
from trifocal.testing.inputs import cotangent
from trifocal.testing.tolerances import error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAMES = ("o", "d_q", "d_k_cmp", "d_v_cmp", "d_k_slc", "d_v_slc", "d_k_win", "d_v_win", "d_gates")
TYPED = [(case, torch.bfloat16) for case in CASES]
TYPED += [(case, torch.float16) for case in CASES[:2]]
TYPED += [(case, torch.float32) for case in (CASES[0], CASES[1], CASES[5], CASES[9])]
each_case = pytest.mark.parametrize(
    ("case", "dtype"), TYPED, ids=[f"{case.why}, {str(dtype).removeprefix('torch.')}" for case, dtype in TYPED]
)


def padded(case, inputs):
    """As nn has it for documents: S // d compressed slots, NaN in those that no document fills."""
    if case.lengths is None:
        return inputs
    spare = case.num_keys // case.geometry.compression_stride - inputs.k_cmp.shape[1]
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, spare), value=torch.nan) for x in inputs[1:3])
    return inputs._replace(k_cmp=k, v_cmp=v)


def attend(case, inputs, backend, **options):
    return nsa_attention(*inputs, case.geometry, cu_seqlens=case.documents, backend=backend, **options)


def run(case, inputs, chosen, leaves=None):
    leaves = leaves or inputs.leaves()
    o = attend(case, padded(case, leaves), "triton", selected_blocks=chosen)
    return [o.detach(), *torch.autograd.grad(o, leaves, cotangent(o))]


@each_case
def test_whole_attention(case, dtype):
    inputs = draw(case, dtype)
    chosen = choice(case, inputs)
    got = run(case, inputs, chosen)
    exact = inputs.leaves(torch.float64)
    o_exact = attend(case, exact, "reference", selected_blocks=chosen)
    expected = [o_exact, *torch.autograd.grad(o_exact, exact, cotangent(got[0]).double())]
    bound = allowed(inputs, branch_masks(case, inputs, chosen))
    errors = {name: error(a, e) for name, a, e in zip(NAMES, got, expected, strict=True)}
    assert max(errors.values()) <= bound, (errors, bound)
    assert all(torch.equal(a, b) for a, b in zip(got, run(case, inputs, chosen), strict=True)), "two runs differ"


@each_case
def test_each_branch(case, dtype):
    inputs = draw(case, dtype)
    chosen, window_size = choice(case, inputs), case.geometry.window_size

    def branches(leaves, backend):
        rules = {"cu_seqlens": case.documents, "backend": backend}
        q = leaves.q
        o_cmp, lse = ops.compressed_attention(*leaves[:3], case.geometry, num_keys=case.num_keys, **rules)
        yield o_cmp, leaves[:3], lse
        yield ops.selected_attention(q, *leaves[3:5], chosen, case.geometry, **rules), (q, *leaves[3:5]), None
        yield ops.window_attention(q, *leaves[5:7], window_size, **rules), (q, *leaves[5:7]), None

    masks = branch_masks(case, inputs, chosen)
    sides = (branches(inputs.leaves(), "triton"), branches(inputs.leaves(torch.float64), "reference"))
    for branch, ((o, leaves, lse), (o_exact, exact, lse_exact)) in enumerate(zip(*sides, strict=True)):
        bound = allowed(inputs, masks, branch)
        d_o = cotangent(o)
        got, expected = (o, *torch.autograd.grad(o, leaves, d_o, retain_graph=True)), None
        expected = (o_exact, *torch.autograd.grad(o_exact, exact, d_o.double(), retain_graph=True))
        errors = [error(a, e) for a, e in zip(got, expected, strict=True)]
        assert max(errors) <= bound, (branch, errors, bound)
        if lse is not None:
            assert torch.equal(lse == -torch.inf, lse_exact == -torch.inf)
            seen = lse_exact.isfinite()
            torch.testing.assert_close(lse[seen].double(), lse_exact[seen], rtol=1e-6, atol=1e-5)
            of_lse = [
                torch.autograd.grad(x.where(seen, 0.0).square().sum(), leaf, allow_unused=True, materialize_grads=True)
                for x, leaf in ((lse, leaves), (lse_exact, exact))
            ]
            size = max(1.0, *(x.abs().max().item() for x in of_lse[1] if x.numel()))
            assert max(error(a, e) for a, e in zip(*of_lse, strict=True)) <= bound * size


@pytest.mark.parametrize("case", [CASES[1], CASES[8], *CASES[11:]], ids=lambda case: case.why)
@pytest.mark.parametrize("portable", [False, True], ids=["as chosen", "portable"])
@pytest.mark.parametrize("part_queries", [100, 192, 10_000])
def test_parts_of_a_block(case, portable, part_queries, monkeypatch):
    """d_k and d_v of the masked order, cut anywhere or not at all, are right and the same twice."""
    from trifocal.ops.triton.selected.backward import selected_backward
    from trifocal.ops.triton.selected.forward import selected_forward

    inputs = draw(case, torch.bfloat16)
    chosen, rules = choice(case, inputs), {"cu_seqlens": case.documents}
    q, k, v = inputs.q, inputs.k_slc, inputs.v_slc
    scale, documents = case.dim**-0.5, case.documents
    monkeypatch.setattr(dispatch, "selected_order", order_rule("masked"))
    monkeypatch.setattr(dispatch, "masked_part_queries", lambda *sizes: part_queries)
    if portable:
        monkeypatch.setattr(dispatch, "selected_on_hopper", lambda *tensors, **sizes: False)
    o, lse = selected_forward(q, k, v, chosen, case.geometry, scale, documents)
    d_o = cotangent(o)

    def gradients():
        return selected_backward(d_o, q, k, v, o, lse, chosen, case.geometry, scale, documents)

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    o_exact = ops.selected_attention(*exact, chosen, case.geometry, backend="reference", **rules)
    expected = torch.autograd.grad(o_exact, exact, d_o.double())
    got = gradients()
    bound = allowed(inputs, branch_masks(case, inputs, chosen), 1)
    errors = [error(a, e) for a, e in zip(got, expected, strict=True)]
    assert max(errors) <= bound, (errors, bound)
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(), strict=True)), "two runs differ"


@pytest.mark.parametrize("heads", [1, 3, 6, 7, 16, 48])
@pytest.mark.parametrize("portable", [False, True], ids=["as chosen", "portable"])
@pytest.mark.parametrize("lengths", [None, (200, 1, 64, 65, 70)], ids=["one document", "packed"])
def test_block_major_in_chunks(heads, portable, lengths, monkeypatch):
    """Groups of any size, whole slots in a tile or not; rows of several chunks, whose d_k and d_v are added up."""
    from trifocal.ops.triton.selected.backward import selected_backward
    from trifocal.ops.triton.selected.forward import selected_forward

    case = Case("in chunks", PAPER, 400, 2 * heads, 2, 64, 128, lengths=lengths)
    inputs = draw(case, torch.bfloat16)
    chosen, rules = choice(case, inputs), {"cu_seqlens": case.documents}
    q, k, v = inputs.q, inputs.k_slc, inputs.v_slc
    arguments = (chosen, case.geometry, case.dim**-0.5, case.documents)
    # One byte: as few rows in a chunk as can be.
    monkeypatch.setattr(dispatch, "SELECTED_BUFFER_BYTES", 1)
    monkeypatch.setattr(dispatch, "selected_order", order_rule("block_major"))
    if portable:
        monkeypatch.setattr(dispatch, "selected_on_hopper", lambda *tensors, **sizes: False)

    def attend():
        o, lse = selected_forward(q, k, v, *arguments)
        return o, *selected_backward(cotangent(o), q, k, v, o, lse, *arguments)

    got = attend()
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    o_exact = ops.selected_attention(*exact, chosen, case.geometry, backend="reference", **rules)
    expected = (o_exact, *torch.autograd.grad(o_exact, exact, cotangent(got[0]).double()))
    bound = allowed(inputs, branch_masks(case, inputs, chosen), 1)
    errors = [error(a, e) for a, e in zip(got, expected, strict=True)]
    assert max(errors) <= bound, (errors, bound)
    assert all(torch.equal(a, b) for a, b in zip(got, attend(), strict=True)), "two runs differ"


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("heads", [1, 6, 16])
@pytest.mark.parametrize("lengths", [None, (200, 1, 64, 65, 970)], ids=["one document", "packed"])
def test_keys_of_the_window_on_hopper(dim, heads, lengths, monkeypatch):
    """The Hopper kernel for d_k and d_v, which only calls with more programs than these take by themselves."""
    from trifocal.ops.triton.interval.window import window_backward, window_forward

    case = Case("window on Hopper", PAPER, 1300, 2 * heads, 2, dim, 128, lengths=lengths)
    inputs = draw(case, torch.bfloat16)
    q, k, v = inputs.q, inputs.k_win, inputs.v_win
    window, scale, documents = case.geometry.window_size, case.dim**-0.5, case.documents
    o, lse = window_forward(q, k, v, window, scale, documents)

    monkeypatch.setattr(dispatch, "FEWEST_PROGRAMS_OF_WINDOW_DKDV", 0)
    packed = documents is not None
    assert dispatch.interval_on_hopper("dkdv", q, k, v, o, window=True, packed=packed), "the portable kernel would run"

    def gradients():
        return window_backward(cotangent(o), q, k, v, o, lse, window, scale, documents)

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    o_exact = ops.window_attention(*exact, window, backend="reference", cu_seqlens=documents)
    expected = torch.autograd.grad(o_exact, exact, cotangent(o).double())
    bound = allowed(inputs, branch_masks(case, inputs, choice(case, inputs)), 2)
    got = gradients()
    errors = [error(a, e) for a, e in zip(got, expected, strict=True)]
    assert max(errors) <= bound, (errors, bound)
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(), strict=True)), "two runs differ"


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 97])
def test_every_small_length(length):
    case = Case("small", PAPER, length, 8, 2, 64, 32)
    inputs = draw(case, torch.bfloat16)
    chosen = choice(case, inputs)
    got = run(case, inputs, chosen)
    exact = inputs.leaves(torch.float64)
    o_exact = attend(case, exact, "reference", selected_blocks=chosen)
    gradients = torch.autograd.grad(
        o_exact, exact, cotangent(got[0]).double(), allow_unused=True, materialize_grads=True
    )
    bound = allowed(inputs, branch_masks(case, inputs, chosen))
    # One or two keys round to almost nothing in PyTorch too: the least bound is a rounding of the type.
    bound = max(bound, 2.0**-7)
    for name, a, e in zip(NAMES, got, (o_exact, *gradients), strict=True):
        assert error(a, e) <= bound, (name, error(a, e), bound)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 16, 24, 32, 64])
def test_every_group_size(heads):
    case = Case("group", SMALL, 150, heads, 1, 32, 32)
    inputs = draw(case, torch.bfloat16)
    chosen = choice(case, inputs)
    got = run(case, inputs, chosen)
    exact = inputs.leaves(torch.float64)
    o_exact = attend(case, exact, "reference", selected_blocks=chosen)
    expected = (o_exact, *torch.autograd.grad(o_exact, exact, cotangent(got[0]).double()))
    errors = {name: error(a, e) for name, a, e in zip(NAMES, got, expected, strict=True)}
    bound = allowed(inputs, branch_masks(case, inputs, chosen))
    assert max(errors.values()) <= bound, (errors, bound)


@pytest.mark.parametrize("num_selected", [0, 4])
@pytest.mark.parametrize("block", [64, 256], ids=["whole blocks", "blocks in parts"])
@pytest.mark.parametrize("queries", [1, 300, 5000], ids=["query-major", "masked", "block-major"])
def test_an_index_of_no_block_selects_nothing_whatever_its_size(queries, block, num_selected):
    """In 32 bits 2**32 is 0, and 2**30 is 0 where a block has four parts; a choice may have no place at all."""
    case = Case("no block", Geometry(32, 16, block), queries, 8, 2, 64, 64, keys=5000 if queries == 1 else 0)
    inputs = draw(case, torch.bfloat16)
    numbers = torch.tensor([2**32, 2**30, -(2**63), 2**63 - 1], device="cuda")[:num_selected]
    sizes = (1, queries, 2)
    nothing = torch.full((*sizes, 1), -1, dtype=torch.int32, device="cuda")
    got, pads = (run(case, inputs, chosen) for chosen in (numbers.expand(*sizes, -1), nothing))
    assert all(torch.equal(a, b) for a, b in zip(got, pads, strict=True))
    assert not any(x.any() for x in (got[4], got[5]))


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[5], CASES[10]], ids=lambda case: case.why)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_choice_is_exact(case, dtype):
    """What was left out beats nothing that was taken, in float64, by more than fp32 sums can err."""
    inputs = draw(case, dtype)
    rules = {"num_keys": case.num_keys, "cu_seqlens": case.documents}
    q, k_cmp, v_cmp = (x.double() for x in inputs[:3])
    _, lse = ops.compressed_attention(q, k_cmp, v_cmp, case.geometry, backend="reference", **rules)
    taken = ops.select_blocks(*padded(case, inputs)[:2], lse.float(), case.geometry, backend="triton", **rules)
    again = ops.select_blocks(*padded(case, inputs)[:2], lse.float(), case.geometry, backend="triton", **rules)
    assert torch.equal(taken, again)
    best = ops.select_blocks(q, k_cmp, lse, case.geometry, backend="reference", **rules)
    assert torch.equal((taken >= 0).sum(-1), (best >= 0).sum(-1))
    different = (taken != best).any(-1)
    assert different.double().mean() < 1e-3


def test_padding_and_unused_memory_reach_nothing():
    """NaN behind every row, in every slot that no one sees and in all memory that is handed out: equal bits."""
    case = CASES[2]
    inputs = draw(case, torch.bfloat16)
    chosen = choice(case, inputs)
    clean = run(case, inputs, chosen)

    def within_garbage(x):
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), torch.nan, device="cuda", dtype=x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]].detach().requires_grad_()

    leaves = type(inputs)(*(within_garbage(x) for x in inputs))
    torch.cuda.empty_cache()
    poison = [torch.full((size,), torch.nan, device="cuda") for size in (2**28, *(2**k for k in range(7, 20)))]
    del poison
    dirty = run(case, inputs, chosen, leaves)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_call_waits_for_the_gpu():
    """Forward and backward queue their work; nothing reads a result on the host."""
    case = CASES[1]
    leaves, documents = padded(case, draw(case, torch.bfloat16)).leaves(), case.documents

    def step():
        o = nsa_attention(*leaves, case.geometry, cu_seqlens=documents, backend="triton")
        o.backward(cotangent(o))

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        o = nsa_attention(*leaves, case.geometry, cu_seqlens=documents, backend="triton")
        torch.autograd.grad(o, leaves, torch.ones_like(o))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_auto_takes_the_kernels():
    inputs = draw(CASES[0], torch.bfloat16)
    before = ops.backend_choices()
    attend(CASES[0], inputs, "auto")
    attend(CASES[0], draw(CASES[0], torch.float64), "auto")
    new = {key for key, count in ops.backend_choices().items() if count != before.get(key, 0)}
    assert ("nsa_attention", "triton", "supported") in new
    assert any(key[:2] == ("nsa_attention", "reference") and "float64" in key[2] for key in new)
