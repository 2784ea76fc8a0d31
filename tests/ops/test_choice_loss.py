"""The choice by an index and the loss that teaches it, against the oracle's loops in fp64."""

import itertools

import pytest
import torch

from trifocal import ops
from trifocal.ops import Documents, Geometry, choice_loss, reference
from trifocal.ops.choice_loss import Sample, draw_queries, free_places, num_free, sample_queries
from trifocal.testing import oracle

GEOMETRY = Geometry(4, 2, 8, 5, 1, 2, 8)
TOKENS, GROUPS, HEADS, DIM = 120, 2, 4, 8
BORDERS = (0, 3, 53, 56, TOKENS)


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize(("borders", "queries"), [((0, TOKENS), TOKENS), (BORDERS, 37)])
def test_choice_by_index_is_the_oracle_s(borders, queries, monkeypatch):
    # Chunks end inside of a document and of a block.
    monkeypatch.setattr(reference, "_MAX_INDEX_SCORES", 3000)
    batch = 1 if len(borders) > 2 else 2
    q, k = drawn(batch, queries, GROUPS, DIM), drawn(batch, TOKENS, DIM)
    cu_seqlens = torch.tensor(borders) if len(borders) > 2 else None
    chosen = ops.select_blocks_by_index(q, k, GEOMETRY, cu_seqlens=cu_seqlens)
    lengths = [end - start for start, end in itertools.pairwise(borders)]
    assert torch.equal(chosen, oracle.select_blocks_by_index(q, k, GEOMETRY, lengths=lengths))


