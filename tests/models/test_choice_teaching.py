"""The loss that teaches the choice: in a loop of anybody's, and its queries where processes share a row."""

import pytest
import torch
from torch.nn import functional

from trifocal.models import DecoderLM, choice_teaching
from trifocal.models.choice_teaching import ChoiceSamples, ChoiceTeaching
from trifocal.nn import choice_recall
from trifocal.nn.context import ContextShard, TokenShard
from trifocal.ops import Documents, Geometry
from trifocal.ops.choice_loss import draw_queries
from trifocal.testing.small_models import make_model, random_tokens, small_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("borders", [None, (0, 1, 30, 52, 60, 104)])
def test_chunks_share_out_the_queries(borders):
    """Stretches of 5 tokens lie over the ends of chunks of 13. A query of another chunk is moved inside, untaught."""
    model = DecoderLM(small_config(attention="selected", chooser="index", geometry=Geometry(4, 2, 8, 3, 1, 1, 19)))
    config = model.config
    tokens = random_tokens((1, 104), 64, torch.device("cpu"))
    documents, positions = None, torch.arange(104)
    if borders is not None:
        documents = Documents.from_cu_seqlens(torch.tensor(borders), 104)
        positions = documents.positions
    layers = config.num_layers
    teaching = ChoiceTeaching(torch.tensor(3), torch.ones(layers), torch.zeros(layers, 2), 104, 5)
    [whole] = ChoiceSamples.of_step(model.attention_layers(), teaching, tokens, positions).of_layer(0)
    found = []
    for rank in range(4):
        shard = ContextShard(rank, 4, list)
        local_tokens = TokenShard.of(shard, shard.local_tokens(tokens), documents)
        samples = ChoiceSamples.of_step(model.attention_layers(), teaching, tokens, positions, local_tokens).of_layer(0)
        for chunk, sample in zip(local_tokens.chunks, samples, strict=True):
            assert ((chunk.first_token <= sample.tokens) & (sample.tokens < chunk.num_keys)).all()
            assert ((sample.starts >= 0) & (sample.starts <= sample.tokens)).all()
            pairs = torch.stack((sample.tokens, sample.starts), -1)[sample.eligible]
            found += map(tuple, pairs.tolist())
    expected = torch.stack((whole.tokens, whole.starts), -1)[whole.eligible].tolist()
    assert sorted(found) == sorted(map(tuple, expected)) and found


STRETCH = 16


@pytest.fixture
def model():
    sizes = {"geometry": Geometry(4, 2, 8, 4, 1, 1, 16), "num_layers": 3, "chooser": "index"}
    model = make_model(small_config(layer_types=("selected", "window", "nsa"), **sizes), CPU, torch.float64)
    for layer in model.attention_layers():
        layer.choice_loss_stretch = STRETCH
    return model


def _gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("packed", [False, True])
def test_any_loop_has_the_gradient_of_the_trainers_loss(model, packed, monkeypatch):
    """On the same queries; with the loss made in the model, scaled by a loop as it likes, or outside of it."""
    tokens = random_tokens((1 if packed else 2, 129), 64, CPU)
    targets, tokens = tokens[:, 1:], tokens[:, :-1]
    given = {"cu_seqlens": torch.tensor([0, 30, 128])} if packed else {}
    drawn = []

    def draw(*arguments):
        drawn.append(draw_queries(*arguments))
        return drawn[-1]

    monkeypatch.setattr(choice_teaching, "draw_queries", draw)
    weights = torch.tensor([1.0, 1.0, 4.0])
    model.attention_layers()[2].choice_loss_weight = 4.0
    loss = model(tokens, targets, **given)
    found = _gradients(model, 0.25 * loss)
    counts = drawn[0].eligible.sum((1, 2)) * model.config.num_kv_heads
    assert counts.all()
    teaching = ChoiceTeaching(
        torch.tensor(1), 0.25 * weights / counts, torch.zeros(3, 2, dtype=torch.float64), 128, STRETCH
    )
    model._draw = lambda *_: drawn[0]
    with_samples = model(tokens, targets, teaching=teaching, **given)
    assert torch.equal(with_samples, loss)
    # The trainer's loss of the choice has its scale; that of the language model is the caller's.
    expected = _gradients(model, 0.25 * with_samples)
    taught = {name for name in expected if ".index." in name}
    assert len(taught) == 4
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-15)
    recall = choice_recall(model)
    assert list(recall) == ["blocks.0.attention", "blocks.2.attention"]
    assert [*recall.values()] == pytest.approx((teaching.totals[:, 1] / 0.25 / weights)[::2].tolist(), rel=1e-9)
    # The loss is made from the logits: the queries are those of another draw, the scale is 1.
    drawn.clear()
    logits = model(tokens, **given)
    found = _gradients(model, functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    counts = drawn[0].eligible.sum((1, 2)) * model.config.num_kv_heads
    teaching = teaching._replace(scales=weights / counts)
    expected = _gradients(model, model(tokens, targets, teaching=teaching, **given))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)


def test_a_document_teaches_what_it_teaches_alone(model):
    """By every query. Beside it, and alone, one whose queries choose all of their blocks teaches nothing."""
    tokens, layers = random_tokens((1, 128), 64, CPU), [model.attention_layers()[number] for number in (0, 2)]
    for layer in layers:
        layer.choice_loss_stretch = 1
    model(tokens[:, 30:], tokens[:, 30:])
    alone = [layer.choice_figures for layer in layers]
    model(tokens, tokens, cu_seqlens=torch.tensor([0, 30, 128]))
    torch.testing.assert_close([layer.choice_figures for layer in layers], alone, rtol=1e-9, atol=0)
    found = _gradients(model, model(tokens[:, :30], tokens[:, :30]))
    assert all(gradient.isfinite().all() for gradient in found.values()) and not choice_recall(model)
    # The first layer that learns has the stretch of all.
    layers[0].index.requires_grad_(False)
    layers[0].choice_loss_stretch = 128
    model(tokens[:, 30:], tokens[:, 30:])
    torch.testing.assert_close(layers[1].choice_figures, alone[1], rtol=1e-9, atol=0)


def test_recomputed_layers_learn_from_the_same_queries(model):
    tokens = random_tokens((2, 65), 64, CPU)
    found = []
    for checkpointed in (0, 3):
        model.set_activation_checkpointing(0, checkpointed)
        torch.manual_seed(5)
        found.append(_gradients(model, model(tokens[:, :-1], tokens[:, 1:])))
    assert not [name for name, gradient in found[0].items() if not torch.equal(gradient, found[1][name])]


@pytest.mark.parametrize("state", ["evaluation", "no gradients", "frozen", "weight 0"])
def test_nothing_is_taught_and_nothing_drawn(model, state):
    tokens = random_tokens((2, 65), 64, CPU)
    for layer in model.attention_layers():
        if state == "frozen" and layer.index is not None:
            layer.index.requires_grad_(False)
        if state == "weight 0":
            layer.choice_loss_weight = 0.0
    before = torch.get_rng_state()
    with torch.set_grad_enabled(state != "no gradients"):
        loss = model.train(state != "evaluation")(tokens[:, :-1], tokens[:, 1:])
    assert torch.equal(torch.get_rng_state(), before) and not choice_recall(model)
    if state != "no gradients":
        loss.backward()
        assert all(p.grad is None for name, p in model.named_parameters() if ".index." in name)
