"""`backend="triton"` behind the public functions: against the reference in float64, and as operators.

In Triton's interpreter, in fp32; on a GPU in three types. There each case compiles its own kernels, so run them side by
side: `pytest tests/ops_triton -m gpu -n 12`.
"""

import pytest
import torch

from tests.devices import needs_gpu
from tests.ops.cases import USUAL, Case, geometry
from tests.ops_triton.forced import order_rule
from tests.ops_triton.problems import (
    DEVICE,
    LARGE,
    ON_GPU,
    PAPER,
    SMALL,
    allowed,
    choice,
    compare,
    documents_of,
    draw,
    large,
    padded,
    problems,
)
from trifocal import nsa_attention, ops
from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import dispatch, operators
from trifocal.ops.support import unsupported_reason
from trifocal.testing.inputs import cotangent
from trifocal.testing.small_models import draw_keys_apart
from trifocal.testing.tolerances import error

interpreted = pytest.mark.skipif(ON_GPU, reason="the same on any device")

PLAIN = Case("3 heads a group, D != V, two batch entries", USUAL, 21, batch=2, heads=6, groups=2, value_dim=5)
PACKED = Case("packed: 1 token, under l, long", USUAL, 35, lengths=(1, 5, 29), heads=4, groups=2)
PREFILL = Case("fewer queries than keys", USUAL, 5, keys=52, heads=4, groups=2, value_dim=3)
TINY = Case("few queries", USUAL, 10)
LARGE_BLOCKS = geometry(16, 16, 256, 2, 1, 1, 11)  # four parts of 64 tokens
NAMES = ("o", "d_q", "d_k_cmp", "d_v_cmp", "d_k_slc", "d_v_slc", "d_k_win", "d_v_win", "d_gates")
FEWER = (LARGE[0], LARGE[1], LARGE[5], LARGE[9])


def attend(case, inputs, backend, **options):
    return nsa_attention(*inputs, case.geometry, cu_seqlens=documents_of(case), backend=backend, **options)


def gradients_of(o, inputs, d_o):
    return torch.autograd.grad(o, inputs, d_o, allow_unused=True, materialize_grads=True)


def run(case, inputs, chosen, leaves=None):
    leaves = leaves or inputs.leaves()
    o = attend(case, padded(case, leaves), "triton", selected_blocks=chosen)
    return [o.detach(), *gradients_of(o, leaves, cotangent(o))]


def assert_right(case, inputs, chosen):
    """Output and every gradient, and the same bits twice. Returns them."""
    got = run(case, inputs, chosen)
    exact = inputs.leaves(torch.float64)
    o_exact = attend(case, exact, "reference", selected_blocks=chosen)
    expected = (o_exact, *gradients_of(o_exact, exact, cotangent(got[0]).double()))
    bound = allowed(case, inputs, chosen)
    errors = {name: error(a, e) for name, a, e in zip(NAMES, got, expected, strict=True)}
    assert max(errors.values()) <= bound, (errors, bound)
    if ON_GPU:
        assert all(torch.equal(a, b) for a, b in zip(got, run(case, inputs, chosen), strict=True)), "two runs differ"


@problems((PLAIN, PACKED, PREFILL), LARGE, fewer=FEWER)
def test_whole_attention(case, dtype):
    """With the choice of the kernels; on a GPU, where near ties swap in half precision, with that of float64."""
    inputs = draw(case, dtype)
    assert_right(case, inputs, choice(case, inputs) if ON_GPU else None)


@problems((PACKED,), LARGE, fewer=FEWER)
def test_each_branch(case, dtype):
    inputs = draw(case, dtype)
    chosen, window_size = choice(case, inputs), case.geometry.window_size

    def branches(leaves, backend):
        rules = {"cu_seqlens": documents_of(case), "backend": backend}
        q = leaves.q
        o_cmp, lse = ops.compressed_attention(*leaves[:3], case.geometry, num_keys=case.num_keys, **rules)
        yield o_cmp, leaves[:3], lse
        yield ops.selected_attention(q, *leaves[3:5], chosen, case.geometry, **rules), (q, *leaves[3:5]), None
        yield ops.window_attention(q, *leaves[5:7], window_size, **rules), (q, *leaves[5:7]), None

    sides = (branches(inputs.leaves(), "triton"), branches(inputs.leaves(torch.float64), "reference"))
    for branch, ((o, leaves, lse), (o_exact, exact, lse_exact)) in enumerate(zip(*sides, strict=True)):
        bound = allowed(case, inputs, chosen, branch)
        d_o = cotangent(o)
        got = (o, *torch.autograd.grad(o, leaves, d_o, retain_graph=True))
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


