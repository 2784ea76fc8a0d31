"""Compiled training: the whole model as one graph, or layer by layer, without a break.

The backend "eager" runs the traced graphs as they are. "aot_eager" traces backward too, which takes two to ten times as
long: one case does it.
"""

import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.utils import counters

from tests.devices import needs_gpu
from tests.models.conftest import gpu_model, gpu_tokens
from trifocal.models.choice_teaching import ChoiceTeaching
from trifocal.ops import Documents

# PyTorch's own tracer warns about its own calls.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def compile_with(monkeypatch):
    """Nothing is compiled yet; `torch.compile` takes the given backend."""
    torch._dynamo.reset()
    counters.clear()
    return lambda backend: monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))


def gradients(model, tokens, documents=None):
    loss = model(tokens, tokens, cu_seqlens=documents)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize(
    ("options", "checkpointed", "kinds", "tables", "backend"),
    [
        ({"num_layers": 2, "attention": "selected"}, 2, 1, 1, "aot_eager"),
        # A layer reads its rotations from tables: one that is not rotated has other tables, but no other graph.
        (
            {"compressor": "mlp", "shared_kv": True, "unrotated_layers": (1,)}
            | {"norm_after": True, "qk_norm": True, "qk_norm_all_heads": True},
            0,
            1,
            2,
            "eager",
        ),
        ({"attention": "dense", "qk_norm": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True}, 3, 1, 1, "eager"),
        # Another choice in each layer is another tensor, not another graph.
        ({"layer_types": ("window", "selected", "selected"), "selection": "random"}, 3, 2, 1, "eager"),
    ],
    ids=str,
)
def test_layers_share_what_is_compiled(make_model, compile_with, options, checkpointed, kinds, tables, backend):
    """Some layers, rows and packed documents with other borders: two graphs of a kind, and eager's gradients."""
    compile_with(backend)
    model = make_model(**{"num_layers": 3, **options})
    model.set_activation_checkpointing(0, checkpointed)
    tokens = torch.randint(31, (2, 30))
    packed = [
        Documents.from_checked(torch.tensor(borders), 60, row_length=30)
        for borders in ([0, 5, 30, 44, 60], [0, 1, 30, 58, 60])
    ]
    calls = [
        (tokens, None), *((tokens.view(1, 60), documents) for documents in packed), (tokens, None)
    ]  # fmt: skip
    expected = [gradients(model, *call) for call in calls]
    model.compile_training()
    given = [gradients(model, *call) for call in calls]
    torch.testing.assert_close(given, expected, rtol=1e-11, atol=1e-12)
    # What layers share, a layer and the end of the model, for rows and for one packed row.
    assert counters["stats"]["unique_graphs"] == 2 * (tables + kinds + 1)
    assert not counters["graph_break"]
    with torch.no_grad():
        model(tokens[:, :7], tokens[:, :7])
    assert counters["stats"]["unique_graphs"] == 2 * (tables + kinds + 1), "passes without gradients are eager"


@torch._dynamo.config.patch(recompile_limit=8)
def test_kinds_of_layers_and_models_beyond_dynamos_limit_compile(make_model, compile_with):
    """Eight graphs of the layers of one model, and one of another, which a thread trains that did not compile it."""
    compile_with("eager")
    tokens = torch.randint(31, (2, 30))
    packed = Documents.from_checked(torch.tensor([0, 5, 30, 58, 60]), 60, row_length=30)
    for size, calls in ((40, [(tokens, None), (tokens.view(1, 60), packed)]), (41, [(tokens, None)])):
        model = make_model(num_layers=4, layer_types=("dense", "window"), mlp_dim=size)
        model.set_activation_checkpointing(0, 2)
        expected = [gradients(model, *call) for call in calls]
        model.compile_training()
        with ThreadPoolExecutor(1) as thread:
            found = [thread.submit(gradients, model, *call).result() for call in calls]
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_packs_of_any_documents_share_what_is_compiled(make_model, compile_with):
    """One's own loop, which gives borders: each pack has other documents, and two of them any length."""
    compile_with("eager")
    model = make_model(num_layers=1, layer_types=("selected",))
    tokens = torch.randint(31, (1, 60))
    packs = [
        torch.tensor(borders) for borders in ([0, 60], [0, 31, 60], [0, 47, 60], [0, 5, 9, 17, 60], [0, 58, 59, 60])
    ]
    expected = [gradients(model, tokens, pack) for pack in packs]
    model.compile_training()
    given = [gradients(model, tokens, pack) for pack in packs]
    torch.testing.assert_close(given, expected, rtol=1e-11, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 3


@torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True)
def test_a_model_that_its_user_compiles_takes_any_packs(make_model):
    model = make_model(num_layers=1, layer_types=("selected",))
    compiled = torch.compile(model, backend="eager")
    tokens = torch.randint(31, (1, 60))
    for length in range(1, 30, 3):
        pack = torch.tensor([0, length, length + 30, 60])
        torch.testing.assert_close(compiled(tokens, cu_seqlens=pack), model(tokens, cu_seqlens=pack))


