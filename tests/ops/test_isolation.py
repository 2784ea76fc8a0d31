"""A query may not see the future, other documents, other rows, and storage that nothing owns."""

from functools import partial

import pytest
import torch

from tests.ops import cases
from tests.ops.cases import Case, draw, each_case
from trifocal import nsa_attention, ops
from trifocal.testing import oracle
from trifocal.testing.inputs import Inputs, cotangent

REFERENCE = {"backend": "reference"}


def attend(case, inputs, **changes):
    return nsa_attention(*inputs._replace(**changes), case.geometry, cu_seqlens=case.cu_seqlens, **REFERENCE)


def from_tokens(case, tokens):
    """All inputs of a case from one stream of tokens, [B, S, F]: a one-layer model, so that a change of one token
    reaches its key, its value, its compressed blocks and its gates."""
    generator = torch.Generator().manual_seed(5)

    def project(*shape):
        weight = torch.randn(tokens.shape[-1], *shape, generator=generator, dtype=tokens.dtype)
        return torch.einsum("bsf,f...->bs...", tokens, weight)

    def compress(x):
        return ops.mean_compress(x, case.geometry, cu_seqlens=case.cu_seqlens)

    first = case.num_keys - case.queries
    keys, values = (case.groups, case.dim), (case.groups, case.value_dim)
    return Inputs(
        project(case.heads, case.dim)[:, first:],
        compress(project(*keys)),
        compress(project(*values)),
        project(*keys),
        project(*values),
        project(*keys),
        project(*values),
        project(case.heads, 3)[:, first:].sigmoid(),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@each_case
def test_a_change_of_one_token_reaches_no_earlier_output(case, dtype):
    """Bit for bit: a change of any token leaves all earlier ones, and other documents, as they were."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randn(case.batch, case.num_keys, 6, generator=generator, dtype=torch.float64).to(dtype)
    before = attend(case, from_tokens(case, tokens))
    first = case.num_keys - case.queries
    # All of a small block in the end; 5 divides no size of a block.
    for changed in range(0, case.num_keys, 5 if dtype == torch.float64 else 17):
        other = tokens.clone()
        other[0, changed] = 50.0
        after = attend(case, from_tokens(case, other))
        document = oracle.document_at(changed, case.num_keys, case.document_lengths)
        same = torch.ones(case.batch, case.num_keys, dtype=torch.bool)
        same[0, changed : document.end] = False
        same = same[:, first:]
        assert torch.equal(after[same], before[same]), changed
        if changed >= first:
            # The test is alive: the token's own output moves.
            assert not torch.equal(after[0, changed - first], before[0, changed - first])


@pytest.mark.parametrize("lengths", [(17, 1, 5, 16, 32), (7, 1, 6), (60,)], ids=str)
def test_padded_compressed_slots_are_never_read(lengths):
    """S // d slots, as layers carry them: poison in those that no document fills changes nothing, and gets zeros."""
    case = Case("", cases.USUAL, sum(lengths), heads=4, groups=2, value_dim=5, lengths=lengths)
    exact = draw(case).leaves()
    rules = {"cu_seqlens": case.cu_seqlens, **REFERENCE}
    documents = ops.Documents.from_cu_seqlens(case.cu_seqlens, case.num_keys)
    pads = case.num_keys // case.geometry.compression_stride - case.num_compressed
    padded = exact._replace(
        **{
            name: torch.nn.functional.pad(getattr(exact, name).detach(), (0, 0, 0, 0, 0, pads), value=float("nan"))
            for name in ("k_cmp", "v_cmp")
        }
    ).leaves()
    o = nsa_attention(*exact, case.geometry, **rules)
    upstream = cotangent(o)
    gradients = torch.autograd.grad(o, exact, upstream)
    for borders in (case.cu_seqlens, documents):
        o_padded = nsa_attention(*padded, case.geometry, cu_seqlens=borders, **REFERENCE)
        torch.testing.assert_close(o_padded, o, rtol=1e-12, atol=1e-12)
        padded_gradients = torch.autograd.grad(o_padded, padded, upstream)
        for name, whole, part in zip(exact._fields, padded_gradients, gradients, strict=True):
            torch.testing.assert_close(whole[:, : part.shape[1]], part, rtol=1e-12, atol=1e-12, msg=name)
            assert (whole[:, part.shape[1] :] == 0).all(), name
        _, lse = ops.compressed_attention(*padded[:3], case.geometry, cu_seqlens=borders, **REFERENCE)
        assert not lse.isnan().any()
        chosen = ops.select_blocks(padded.q, padded.k_cmp, lse, case.geometry, cu_seqlens=borders, **REFERENCE)
        assert torch.equal(chosen, ops.select_blocks(exact.q, exact.k_cmp, lse, case.geometry, **rules))
    slots = ops.mean_compress(exact.k_slc, case.geometry, cu_seqlens=documents)
    assert slots.shape[1] == case.num_keys // case.geometry.compression_stride
    assert torch.equal(
        slots[:, : case.num_compressed], ops.mean_compress(exact.k_slc, case.geometry, cu_seqlens=case.cu_seqlens)
    )
    assert (slots[:, case.num_compressed :] == 0).all()


def check_poison(attention, q, keys, values, unread):
    """Poison the keys that no query may read: outputs do not move, gradients are zero there and finite elsewhere."""
    k, v = keys.detach().clone(), values.detach().clone()
    clean = attention(q, k, v)
    poisoned_k, poisoned_v = k.clone(), v.clone()
    for poison in (float("nan"), float("inf"), -3e38):
        poisoned_k[:, unread], poisoned_v[:, unread] = poison, poison
        leaves = [x.detach().clone().requires_grad_() for x in (q, poisoned_k, poisoned_v)]
        o = attention(*leaves)
        assert torch.equal(o, clean)
        d_q, d_k, d_v = torch.autograd.grad(o, leaves, cotangent(o))
        assert d_q.isfinite().all()
        for gradient in (d_k, d_v):
            assert (gradient[:, unread] == 0).all()
            assert gradient.isfinite().all()


def test_poison_before_the_window():
    case = Case("", cases.USUAL, 5, keys=40, batch=2, heads=4, groups=2)
    inputs = draw(case)
    reach = 5 + 11 - 1
    window = partial(ops.window_attention, window_size=11, **REFERENCE)
    check_poison(window, inputs.q, inputs.k_win, inputs.v_win, slice(0, 40 - reach))


def test_poison_in_blocks_that_nobody_chose():
    case = Case("", cases.USUAL, 40, batch=2, heads=4, groups=2)
    inputs = draw(case)
    chosen = torch.tensor([0, 2, -1]).expand(2, 40, 2, 3)
    selected = partial(ops.selected_attention, selected_blocks=chosen, geometry=case.geometry, **REFERENCE)
    check_poison(selected, inputs.q, inputs.k_slc, inputs.v_slc, slice(16, 32))


@pytest.mark.parametrize("kept", [15, 39])
def test_window_keys_may_be_the_last_ones_only(kept):
    case = Case("", cases.USUAL, 5, keys=40, batch=2, heads=4, groups=2)
    inputs = draw(case)
    cut = {name: getattr(inputs, name)[:, 40 - kept :] for name in ("k_win", "v_win")}
    torch.testing.assert_close(attend(case, inputs, **cut), attend(case, inputs), rtol=1e-12, atol=1e-12)
