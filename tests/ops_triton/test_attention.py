"""`backend="triton"` behind the public functions, interpreted: against the reference in float64, and as operators."""

import pytest
import torch

from tests.ops.cases import USUAL, Case, draw, geometry
from tests.ops_triton.forced import order_rule
from tests.ops_triton.interval_cases import compare, documents_of
from trifocal import nsa_attention, ops
from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import dispatch, operators
from trifocal.ops.support import unsupported_reason
from trifocal.testing.inputs import cotangent
from trifocal.testing.small_models import draw_keys_apart

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on a GPU")

PLAIN = Case("3 heads a group, D != V, two batch entries", USUAL, 21, batch=2, heads=6, groups=2, value_dim=5)
PACKED = Case("packed: 1 token, under l, long", USUAL, 35, lengths=(1, 5, 29), heads=4, groups=2)
PREFILL = Case("fewer queries than keys", USUAL, 5, keys=52, heads=4, groups=2, value_dim=3)
TINY = Case("few queries", USUAL, 10)
LARGE_BLOCKS = geometry(16, 16, 256, 2, 1, 1, 11)  # four parts of 64 tokens
CASES = (PLAIN, PACKED, PREFILL)
NAMES = "q k_cmp v_cmp k_slc v_slc k_win v_win gates"


def attend(inputs, case, backend, **options):
    documents = documents_of(case)
    return nsa_attention(*inputs, case.geometry, cu_seqlens=documents, backend=backend, **options)


def gradients_of(o, inputs, d_o):
    return torch.autograd.grad(o, inputs, d_o, allow_unused=True, materialize_grads=True)


def with_padded_slots(inputs, case):
    """As nn has it for documents: S // d compressed slots, garbage in those that no document fills."""
    if case.lengths is None:
        return inputs
    spare = case.num_keys // case.geometry.compression_stride - case.num_compressed
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, spare), value=torch.nan) for x in inputs[1:3])
    return inputs._replace(k_cmp=k, v_cmp=v)


@pytest.mark.parametrize("case", CASES, ids=[case.why for case in CASES])
def test_whole_attention_and_all_gradients(case):
    inputs = draw(case, torch.float32)
    if case is PREFILL:
        # A cache keeps no more window keys than the queries reach.
        reach = case.queries + case.geometry.window_size - 1
        inputs = inputs._replace(k_win=inputs.k_win[:, -reach:], v_win=inputs.v_win[:, -reach:])
    leaves, exact = inputs.leaves(), type(inputs)(*(x.double() for x in inputs)).leaves()
    o = attend(with_padded_slots(leaves, case), case, "triton")
    o_exact = attend(exact, case, "reference")
    d_o = cotangent(o)
    compare("o", (o,), (o_exact,))
    compare(NAMES, gradients_of(o, leaves, d_o), gradients_of(o_exact, exact, d_o.double()))


def test_a_given_choice_low_precision_gates_and_frozen_inputs():
    """Pads, repetitions and future blocks in the choice; gates in another type; some inputs without gradients."""
    inputs = draw(PREFILL, torch.float32)
    inputs = inputs._replace(gates=inputs.gates.half())
    chosen = torch.randint(-1, 4, (1, PREFILL.queries, 2, 3), generator=torch.Generator().manual_seed(5))
    leaves, exact = inputs.leaves(), type(inputs)(*(x.double() for x in inputs)).leaves()
    for name in ("k_cmp", "v_slc", "k_win", "v_win"):
        getattr(leaves, name).requires_grad_(False)
        getattr(exact, name).requires_grad_(False)
    o = attend(leaves, PREFILL, "triton", selected_blocks=chosen)
    o_exact = attend(exact, PREFILL, "reference", selected_blocks=chosen)
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
        ("query_major", LARGE_BLOCKS, torch.int32),
    ],
    ids=["masked", "block-major, blocks in parts", "query-major, blocks in parts, int32"],
)
def test_an_index_of_no_block_selects_nothing_whatever_its_size(order, geometry, dtype, monkeypatch):
    """In 32 bits 2**32 is 0, and 2**30 is 0 where a block has four parts."""
    backward = "masked" if order == "masked" else "block_major"
    monkeypatch.setattr(dispatch, "selected_order", order_rule(order, backward))
    numbers = [2**30, 2**29, 999, 2**31 - 1, -1, -(2**31)]
    if dtype == torch.int64:
        numbers += [2**31, 2**32, -(2**32), -(2**63), 2**63 - 1]
    leaves = draw(TINY, torch.float32).leaves()
    chosen = torch.tensor(numbers, dtype=dtype).expand(1, TINY.queries, 1, -1)
    for backend in ("triton", "reference"):
        o = ops.selected_attention(leaves.q, leaves.k_slc, leaves.v_slc, chosen, geometry, backend=backend)
        gradients = torch.autograd.grad(o, (leaves.q, leaves.k_slc, leaves.v_slc), torch.ones_like(o))
        assert not any(x.any() for x in (o, *gradients)), backend


