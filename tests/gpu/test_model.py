"""Whole models on a GPU: compiled training, activation checkpointing, a million tokens."""

import os

import pytest
import torch

from trifocal import Geometry, nsa_attention
from trifocal.models import DecoderLM, ModelConfig
from trifocal.testing.small_models import draw_keys_apart

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_model(num_layers=2):
    sizes = {"dim": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64, "mlp_dim": 512}
    config = ModelConfig(vocab_size=257, num_layers=num_layers, geometry=Geometry(), backend="triton", **sizes)
    model = DecoderLM(config).cuda()
    model.init_weights(0)
    draw_keys_apart(model)
    return model


def draw_tokens(batch=2, length=1100):
    return torch.randint(257, (batch, length), generator=torch.Generator().manual_seed(0)).cuda()


def train(model, function, steps=5):
    """Losses of a few steps in bf16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, losses = draw_tokens(), []
    for _ in range(steps):
        with torch.autocast("cuda", torch.bfloat16):
            loss = function(tokens, tokens.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


# PyTorch's own tracer warns about its own calls.
@pytest.mark.filterwarnings("ignore")
def test_compiled_training_equals_eager():
    """As one graph: five steps of the optimizer give the same losses to bf16's rounding, with and without
    checkpointing."""
    eager = train(model := make_model(), model)
    assert eager[-1] < eager[0] - 0.1
    for checkpointed in (0, 2):
        torch._dynamo.reset()
        model = make_model()
        model.set_activation_checkpointing(0, checkpointed)
        compiled = train(model, torch.compile(model, fullgraph=True))
        torch.testing.assert_close(compiled, eager, rtol=5e-3, atol=0)


@pytest.mark.parametrize("borders", [None, [0, 1, 40, 700, 731, 1100]], ids=["one document a row", "packed"])
def test_checkpointing_gives_the_plain_gradients(borders):
    model = make_model()
    tokens = draw_tokens(1 if borders else 2)
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32)

    def gradients():
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, tokens, cu_seqlens=cu_seqlens)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    plain = gradients()
    model.set_activation_checkpointing(0, 2)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), plain, strict=True))


@pytest.mark.skipif("TRIFOCAL_MILLION_TOKENS" not in os.environ, reason="set TRIFOCAL_MILLION_TOKENS=1; needs 100 GB")
def test_a_million_tokens():
    length, geometry = 2**20, Geometry()
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(length, heads, width=128):
        x = torch.randn(1, length, heads, width, generator=generator, device="cuda", dtype=torch.bfloat16)
        return x.requires_grad_()

    blocks = geometry.num_compressed_blocks(length)
    inputs = [normal(length, 16), *(normal(n, 1) for n in (blocks, blocks, length, length, length, length))]
    gates = normal(length, 16, 3)
    o = nsa_attention(*inputs, gates, geometry, backend="triton")
    o.backward(torch.ones_like(o))
    for x in (o, *(x.grad for x in (*inputs, gates))):
        # Slice by slice: a mask of everything would need as much memory again.
        assert all(part.isfinite().all() for part in x.split(2**16, dim=1))
    # The last queries by themselves, against the reference.
    last = 64
    with torch.no_grad():
        few = nsa_attention(inputs[0][:, -last:], *inputs[1:], gates[:, -last:], geometry, backend="triton")
    torch.testing.assert_close(few, o[:, -last:], rtol=2e-2, atol=2e-2)