@pytest.mark.parametrize(("borders", "parts"), [((0, TOKENS), 1), (BORDERS, 3)])
def test_loss_and_gradient_are_the_oracle_s(borders, parts, monkeypatch):
    packed = len(borders) > 2
    batch = 1 if packed else 2
    q, k = drawn(batch, TOKENS, HEADS, DIM).requires_grad_(), drawn(batch, TOKENS, GROUPS, DIM).requires_grad_()
    documents = Documents.from_cu_seqlens(torch.tensor(borders), TOKENS) if packed else None
    positions = documents.positions if packed else torch.arange(TOKENS)
    tokens = torch.arange(batch * TOKENS).view(batch, TOKENS)
    sample = Sample(*(field[1] for field in sample_queries(tokens, positions, 7, 2, GEOMETRY, TOKENS, 6)))
    assert 4 <= sample.eligible.sum() < sample.eligible.numel()
    parameters = {"q_idx": drawn(batch, TOKENS, GROUPS, DIM, seed=1), "k_idx": drawn(batch, TOKENS, DIM, seed=1)}
    for parameter in parameters.values():
        parameter.requires_grad_()
    monkeypatch.setattr(choice_loss, "_MAX_NUMBERS", batch * sample.tokens.shape[1] * HEADS * TOKENS // parts)
    loss, recall = choice_loss.choice_loss(q, k, sample, GEOMETRY, documents, **parameters)
    assert 0.3 < recall / (sample.eligible.sum() * GROUPS) < 0.99
    lengths = [end - start for start, end in itertools.pairwise(borders)]
    expected = oracle.choice_loss(q, k, sample.tokens.tolist(), GEOMETRY, lengths=lengths, **parameters)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    got = torch.autograd.grad(loss, [*parameters.values(), q, k], allow_unused=True)
    wanted = torch.autograd.grad(expected, list(parameters.values()))
    torch.testing.assert_close(got[:2], wanted, rtol=1e-8, atol=1e-12)
    assert got[-2:] == (None, None)


@pytest.mark.parametrize("borders", [(0, TOKENS), BORDERS])
def test_last_queries_alone(borders):
    """Their loss, beside that of the queries in front of them, is the loss of all."""
    documents = Documents.from_cu_seqlens(torch.tensor(borders), TOKENS) if len(borders) > 2 else None
    q, k = drawn(1, TOKENS, HEADS, DIM), drawn(1, TOKENS, GROUPS, DIM)
    index = {"q_idx": drawn(1, TOKENS, GROUPS, DIM, seed=1), "k_idx": drawn(1, TOKENS, DIM, seed=1)}
    tokens = torch.arange(TOKENS)[None]
    positions = tokens if documents is None else documents.positions[None].long()
    eligible = num_free(positions // GEOMETRY.selection_block_size, GEOMETRY) > free_places(GEOMETRY)
    whole = Sample(tokens, tokens - positions, eligible)
    first, last = (Sample(*(field[:, part] for field in whole)) for part in (slice(None, 77), slice(77, None)))
    assert first.eligible.any() and last.eligible.any()
    cut = {"q_idx": index["q_idx"][:, 77:], "k_idx": index["k_idx"]}
    parts = [
        choice_loss.choice_loss(q, k, first, GEOMETRY, documents, **index),
        choice_loss.choice_loss(q[:, 77:], k, last, GEOMETRY, documents, **cut),
    ]
    expected = choice_loss.choice_loss(q, k, whole, GEOMETRY, documents, **index)
    torch.testing.assert_close(torch.stack(parts).sum(0), expected, rtol=1e-12, atol=0)


def test_sample_does_not_depend_on_the_batch():
    """The same queries in rows, in rows packed into one, and row by row; others in another step or layer."""
    length, stretch = 50, 8
    tokens = torch.randint(0, 256, (3, length), generator=torch.Generator().manual_seed(0))
    tokens[1] = tokens[0].roll(1)

    def draw(rows, step=5, layer=2, packed=False):
        rows = rows.view(1, -1) if packed else rows
        positions = torch.arange(length).repeat(rows.numel() // length if packed else 1)
        drawn = sample_queries(rows, positions, step, layer + 1, GEOMETRY, length, stretch)
        return Sample(*(field[layer] for field in drawn))

    whole = draw(tokens)
    alone = [draw(row[None]) for row in tokens]
    assert torch.equal(torch.cat([one.tokens for one in alone]), whole.tokens)
    assert torch.equal(torch.cat([one.eligible for one in alone]), whole.eligible)
    packed = draw(tokens, packed=True)
    assert torch.equal(packed.tokens.view(3, -1) - torch.arange(3)[:, None] * length, whole.tokens)
    assert torch.equal(packed.eligible.view(3, -1), whole.eligible)
    assert torch.equal(draw(tokens, step=torch.tensor(5)).tokens, whole.tokens)
    for other in (draw(tokens, step=6), draw(tokens, layer=3)):
        assert not torch.equal(other.tokens, whole.tokens)
    # Every query is drawn in some step.
    steps = [draw(tokens[:1], step=step) for step in range(120)]
    assert set(torch.cat([one.tokens for one in steps]).unique().tolist()) == set(range(length))
    # The last stretch has two tokens of eight: they are drawn as often as others, in 15 steps.
    assert sum((one.tokens[one.eligible] == length - 1).sum() for one in steps) < 40


def test_queries_of_any_loop_are_drawn_evenly():
    """Apart for each layer and row, and of the last stretch, which has two tokens of eight, as often as of others."""
    torch.manual_seed(0)
    sample = draw_queries(torch.arange(100, 150), 1000, 2, GEOMETRY, 8)
    counts = torch.bincount(sample.tokens[sample.eligible], minlength=50)
    # Each token is expected 2000 / 8 times, with a standard deviation of 15.
    assert (counts - 250).abs().max() < 5 * 15
    first = sample.tokens[:, 0]
    assert not torch.equal(*first) and not torch.equal(first, sample.tokens[:, 1])


def test_recall_of_a_choice():
    """Of blocks 1 to 4 the student would choose 1 and 2, the teacher 1 and 4; block 5 is forced, and so is 0."""
    mass = torch.tensor([0.1, 0.3, 0.1, 0.0, 0.2, 0.3]).view(1, 1, 1, 6)
    student = torch.tensor([0.9, 0.2, 0.5, 0.0, 0.1, 0.9]).view(1, 1, 1, 6)
    geometry = Geometry(4, 2, 8, 4, 1, 1, 8)
    sample = Sample(torch.tensor([[5 * 8]]), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[True]]))
    free = choice_loss.free_blocks(sample, geometry, 6)
    assert free[0, 0].tolist() == [False, True, True, True, True, False]
    found = choice_loss.recall(mass, student, free, sample.eligible, geometry)
    torch.testing.assert_close(found.item(), 0.4 / 0.5)
    assert choice_loss.recall(mass, student, free, ~sample.eligible, geometry) == 0


def test_recall_is_counted_by_the_scores_of_an_index():
    """Scores so far apart that all shares but the largest are 0 in fp32: the choice goes by scores, and its recall."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, TOKENS, heads, DIM, generator=generator) for heads in (HEADS, GROUPS))
    q_idx, k_idx = torch.ones(1, TOKENS, GROUPS, DIM), torch.zeros(1, TOKENS, DIM)
    # Block j scores 1,000 j: the last free blocks are chosen.
    k_idx[0, :, 0] = torch.arange(TOKENS) // GEOMETRY.selection_block_size * 1000.0 * DIM**0.5
    tokens = torch.tensor([[TOKENS - 1]])
    sample = Sample(tokens, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool))
    _, recall = choice_loss.choice_loss(q, k, sample, GEOMETRY, q_idx=q_idx, k_idx=k_idx)
    mass, free = choice_loss.teacher_masses(q, k, sample, GEOMETRY, None), choice_loss.free_blocks(sample, GEOMETRY, 15)
    chosen = ops.select_blocks_by_index(q_idx, k_idx, GEOMETRY)[:, -1:]
    held, _ = choice_loss.choice_shares(mass, chosen, free, sample.eligible, GEOMETRY)
    torch.testing.assert_close(recall, held.sum(), rtol=1e-6, atol=0)


def test_equal_products_teach_the_first_token():
    q, k = drawn(1, TOKENS, HEADS, DIM), drawn(1, TOKENS, GROUPS, DIM)
    q_idx, k_idx = (torch.ones(1, TOKENS, *heads, DIM, dtype=torch.float64) for heads in ((GROUPS,), ()))
    tokens = torch.tensor([[TOKENS - 1]])
    sample = Sample(tokens, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool))
    loss, _ = choice_loss.choice_loss(q, k, sample, GEOMETRY, q_idx=q_idx, k_idx=k_idx.requires_grad_())
    [d_k] = torch.autograd.grad(loss, k_idx)
    assert d_k[0].any(-1).nonzero().flatten().tolist() == list(range(8, TOKENS - 16, 8))


def test_refusals_of_the_index():
    q, k = drawn(1, 20, GROUPS, DIM), drawn(1, 20, DIM)
    with pytest.raises(ValueError, match="must have num_keys = 21 keys"):
        ops.select_blocks_by_index(q, k, GEOMETRY, num_keys=21)
    with pytest.raises(ValueError, match="must share B and D"):
        ops.select_blocks_by_index(q, drawn(1, 20, DIM + 1), GEOMETRY)


def test_blocks_of_a_document_that_was_cut_short():
    """So many numbers of each sampled query are kept for backward."""
    documents = Documents.from_cu_seqlens(torch.tensor([0, 3 * TOKENS]), 3 * TOKENS).part(0, TOKENS)
    assert choice_loss.num_blocks(TOKENS, GEOMETRY, documents) == GEOMETRY.num_selection_blocks(TOKENS)
