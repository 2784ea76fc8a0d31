"""What `torch.compile` keeps of a layer for backward, by the graphs into which it cuts one, against the formula.

Nothing is computed: the compiler hands each graph to a stand-in, which looks at the tensors between them.
"""

from dataclasses import replace

import pytest
import torch

from trifocal.models import DecoderLM, ModelConfig, TrainingSetup
from trifocal.models.layer_memory import LayerMemory
from trifocal.models.layers import run_block
from trifocal.ops import Documents, Geometry, support

# PyTorch's own tracer warns about its own calls.
pytestmark = pytest.mark.filterwarnings("ignore")

PRODUCTION = ModelConfig(num_layers=1, backend="triton")
SMALL = ModelConfig(
    vocab_size=257, dim=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16, mlp_dim=160,
    geometry=Geometry(16, 8, 32, 4, 1, 1, 64), backend="triton",
)  # fmt: skip


@pytest.fixture(autouse=True)
def kernels_without_gpu(monkeypatch):
    """Lets the kernels' operators be chosen; they give shapes alone here. Nothing of it may be found in a cache."""
    import torch._inductor.config as inductor_config

    monkeypatch.setattr(support, "_device_obstacle", lambda *arguments: None)
    with inductor_config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def kept_tensors(config, setup):
    """Sizes of the storages that a compiled layer holds from forward to backward, by the names in its graph.

    The layer's input is among them; its weights and the tables that all layers share are not.
    """
    from torch._inductor.compile_fx import compile_fx  # warns when it is imported

    forward_graphs = []

    def look(graph, example_inputs, **options):
        forward_graphs.append(graph)
        results = [node.meta["val"] for node in graph.graph.find_nodes(op="output")[0].args[0]]

        def stand_in(arguments):
            return [
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
                if isinstance(value, torch.Tensor)
                else value
                for value in results
            ]

        stand_in._boxed_call = True
        return stand_in

    def backend(graph, example_inputs):
        return compile_fx(graph, example_inputs, inner_compile=look)

    torch._dynamo.reset()
    model = DecoderLM(config)
    rows, length = LayerMemory(config, setup).rows
    x = torch.empty(rows, length, config.dim, requires_grad=True)
    documents = Documents.from_cu_seqlens(torch.tensor([0, length // 3, length]), length) if setup.packed else None
    rotary = model.attention_layers()[0].rotary_tables(x, documents)
    compiled = torch.compile(run_block, backend=backend, fullgraph=True, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=setup.precision == "bf16"):
        compiled(setup.checkpointed_layers == (0, 1), model.blocks[0].forward, x, cu_seqlens=documents, rotary=rotary)
    [graph] = forward_graphs
    output, *saved = graph.graph.find_nodes(op="output")[0].args[0]
    assert output.meta["val"].shape == x.shape
    sizes = {}
    for node in saved:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and (node.op != "placeholder" or value.shape == x.shape):
            storage = value.untyped_storage()
            sizes[storage._cdata] = (node.name, storage.nbytes())
    return dict(sizes.values())


def kept_by_formula(config, setting):
    """The formula's activations of a layer, and the copies of its matrices that are kept with them."""
    layer = LayerMemory(config, setting)
    if setting.checkpointed_layers == (0, 1):
        return layer.kept_checkpointed
    block = DecoderLM(config).blocks[0]
    lowered = sum(2 * weight.numel() for name, weight in block.named_parameters() if name.endswith("proj.weight"))
    return layer.kept + (lowered if setting.precision == "bf16" else 4 * layer.joint_weights)


def setup(**changes):
    fixed = {"sequence_length": 512, "micro_batch_size": 1, "precision": "bf16", "backend": "triton", "compiled": True}
    return TrainingSetup(**{**fixed, **changes})


AGAIN = {"checkpointed_layers": (0, 1)}
ON_REFERENCE = replace(SMALL, backend="reference")
CASES = {
    "production": (PRODUCTION, setup()),
    "production, checkpointed": (PRODUCTION, setup(**AGAIN)),
    "packed": (SMALL, setup(micro_batch_size=2, packed=True)),
    "dense": (replace(SMALL, attention="dense", backend="auto"), setup(backend="reference")),
    "norms and biases": (replace(SMALL, qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True), setup()),
    "window": (replace(SMALL, attention="window"), setup()),
    "selected": (replace(SMALL, attention="selected"), setup()),
    "selected, checkpointed": (replace(SMALL, attention="selected"), setup(**AGAIN)),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes(case):
    """To the byte, besides borders of documents."""
    config, setting = CASES[case]
    assert sum(kept_tensors(config, setting).values()) == pytest.approx(kept_by_formula(config, setting), rel=0, abs=64)


# Beside the tensors of the formula they keep a mean before it is rotated, or a few numbers of a token.
NEARLY = {
    "mlp compressor": (replace(PRODUCTION, compressor="mlp"), setup()),
    "reference": (ON_REFERENCE, setup(backend="reference")),
    "reference, window": (replace(ON_REFERENCE, attention="window"), setup(backend="reference")),
    "reference, selected": (replace(ON_REFERENCE, attention="selected"), setup(backend="reference")),
}


@pytest.mark.parametrize("case", NEARLY)
def test_bytes_nearly(case):
    config, setting = NEARLY[case]
    assert sum(kept_tensors(config, setting).values()) == pytest.approx(kept_by_formula(config, setting), rel=0.01)


def test_what_is_saved_over_eager():
    """SiLU's result, and half of the residual stream between attention and MLP: 5,632 bytes of production's token."""
    compiled = setup(device="cuda")
    saved = LayerMemory(PRODUCTION, replace(compiled, compiled=False)).kept - LayerMemory(PRODUCTION, compiled).kept
    assert saved == 512 * (2 * PRODUCTION.mlp_dim + 2 * PRODUCTION.dim) == 512 * 5632


def test_reference_keeps_scores():
    """Compiled and not checkpointed, its memory grows with the square of the length, as eager's does not."""
    short, long = (LayerMemory(ON_REFERENCE, setup(backend="reference", sequence_length=n)) for n in (2048, 4096))
    assert long.kept > 3.5 * short.kept
    eager = replace(long.setup, compiled=False)
    assert LayerMemory(ON_REFERENCE, eager).kept < 0.1 * long.kept
