"""The decoder: loss, initialisation, gradients, packed documents, precision."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attentions import TRAINED_OPTIONS
from trifocal.models import DecoderLM, ModelConfig, parameter_count
from trifocal.nn import RotaryTables
from trifocal.nn.chooser import first_index

LENGTHS = [3, 1, 4, 21, 1, 9]


def trained(model):
    """The parameters that the loss of the language model reaches: all but those of an index."""
    return {name: parameter for name, parameter in model.named_parameters() if ".index." not in name}


def test_no_target_gives_zero_loss_and_zero_gradients(make_model):
    model = make_model()
    loss = model(torch.randint(31, (1, 5)), torch.full((1, 5), -100))
    loss.backward()
    assert loss.item() == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_untrained_loss_is_near_that_of_guessing(tie_embeddings):
    config = ModelConfig(
        vocab_size=256, dim=128, num_layers=12, num_heads=8, head_dim=16, value_dim=16, mlp_dim=344,
        tie_embeddings=tie_embeddings,
    )  # fmt: skip
    model = DecoderLM(config)
    model.init_weights(0)
    tokens = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = model(tokens[:, :-1], tokens[:, 1:]).item()
    # Logits of variance 1 cost half a nat on top of guessing.
    assert abs(loss - (math.log(256) + 0.5)) < 0.15


def test_initial_weights(make_config):
    model = DecoderLM(make_config(num_layers=8, dim=128, mlp_dim=256, compressor="mlp"))
    again = DecoderLM(model.config)
    model.init_weights(3)
    again.init_weights(torch.Generator().manual_seed(3))
    for (name, parameter), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other), name
        assert parameter.dtype == torch.float32
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            expected = parameter.shape[1] ** -0.5
            if name.endswith(("attention.o_proj.weight", "mlp.down_proj.weight")):
                expected /= (2 * 8) ** 0.5
            if name.endswith(("positions", "compressor.down_proj.weight", "embedding.weight")):
                expected = 0.02
            # Five standard errors of an estimate from this many draws; of keys a third is drawn.
            error = 5 / (2 * parameter.numel() // (3 if name.endswith("k_proj.weight") else 1)) ** 0.5
            assert parameter.std().item() == pytest.approx(expected, rel=error), name
    attention = model.blocks[1].attention
    keys = attention.k_proj.weight.chunk(3)
    assert torch.equal(keys[0], keys[1]) and torch.equal(keys[0], keys[2]), "the branches start with the same keys"
    assert not torch.equal(*attention.v_proj.weight.chunk(3)[:2])
    again.init_weights(4)
    assert not torch.equal(model.embedding.weight, again.embedding.weight)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_an_index_starts_as_the_keys_and_the_mean_of_the_queries(make_config, qk_norm):
    layers = ("nsa", "selected", "dense")
    model = DecoderLM(make_config(num_layers=3, layer_types=layers, chooser="index", qk_norm=qk_norm))
    model.init_weights(3)
    for layer in model.attention_layers()[:2]:
        keys = layer.k_proj.weight.chunk(layer.branches)[0]
        begun = first_index(layer.q_proj.weight, keys, layer.num_kv_heads, layer.head_dim)
        # With norms, queries and keys are not what their maps give.
        assert all(
            torch.equal(one.weight, first) != qk_norm for one, first in zip(layer.index.maps, begun, strict=True)
        )


@pytest.mark.parametrize("options", [{}, {"chooser": "index", "compressor": "mlp", "tie_embeddings": True}], ids=str)
def test_a_sharded_model_is_initialised_as_a_whole_one(make_config, options):
    """By PyTorch's recipe for FSDP2: no process ever has all weights."""
    config = make_config(**options)
    whole = DecoderLM(config)
    whole.init_weights(3)
    with torch.device("meta"):
        model = DecoderLM(config)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        model.to_empty(device="cpu")
        model.init_weights(3)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name
    finally:
        dist.destroy_process_group()


def test_a_model_without_weights_computes_nothing(make_config):
    """On the meta device many operations import PyTorch's compiler, for seconds."""
    computed = set()

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            computed.add(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    with torch.device("meta"), Watched():
        DecoderLM(make_config(chooser="index", layer_types=("nsa", "selected")))
    assert computed == {"empty", "ones", "uniform_", "zero_"}


@pytest.mark.parametrize("options", TRAINED_OPTIONS, ids=str)
def test_packed_documents_equal_separate_ones(make_model, options):
    model = make_model(**options)
    torch.manual_seed(0)
    tokens, targets = torch.randint(31, (2, 1, sum(LENGTHS)))
    parameters = list(trained(model).values())
    packed = model(tokens, targets, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0))
    packed_gradients = torch.autograd.grad(packed, parameters)
    separate = sum(
        model(*document) * document[0].shape[1] / sum(LENGTHS)
        for document in zip(tokens.split(LENGTHS, 1), targets.split(LENGTHS, 1), strict=True)
    )
    separate_gradients = torch.autograd.grad(separate, parameters)
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-12)
    torch.testing.assert_close(packed_gradients, separate_gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["nsa", "selected", "window", "dense"])