def test_frozen_layers_that_are_checkpointed_compile(make_model, compile_with):
    """As where only an index learns, and some layers are dense: in these nothing has a gradient."""
    compile_with("aot_eager")
    model = make_model(num_layers=1, attention="dense", value_dim=8).requires_grad_(False)
    model.head.requires_grad_()
    model.set_activation_checkpointing(0, 1)
    tokens, found = torch.randint(31, (2, 30)), []
    for _ in range(2):
        found.append(torch.autograd.grad(model(tokens, tokens), model.head.weight))
        model.compile_training()
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)


def test_a_copy_of_a_compiled_model_compiles_its_own(make_model, compile_with):
    compile_with("eager")
    model = make_model(num_layers=1, attention="dense")
    model.set_activation_checkpointing(0, 1)
    model.compile_training()
    tokens = torch.randint(31, (2, 30))
    expected = gradients(model, tokens)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        # Code that fits both is shared; without it the copy compiles.
        torch._dynamo.reset()
        counters.clear()
        torch.testing.assert_close(gradients(copied, tokens), expected, rtol=0, atol=0)
        assert counters["stats"]["unique_graphs"] == 3


def test_exports_a_range_of_lengths(make_model):
    """One program for all lengths with more selection blocks than are chosen, as docs/training.md says it."""
    model = make_model(num_layers=1).eval()
    length = torch.export.Dim("length", min=32, max=512)
    program = torch.export.export(
        model,
        (torch.randint(31, (1, 40)),),
        dynamic_shapes=({1: length},),
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    for tokens in (torch.randint(31, (1, n)) for n in (32, 129)):
        torch.testing.assert_close(program.module()(tokens), model(tokens), rtol=0, atol=1e-12)


def test_other_lengths_do_not_compile_anew(make_model):
    """The whole model by PyTorch's defaults: the second length makes one graph for all lengths."""
    model = make_model(num_layers=1, attention="selected")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for length in (64, 48, 37):
        tokens = torch.randint(31, (2, length))
        torch.testing.assert_close(gradients(compiled, tokens), gradients(model, tokens), rtol=1e-11, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 2


def test_a_taught_choice_is_compiled(make_model, compile_with):
    """Rows and packed documents, in two steps: four graphs each, one of them of the draw, and eager's gradients."""
    compile_with("eager")
    model = make_model(num_layers=2, chooser="index", attention="selected")
    model.set_activation_checkpointing(0, 2)
    tokens = torch.randint(31, (2, 30))
    packed = Documents.from_checked(torch.tensor([0, 5, 30, 58, 60]), 60, row_length=30)

    def taught(rows, documents, step):
        teaching = ChoiceTeaching(torch.tensor(step), torch.full((2,), 0.1), torch.zeros(2, 2), 30, 4)
        model.zero_grad()
        loss = model(rows, rows, cu_seqlens=documents, teaching=teaching)
        loss.backward()
        assert teaching.totals.all()
        return [loss.detach(), teaching.totals, *(parameter.grad for parameter in model.parameters())]

    calls = [(tokens, None, 1), (tokens.view(1, 60), packed, 1), (tokens, None, 2)]
    expected = [taught(*call) for call in calls]
    model.compile_training()
    torch.testing.assert_close([taught(*call) for call in calls], expected, rtol=1e-6, atol=1e-9)
    assert counters["stats"]["unique_graphs"] == 8
    assert not counters["graph_break"]


def train_on_a_gpu(model, function):
    """Losses of five steps in bf16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, losses = gpu_tokens(), []
    for _ in range(5):
        with torch.autocast("cuda", torch.bfloat16):
            loss = function(tokens, tokens.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@needs_gpu
def test_compiled_training_equals_eager():
    """As one graph: five steps of the optimizer give the same losses to bf16's rounding, with and without
    checkpointing."""
    eager = train_on_a_gpu(model := gpu_model(), model)
    assert eager[-1] < eager[0] - 0.1
    for checkpointed in (0, 2):
        torch._dynamo.reset()
        model = gpu_model()
        model.set_activation_checkpointing(0, checkpointed)
        compiled = train_on_a_gpu(model, torch.compile(model, fullgraph=True))
        torch.testing.assert_close(compiled, eager, rtol=5e-3, atol=0)