def test_a_given_choice_low_precision_gates_and_frozen_inputs():
    """Pads, repetitions and future blocks in the choice; gates in another type; some inputs without gradients."""
    inputs = draw(PREFILL, torch.float32)
    inputs = inputs._replace(gates=inputs.gates.half())
    chosen = torch.randint(-1, 4, (1, PREFILL.queries, 2, 3), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    leaves, exact = inputs.leaves(), type(inputs)(*(x.double() for x in inputs)).leaves()
    for name in ("k_cmp", "v_slc", "k_win", "v_win"):
        getattr(leaves, name).requires_grad_(False)
        getattr(exact, name).requires_grad_(False)
    o = attend(PREFILL, leaves, "triton", selected_blocks=chosen)
    o_exact = attend(PREFILL, exact, "reference", selected_blocks=chosen)
    wanted = [[x for x in side if x.requires_grad] for side in (leaves, exact)]
    got = torch.autograd.grad(o, wanted[0], cotangent(o))
    expected = torch.autograd.grad(o_exact, wanted[1], cotangent(o).double())
    assert got[-1].dtype == torch.float16
    compare("o q v_cmp k_slc", (o, *got[:-1]), (o_exact, *expected[:-1]))
    torch.testing.assert_close(got[-1].double(), expected[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("order", "geometry", "dtype"),
    [
        ("masked", USUAL, torch.int64),
        ("block_major", LARGE_BLOCKS, torch.int64),
        ("tiles", LARGE_BLOCKS, torch.int32),
    ],
    ids=["masked", "block-major, blocks in parts", "tiles, blocks in parts, int32"],
)
def test_an_index_of_no_block_selects_nothing_whatever_its_size(order, geometry, dtype, monkeypatch):
    """In 32 bits 2**32 is 0, and 2**30 is 0 where a block has four parts."""
    monkeypatch.setattr(dispatch, "selected_order", order_rule(order))
    numbers = [2**30, 2**29, 999, 2**31 - 1, -1, -(2**31)]
    if dtype == torch.int64:
        numbers += [2**31, 2**32, -(2**32), -(2**63), 2**63 - 1]
    leaves = draw(TINY, torch.float32).leaves()
    chosen = torch.tensor(numbers, dtype=dtype, device=DEVICE).expand(1, TINY.queries, 1, -1)
    for backend in ("triton", "reference"):
        o = ops.selected_attention(leaves.q, leaves.k_slc, leaves.v_slc, chosen, geometry, backend=backend)
        gradients = torch.autograd.grad(o, (leaves.q, leaves.k_slc, leaves.v_slc), torch.ones_like(o))
        assert not any(x.any() for x in (o, *gradients)), backend


def test_a_choice_without_places():
    inputs, nothing = draw(TINY, torch.float32), torch.empty(1, TINY.queries, 1, 0, dtype=torch.int32, device=DEVICE)
    leaves = inputs.leaves()
    o = ops.selected_attention(leaves.q, leaves.k_slc, leaves.v_slc, nothing, USUAL, backend="triton")
    assert not o.any()
    assert not any(x.any() for x in torch.autograd.grad(o.sum(), (leaves.q, leaves.k_slc, leaves.v_slc)))
    assert_right(TINY, inputs, nothing)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 97])
@needs_gpu
def test_every_small_length(length):
    case = large("small", PAPER, length, 8, 2, 64, 32)
    inputs = draw(case, torch.bfloat16)
    assert_right(case, inputs, choice(case, inputs))


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 16, 24, 32, 64])
@needs_gpu
def test_every_group_size(heads):
    case = large("group", SMALL, 150, heads, 1, 32, 32)
    inputs = draw(case, torch.bfloat16)
    assert_right(case, inputs, choice(case, inputs))


@pytest.mark.parametrize("case", [LARGE[0], LARGE[2], LARGE[5], LARGE[10]], ids=lambda case: case.why)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@needs_gpu
def test_the_choice_is_exact(case, dtype):
    """What was left out beats nothing that was taken, in float64, by more than fp32 sums can err."""
    inputs = draw(case, dtype)
    rules = {"num_keys": case.num_keys, "cu_seqlens": documents_of(case)}
    q, k_cmp, v_cmp = (x.double() for x in inputs[:3])
    _, lse = ops.compressed_attention(q, k_cmp, v_cmp, case.geometry, backend="reference", **rules)
    taken = ops.select_blocks(*padded(case, inputs)[:2], lse.float(), case.geometry, backend="triton", **rules)
    again = ops.select_blocks(*padded(case, inputs)[:2], lse.float(), case.geometry, backend="triton", **rules)
    assert torch.equal(taken, again)
    best = ops.select_blocks(q, k_cmp, lse, case.geometry, backend="reference", **rules)
    assert torch.equal((taken >= 0).sum(-1), (best >= 0).sum(-1))
    different = (taken != best).any(-1)
    assert different.double().mean() < 1e-3


@needs_gpu
def test_padding_and_unused_memory_reach_nothing():
    """NaN behind every row, in every slot that no one sees and in all memory that is handed out: equal bits."""
    case = LARGE[2]
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
@needs_gpu
def test_no_call_waits_for_the_gpu():
    """Forward and backward queue their work; nothing reads a result on the host."""
    case = LARGE[1]
    leaves, documents = padded(case, draw(case, torch.bfloat16)).leaves(), documents_of(case)

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


