"""Edges: odd strides, other call styles, other types around."""

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.ops import cases
from tests.ops.cases import Case, draw
from trifocal import nsa_attention, ops
from trifocal.testing import oracle
from trifocal.testing.inputs import Inputs, cotangent
from trifocal.testing.tolerances import assert_close

REFERENCE = {"backend": "reference"}
HALF_BLIND = Case("its first 7 queries see no compressed block", cases.USUAL, 20, heads=6, groups=2, value_dim=5)


def every_other(tensor):
    """The same values in storage with holes: every stride is odd, none is that of `contiguous`."""
    holes = torch.full([2 * size + 1 for size in tensor.shape], torch.nan, dtype=tensor.dtype)
    view = holes[tuple(slice(1, None, 2) for _ in tensor.shape)]
    view.copy_(tensor)
    assert not view.is_contiguous()
    return view.detach().requires_grad_(tensor.dtype.is_floating_point)


@pytest.mark.parametrize("case", [cases.named("chunked"), cases.named("packed: 1 token")], ids=lambda case: case.why)
def test_strides_are_taken_as_they_come(case):
    inputs = draw(case).leaves()
    strided = Inputs(*map(every_other, inputs))
    o, o_strided = (nsa_attention(*x, case.geometry, cu_seqlens=case.cu_seqlens) for x in (inputs, strided))
    torch.testing.assert_close(o_strided, o, rtol=1e-12, atol=1e-12)
    upstream = cotangent(o)
    strided_upstream = upstream.transpose(0, 3).contiguous().transpose(0, 3)
    expected = torch.autograd.grad(o, inputs, upstream)
    found = torch.autograd.grad(o_strided, strided, strided_upstream)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_whole_attention_chooses_its_backend_once():
    before = ops.backend_choices()
    nsa_attention(*draw(HALF_BLIND), HALF_BLIND.geometry, **REFERENCE)
    after = ops.backend_choices()
    new = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}
    assert new == {("nsa_attention", "reference", "asked for"): 1}


def test_documents_stand_for_their_borders():
    case = cases.named("packed: 1 token")
    inputs = draw(case)
    documents = ops.Documents.from_cu_seqlens(case.cu_seqlens.long(), case.num_keys)
    a, b, c = (
        nsa_attention(*inputs, case.geometry, cu_seqlens=borders)
        for borders in (documents, case.cu_seqlens, case.cu_seqlens.long())
    )
    assert torch.equal(a, b)
    assert torch.equal(a, c)
    spans = oracle.document_spans(case.num_keys, case.document_lengths)
    assert documents.ids.tolist() == [span.document for span in spans for _ in span.tokens]
    assert documents.positions.tolist() == [token - span.start for span in spans for token in span.tokens]
    assert all(part.dtype == torch.int32 for part in documents[:3])


def test_fp32_gates_beside_low_precision_inputs():
    """Layers compute gates in fp32: they are taken as they are, and their gradient comes back in fp32."""
    case, dtype = cases.named("odd length"), torch.bfloat16
    inputs = draw(case, dtype)
    gates = inputs.gates.float().requires_grad_()
    o = nsa_attention(*inputs._replace(gates=gates), case.geometry)
    assert o.dtype == dtype
    exact_gates = gates.detach().double().requires_grad_()
    chosen = oracle.select_blocks(
        inputs.q, inputs.k_cmp, oracle.compressed_attention(*inputs[:3], case.geometry)[1], case.geometry
    )
    o = nsa_attention(*inputs._replace(gates=gates), case.geometry, selected_blocks=chosen)
    exact = oracle.nsa_attention(*inputs._replace(gates=exact_gates), case.geometry, selected_blocks=chosen)
    upstream = cotangent(o)
    (got,) = torch.autograd.grad(o, gates, upstream)
    (wanted,) = torch.autograd.grad(exact, exact_gates, upstream.double())
    assert got.dtype == torch.float32
    assert_close("o", o, exact, dtype)
    assert_close("gradient of gates", got, wanted, dtype)


def test_autocast_around_does_not_lower_the_precision():
    case = cases.named("odd length")
    inputs = draw(case, torch.float32).leaves()
    plain = nsa_attention(*inputs, case.geometry)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = nsa_attention(*inputs, case.geometry)
        gradients = torch.autograd.grad(inside, inputs, cotangent(inside))
    assert torch.equal(inside, plain)
    torch.testing.assert_close(gradients, torch.autograd.grad(plain, inputs, cotangent(plain)), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_sizes_of_a_geometry_may_be_symbols_of_a_compiler():
    """They are where dynamic shapes are asked for and the geometry is an argument."""
    q, k, v = (torch.randn(1, 20, heads, 8) for heads in (4, 2, 2))
    given = (q, k, v, torch.rand(1, 20, 4, 3), cases.USUAL)
    torch._dynamo.reset()
    compiled = torch.compile(ops.nsa, backend="eager", dynamic=True, fullgraph=True)
    torch.testing.assert_close(compiled(*given), ops.nsa(*given))


def test_selective_checkpointing_that_keeps_scores_is_refused():
    """They are overwritten: a second forward pass would take probabilities for scores, and gradients would be wrong."""
    q = torch.randn(1, 9, 2, 4, requires_grad=True)

    def policy(context, operator, *args, **kwargs):
        kept = operator == torch.ops.aten.bmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    o = checkpoint(ops.window_attention, q, q, q, 5, use_reentrant=False, context_fn=contexts)
    with pytest.raises(RuntimeError, match="has been mutated"):
        o.sum().backward()