def test_a_choice_without_places():
    inputs, nothing = draw(TINY, torch.float32), torch.empty(1, TINY.queries, 1, 0, dtype=torch.int32)
    leaves = inputs.leaves()
    o = ops.selected_attention(leaves.q, leaves.k_slc, leaves.v_slc, nothing, USUAL, backend="triton")
    assert not o.any()
    assert not any(x.any() for x in torch.autograd.grad(o.sum(), (leaves.q, leaves.k_slc, leaves.v_slc)))
    exact = type(inputs)(*(x.double() for x in inputs)).leaves()
    o = attend(leaves, TINY, "triton", selected_blocks=nothing)
    o_exact = attend(exact, TINY, "reference", selected_blocks=nothing)
    d_o = cotangent(o)
    compare("o", (o,), (o_exact,))
    compare(NAMES, gradients_of(o, leaves, d_o), gradients_of(o_exact, exact, d_o.double()))


def test_compressed_attention_with_the_gradient_of_its_lse():
    inputs = draw(PLAIN, torch.float32)
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs[:3]]
        o, lse = ops.compressed_attention(*leaves, USUAL, backend=backend)
        # Through the log-sum-exp alone, then through both.
        of_lse = lse.where(lse.isfinite(), 0.0).square().sum()
        alone = torch.autograd.grad(of_lse, leaves[:2], retain_graph=True)
        total = (o * cotangent(o).to(dtype)).sum() + of_lse
        results.append((o, lse, *alone, *torch.autograd.grad(total, leaves)))
    compare("o lse q k q k v", *results)


def test_selected_and_window_attention():
    inputs = draw(PACKED, torch.float32)
    documents = documents_of(PACKED)
    chosen = torch.tensor([[0, -1, 1]]).expand(1, PACKED.queries, 2, 3)
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        q, _, _, *keys = (x.detach().to(dtype).requires_grad_() for x in inputs[:7])
        rules = {"cu_seqlens": documents, "backend": backend}
        o_slc = ops.selected_attention(q, *keys[:2], chosen, USUAL, **rules)
        o_win = ops.window_attention(q, *keys[2:], 11, **rules)
        d_o = cotangent(inputs.v_slc.new_empty(o_slc.shape)).to(dtype)
        results.append((o_slc, o_win, *torch.autograd.grad(((o_slc + o_win) * d_o).sum(), (q, *keys))))
    compare("o_slc o_win q k_slc v_slc k_win v_win", *results)


@pytest.mark.parametrize(
    "operator", ["compressed_attention", "selected_attention", "select_blocks", "combine_branches"]
)
def test_operators_pass_pytorch_s_own_check(operator):
    """Schema, fake tensors, autograd and ahead-of-time dispatch, judged by PyTorch's own tool."""
    case = Case("packed, tiny", USUAL, 17, lengths=(12, 5), heads=2, groups=1, value_dim=5)
    inputs = draw(case, torch.float32).leaves()
    packed, sizes = operators.tensors_of(documents_of(case)), operators.sizes_of(USUAL)
    with torch.no_grad():
        compressed = operators.compressed_attention(*inputs[:3], sizes, 17, 0.3, *packed)
        choice_arguments = (*inputs[:2], compressed[1], sizes, 17, 0.3, packed[0], "triton", *packed[1:])
        chosen = operators.select_blocks(*choice_arguments)
        selected = operators.selected_attention(inputs.q, *inputs[3:5], chosen, sizes, 0.3, *packed)
        window = operators.window_attention(inputs.q, *inputs[5:7], 11, 0.3, *packed)
    arguments = {
        "compressed_attention": (*inputs[:3], sizes, 17, 0.3, *packed),
        "selected_attention": (inputs.q, *inputs[3:5], chosen, sizes, 0.3, *packed),
        "select_blocks": tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in choice_arguments),
        "combine_branches": (*inputs, *compressed, *selected, *window, chosen, sizes, 0.3, *packed),
    }[operator]
    torch.library.opcheck(getattr(torch.ops.trifocal, operator).default, arguments)


# PyTorch's own tracer warns about its own calls.
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.bfloat16}, "interpreter"),
        ({"dim": 257}, "at most 256, got 257 and 8"),
        ({"value_dim": 300}, "at most 256, got 8 and 300"),
        ({"heads": 65}, "at most 64 query heads, got 65"),
        ({"stride": 3}, "power of two, got 3"),
        ({"selection": 24}, "multiple of 16 tokens, got 24"),
        ({"scale": 0.0}, "positive and finite, got 0.0"),
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


def test_rules_of_the_device(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    q = torch.empty(1, 1, 2, 8)
    assert "not on a CUDA device" in unsupported_reason(q, q, None)


def test_auto_leaves_tensors_on_the_cpu_to_the_reference():
    inputs = draw(PREFILL, torch.float32)
    before = ops.backend_choices()
    attend(inputs, PREFILL, "auto")
    new = {key for key, count in ops.backend_choices().items() if count != before.get(key, 0)}
    assert ("nsa_attention", "reference", "the tensors are not on a CUDA device") in new