def test_auto_takes_the_kernels_on_a_gpu_alone():
    before = ops.backend_choices()
    for dtype in (torch.float32, torch.float64):
        attend(PREFILL, draw(PREFILL, dtype), "auto")
    new = {key for key, count in ops.backend_choices().items() if count != before.get(key, 0)}
    assert (("nsa_attention", "triton", "supported") in new) == ON_GPU
    reason = "float64" if ON_GPU else "the tensors are not on a CUDA device"
    assert any(key[:2] == ("nsa_attention", "reference") and reason in key[2] for key in new)


@interpreted
@pytest.mark.parametrize(
    "operator", ["mean_compress", "compressed_attention", "selected_attention", "select_blocks", "combine_branches"]
)
def test_operators_pass_pytorch_s_own_check(operator):
    """Schema, fake tensors and autograd, judged by PyTorch's own tool."""
    case = Case("packed, tiny", USUAL, 17, lengths=(12, 5), heads=2, groups=1, value_dim=5)
    inputs = draw(case, torch.float32).leaves()
    documents = documents_of(case)
    with torch.no_grad():
        compressed = operators.compressed_attention(*inputs[:3], USUAL, 17, 0.3, documents)
        choice_arguments = (*(x.detach() for x in inputs[:2]), compressed[1], USUAL, 17, 0.3, documents, "triton")
        chosen = operators.select_blocks(*choice_arguments)
        selected = operators.selected_attention(inputs.q, *inputs[3:5], chosen, USUAL, 0.3, documents)
        window = operators.window_attention(inputs.q, *inputs[5:7], 11, 0.3, documents)
    arguments = {
        "mean_compress": (inputs.k_slc, USUAL, 4, documents),
        "compressed_attention": (*inputs[:3], USUAL, 17, 0.3, documents),
        "selected_attention": (inputs.q, *inputs[3:5], chosen, USUAL, 0.3, documents),
        "select_blocks": choice_arguments,
        "combine_branches": (*inputs, *compressed, *selected, *window, chosen, USUAL, 0.3, documents),
    }[operator]
    arguments = tuple(operators.flat(arguments))
    # Dispatch ahead of time is that of the next test, of all of them in a model.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.trifocal, operator).default, arguments, test_utils=checks)


# PyTorch's own tracer warns about its own calls.
@interpreted
@pytest.mark.filterwarnings("ignore")
def test_a_model_compiles_whole_and_keeps_its_attention_through_checkpointing():
    """As one graph with checkpointing: the plain eager gradients, bit for bit, and no branch is computed twice."""
    torch._dynamo.reset()
    sizes = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "value_dim": 6}
    model = DecoderLM(ModelConfig(vocab_size=31, mlp_dim=16, geometry=USUAL, backend="triton", **sizes))
    model.init_weights(0)
    draw_keys_apart(model)
    tokens = torch.randint(31, (1, 20), generator=torch.Generator().manual_seed(0))

    def step(function):
        loss = function(tokens, tokens)
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    expected = step(model)
    model.set_activation_checkpointing(0, 1)
    with _CallCounter() as counter:
        checkpointed = step(model)
    assert counter.calls == dict.fromkeys(_CallCounter.WATCHED, 1)
    compiled = step(torch.compile(model, fullgraph=True, backend="aot_eager"))
    for given in (checkpointed, compiled):
        assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


class _CallCounter(torch.utils._python_dispatch.TorchDispatchMode):
    WATCHED = ("select_blocks", "compressed_attention", "selected_attention", "window_attention")

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("trifocal::")
        if name in self.WATCHED:
            self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@interpreted
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.bfloat16}, "interpreter"),
        ({"dim": 257}, "at most 256, got 257 and 8"),
        ({"heads": 65}, "at most 64 query heads, got 65"),
        ({"stride": 3}, "power of two, got 3"),
        ({"selection": 24}, "multiple of 16 tokens, got 24"),
        ({"scale": -1.0}, "positive and finite, got -1.0"),
        ({}, None),
    ],
    ids=str,
)
def test_rules_of_what_the_kernels_take(change, reason):
    options = {"dtype": torch.float32, "dim": 8, "value_dim": 8, "heads": 2, "stride": 4, "selection": 48, "scale": 1.0}
    options |= change
    q = torch.empty(1, 1, options["heads"], options["dim"], dtype=options["dtype"])
    v = torch.empty(1, 1, 1, options["value_dim"], dtype=options["dtype"])
    stride = options["stride"]
    geometry = ops.Geometry(stride, stride, options["selection"])
    found = unsupported_reason(q, v, geometry, options["scale"])
    assert found is None if reason is None else reason in found


@interpreted
def test_rules_of_the_device(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    q = torch.empty(1, 1, 2, 8)
    assert "not on a CUDA device" in unsupported_reason(q, q, None)
