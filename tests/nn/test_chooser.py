"""What the loss of the choice teaches in a layer, the index only; and blocks drawn at random."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trifocal.nn import NSAttention, SelectedAttention, choice_recall
from trifocal.nn.chooser import first_index, random_blocks
from trifocal.nn.rope import rotary_tables, rotate
from trifocal.ops import Geometry
from trifocal.ops.choice_loss import Sample

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8}
SIZES = {"geometry": Geometry(4, 2, 8, 3, 1, 1, 8), "dim": 16, **HEADS}
TOKENS = torch.arange(33, 64, 5)[None]
SAMPLE = Sample(TOKENS, torch.zeros_like(TOKENS), torch.ones_like(TOKENS, dtype=torch.bool))


def test_a_layer_without_an_index_has_nothing_to_teach():
    with pytest.raises(ValueError, match='teaches an index, but the chooser is "compressed"'):
        NSAttention(**SIZES)(torch.randn(1, 64, 16), choice_sample=(SAMPLE,))


@pytest.mark.parametrize("kind", [NSAttention, SelectedAttention])
def test_an_index_is_taught_alone_and_by_its_sample_alone(kind):
    torch.manual_seed(0)
    layer = kind(**SIZES, chooser="index", backend="reference").double()
    x = torch.randn(1, 64, 16, dtype=torch.float64, requires_grad=True)
    o, figures = layer(x, choice_sample=(SAMPLE,))
    index = {f"index.{name}" for name, _ in layer.index.named_parameters()}
    figures[0].backward(retain_graph=True)
    taught = {name for name, one in layer.named_parameters() if one.grad is not None and one.grad.any()}
    assert taught == index and not x.grad.any()
    o.sum().backward()
    with_sample = [x.grad, *(one.grad for name, one in layer.named_parameters() if name not in index)]
    x.grad = None
    layer.zero_grad()
    layer.index.requires_grad_(False)
    layer(x).sum().backward()
    assert all(one.grad is None for one in layer.index.parameters())
    alone = [x.grad, *(one.grad for name, one in layer.named_parameters() if name not in index)]
    torch.testing.assert_close(with_sample, alone, rtol=1e-12, atol=1e-14)


def taught_layer(stretch=1):
    """A layer in a loop of one's own, and its input."""
    torch.manual_seed(0)
    layer = SelectedAttention(**SIZES, chooser="index", backend="reference").double()
    layer.choice_loss_stretch = stretch
    return layer, 3 * torch.randn(2, 64, 16, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_teaches_its_index_by_one_draw():
    """Queries drawn anew in backward would give gradients of no loss."""
    torch._dynamo.reset()
    (layer, x), found = taught_layer(stretch=8), []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(1)
        found.append(torch.autograd.grad(call(x).sum(), list(layer.index.parameters())))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_a_layer_in_a_model_of_ones_own_teaches_its_index():
    """Whatever its output is used for, and checkpointed, from the same queries; its recall rises."""
    (layer, x), found = taught_layer(), []
    for call in (layer, functools.partial(checkpoint, layer, use_reentrant=False)):
        layer.zero_grad()
        torch.manual_seed(1)
        call(x).sum().backward()
        found.append([one.grad.clone() for one in layer.index.parameters()])
    assert all(map(torch.equal, *found)) and all(one.any() for one in found[0])
    [first] = choice_recall(layer).values()
    optimizer = torch.optim.AdamW(layer.index.parameters(), lr=0.03)
    for _ in range(30):
        optimizer.zero_grad()
        layer(x).mean().backward()
        optimizer.step()
    [last] = choice_recall(nn.Sequential(layer)).values()
    assert 0 < first < 0.9 and last > first + 0.5 * (1 - first)
    # Padding teaches nothing: the loss is the mean over the tokens of both rows.
    padding = torch.arange(64) >= torch.tensor([[64], [40]])
    layer(x, key_padding_mask=padding)
    padded, count = layer.choice_figures, [64 - 24, 40 - 24]
    rows = [(layer(row[None, :length]), layer.choice_figures)[1] for row, length in zip(x, (64, 40), strict=True)]
    torch.testing.assert_close(padded, sum(n * row for n, row in zip(count, rows, strict=True)) / sum(count))
    # Where every block is chosen, nothing is: a recall of 0 would say that all choices were wrong.
    layer(x[:, :16])
    assert choice_recall(layer) == {}


def test_a_weight_undoes_the_scale_of_a_loop():
    """Accumulated batches, and a scaler, teach as one batch does."""
    (layer, x), scaler = taught_layer(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(layer.parameters())
    expected = torch.autograd.grad(layer(x).mean(), [*layer.parameters()])
    layer.choice_loss_weight = 1 / 2
    for part in x.chunk(2):
        (layer(part).mean() / 2).backward()
    torch.testing.assert_close([one.grad for one in layer.parameters()], [*expected])
    optimizer.zero_grad()
    layer.choice_loss_weight = scaler.get_scale()
    scaler.scale(layer(x).mean()).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close([one.grad for one in layer.parameters()], [*expected])


def test_an_index_without_parameters_of_its_own_learns():
    """FSDP1 leaves a layer only views of one flat parameter, unless told to keep the original ones."""
    layer, x = taught_layer()
    maps = layer.index.maps
    expected = torch.autograd.grad(layer(x).sum(), [linear.weight for linear in maps])
    flat = nn.Parameter(torch.cat([linear.weight.detach().flatten() for linear in maps]))
    for linear, part in zip(maps, flat.split([linear.weight.numel() for linear in maps]), strict=True):
        weight = part.view(linear.weight.shape)
        del linear.weight
        linear.weight = weight
    layer(x).sum().backward()
    torch.testing.assert_close(flat.grad, torch.cat([gradient.flatten() for gradient in expected]))


@pytest.mark.parametrize(("head_dim", "positions"), [(64, [0, 3, 40, 1000]), (32, [0, 0]), (16, [0, 0])])
def test_an_index_begins_with_the_scores_of_its_attention(head_dim, positions):
    """Exactly, with one head a group: where heads are narrower, but for their rotation."""
    torch.manual_seed(0)
    x = torch.randn(1, len(positions), 24, dtype=torch.float64)
    q, k = torch.randn(head_dim, 24, dtype=torch.float64), torch.randn(head_dim, 24, dtype=torch.float64)

    def scores(q, k):
        tables = rotary_tables(torch.tensor(positions), len(q), 10000.0, torch.float64)
        asked, answered = (rotate((x @ weight.T)[:, :, None], *tables)[0, :, 0] for weight in (q, k))
        return asked @ answered.T * len(q) ** -0.5

    torch.testing.assert_close(scores(*first_index(q, k, 1, head_dim)), scores(q, k), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [NSAttention, SelectedAttention])
def test_a_layer_of_ones_own_begins_its_index(kind):
    """As a model does, and again when it is asked to, after weights of one's own."""
    layer = kind(**SIZES, chooser="index")
    for _ in range(2):
        keys = layer.k_proj.weight.chunk(layer.branches)[layer.branches // 2]
        expected = first_index(layer.q_proj.weight, keys, HEADS["num_kv_heads"], HEADS["head_dim"])
        torch.testing.assert_close([linear.weight for linear in layer.index.maps], [*expected], rtol=0, atol=0)
        for linear in (layer.q_proj, layer.k_proj, *layer.index.maps):
            nn.init.normal_(linear.weight, std=0.02)
        layer.begin_index()


def test_an_index_begins_with_the_mean_of_heads():
    """Heads of 128: every second pair of dimensions turns like one of the index."""
    torch.manual_seed(0)
    q, k = torch.randn(3, 2, 128, 24), torch.randn(3, 128, 24)
    queries, key = first_index(q.flatten(0, 2), k.flatten(0, 1), 3, 128)
    columns = [*range(0, 64, 2), *range(64, 128, 2)]
    torch.testing.assert_close(queries.view(3, 64, 24), q.mean(1)[:, columns] * 2**0.25)
    torch.testing.assert_close(key, k.mean(0)[columns] * 2**0.25)


GEOMETRY = Geometry(4, 2, 8, num_selected_blocks=6, num_initial_blocks=1, num_local_blocks=2, window_size=7)


def test_forced_blocks_are_there_and_none_is_twice_or_ahead():
    positions = torch.arange(200)
    blocks = random_blocks(positions, GEOMETRY, 3, layer=1)
    assert blocks.shape == (1, 200, 3, 6) and blocks.dtype == torch.int32
    own = (positions // 8)[:, None, None]
    row = blocks[0]
    few = (own < 6).expand_as(row)
    assert torch.equal(row[few], torch.arange(6).where(torch.arange(6) <= own, -1).expand_as(row).to(torch.int32)[few])
    many = row[48:]
    assert (many.diff(dim=-1) > 0).all() and (many <= own[48:]).all()
    for forced in (torch.zeros_like(own), own - 1, own):
        assert (many == forced[48:]).any(-1).all()


def test_the_rest_is_drawn_uniformly():
    # At one position in many layers: 11 blocks to draw 3 of.
    drawn = torch.cat([random_blocks(torch.tensor([8 * 13]), GEOMETRY, 8, layer)[0, 0] for layer in range(500)])
    counts = torch.bincount(drawn.flatten().long(), minlength=14)
    assert (counts[[0, 12, 13]] == 4000).all()
    # Each of 11 blocks is expected 4000 * 3 / 11 times, with a standard deviation below 29.
    assert (counts[1:12] - 4000 * 3 / 11).abs().max() < 5 * 29
    pairs = {tuple(row.tolist()) for row in drawn}
    assert len(pairs) == 11 * 10 * 9 // 6


def test_a_choice_depends_on_position_layer_and_head_alone():
    positions = torch.arange(300)
    blocks = random_blocks(positions, GEOMETRY, 2, layer=0)
    assert torch.equal(random_blocks(positions[250:], GEOMETRY, 2, layer=0), blocks[:, 250:])
    assert not torch.equal(random_blocks(positions, GEOMETRY, 2, layer=1), blocks)
    assert not torch.equal(blocks[:, :, 0], blocks[:, :, 1])