def test_an_unrotated_layer_has_angles_of_zero(make_model, kind):
    """Queries and keys, raw and compressed, and those of an index are the projections themselves."""
    # Also where another list names it: without angles there is nothing to scale.
    model = make_model(attention=kind, chooser="index", unrotated_layers=(1,), unscaled_layers=(1,)).eval()
    x = torch.randn(1, sum(LENGTHS), 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([0, *LENGTHS]).cumsum(0)
    for layer, is_same in zip(model.attention_layers(), (False, True), strict=True):
        tables = [
            None if one is None else (torch.ones_like(one[0]), torch.zeros_like(one[1]))
            for one in layer.rotary_tables(x, documents)
        ]
        outputs = (layer(x, cu_seqlens=documents, rotary=rotary) for rotary in (None, RotaryTables(*tables)))
        assert torch.equal(*outputs) == is_same


@pytest.mark.parametrize("options", TRAINED_OPTIONS, ids=str)
def test_autocast_leaves_fp64_alone(make_model, options):
    """As PyTorch's does: its products in fp64 stay."""
    model, tokens = make_model(**options), torch.randint(31, (2, 40))
    expected = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(tokens), expected)


@pytest.mark.parametrize("options", TRAINED_OPTIONS, ids=str)
def test_autocast_keeps_weights_gradients_and_loss_in_fp32(make_model, options):
    exact = make_model(**options)
    model = make_model(**options).float()
    tokens, targets = torch.randint(31, (2, 2, 40))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens).dtype == torch.bfloat16
        loss = model(tokens, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    # bf16 keeps 8 bits; the products of two layers together err by a few of their units.
    torch.testing.assert_close(loss.double(), exact(tokens, targets), rtol=2**-6, atol=0)
    for parameter in trained(model).values():
        assert parameter.dtype == torch.float32
        assert parameter.grad.dtype == torch.float32


def test_a_head_with_an_adapter_is_applied_as_it_is(make_model):
    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model, tokens = make_model(), torch.randint(31, (2, 9))
    expected = 2 * model(tokens)
    model.head.__class__ = Adapted
    assert torch.equal(model(tokens), expected)
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(model(tokens, tokens), loss)


def test_wrong_arguments_are_refused(make_model):
    model = make_model()
    tokens = torch.randint(31, (2, 5))
    with pytest.raises(ValueError, match=r"targets must have the shape of tokens, \[2, 5\], got \[2, 4\]"):
        model(tokens, tokens[:, 1:])
    with pytest.raises(ValueError, match=r"targets must be of int64, got torch.int32"):
        model(tokens, tokens.int())
    with pytest.raises(ValueError, match=r"targets must be a tensor \[B, T\], got list"):
        model(tokens, tokens.tolist())
    with pytest.raises(ValueError, match="config must be a ModelConfig, got DecoderLM"):
        parameter_count(model)
    with pytest.raises(ValueError, match=r"tokens must be \[B, T\] of int64 or int32 and not empty, got \[5\]"):
        model(tokens[0])
    with pytest.raises(ValueError, match="0 <= first <= last <= 2, got 1, 3"):
        model.set_activation_checkpointing(1, 3)


@pytest.mark.parametrize("options", TRAINED_OPTIONS, ids=str)
def test_runs_on_the_meta_device(make_config, options):
    """Shapes of everything without memory, as for planning: logits, loss, gradients, packed documents."""
    with torch.device("meta"):
        model = DecoderLM(make_config(**options))
    tokens = torch.zeros(1, 40, dtype=torch.int64, device="meta")
    assert model(tokens).shape == (1, 40, 31)
    for cu_seqlens in (None, torch.tensor([0, 7, 40])):
        model.zero_grad()
        loss = model(tokens, tokens, cu_seqlens=cu_seqlens)
        assert loss.shape == () and loss.is_meta
        loss.backward()
        for name, parameter in trained(model).items():
            assert parameter.grad.shape == parameter.shape, name
