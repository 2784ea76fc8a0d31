"""The tokens of a process that shares sequences: chunks of equal work, and lengths that do not cut."""

import copy
import pickle

import pytest
import torch

from trifocal.models import DecoderLM
from trifocal.models.choice_teaching import ChoiceTeaching
from trifocal.nn.context import ContextShard, TokenShard
from trifocal.ops import Documents
from trifocal.testing.small_models import random_tokens, small_config

TOKENS = torch.arange(24)[None]


def shards(size):
    """Of all processes; none exchanges anything."""
    return [ContextShard(rank, size, list) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_chunks_cover_the_sequence_with_equal_work(size):
    seen, work = [], set()
    for shard in shards(size):
        tokens = shard.local_tokens(TOKENS)
        local_tokens = TokenShard.of(shard, tokens, None)
        assert torch.equal(local_tokens.positions, tokens[0])
        for chunk in local_tokens.chunks:
            assert torch.equal(chunk.queries(tokens), TOKENS[:, chunk.first_token : chunk.num_keys])
            assert torch.equal(chunk.keys(TOKENS), TOKENS[:, : chunk.num_keys])
        seen += tokens[0].tolist()
        work.add((tokens + 1).sum().item())
    assert sorted(seen) == TOKENS[0].tolist() and len(work) == 1


def test_documents_end_at_the_end_of_a_chunk():
    documents = Documents.from_cu_seqlens(torch.tensor([0, 5, 6, 17, 24]), 24)
    first, last = TokenShard.of(shards(2)[1], shards(2)[1].local_tokens(TOKENS), documents).chunks
    assert first.documents.cu_seqlens.tolist() == [0, 5, 6, 12, 12]
    assert torch.equal(first.documents.positions, documents.positions[:12])
    assert last.documents.cu_seqlens.tolist() == [0, 5, 6, 17, 18]


def test_a_length_that_does_not_cut_is_refused():
    tokens = random_tokens((1, 25), 64, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"3 processes share a sequence in 6 equal chunks, got 25 tokens; .* of 6$"):
        shards(3)[0].local_tokens(tokens)
    model = DecoderLM(small_config())
    model.context = shards(3)[0]
    with pytest.raises(
        ValueError, match=r"has two equal chunks of it, got 25 tokens; cut .* with ContextShard.local_tokens$"
    ):
        model(tokens, tokens)


def test_without_targets_each_process_has_whole_sequences():
    """And a copy of a model shares with nobody."""
    model = DecoderLM(small_config()).eval()
    tokens = random_tokens((2, 25), 64, torch.device("cpu"))
    expected = model(tokens)
    model.context = ContextShard(0, 2, list)
    assert torch.equal(model(tokens), expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.context is None and model.context is not None


@pytest.mark.parametrize(
    "kind",
    [
        {}, {"chooser": "index"}, {"attention": "selected"}, {"attention": "selected", "chooser": "index"},
        {"attention": "dense"},
        {"layer_types": ("window", "dense"), "sliding_window": 5},
    ],
    ids=str,
)  # fmt: skip
def test_a_layer_has_one_exchange(kind):
    """A compiler may change the order of several, and in another way in each process: they would not match."""
    model, calls = DecoderLM(small_config(**kind)), []

    def gather(xs, past=0):
        calls.append(len(xs))
        return [x[:, :past] if past else torch.cat((x, x), 1) for x in xs]

    model.context = ContextShard(0, 2, gather)
    tokens, layers = random_tokens((1, 24), 64, torch.device("cpu")), model.config.num_layers
    teaching = None
    if model.config.has_index:
        teaching = ChoiceTeaching(torch.tensor(1), torch.ones(layers), torch.zeros(layers, 2), 48, 5)
    model(tokens, tokens, teaching=teaching).backward()
    assert len(calls) == 1 + layers
    model.zero_grad()
    # Without a sample of all tokens nothing is drawn of the local ones.
    model(tokens, tokens).backward()
    assert len(calls) == 2 * (1 + layers)
    assert all(one.grad is None for name, one in model.named_parameters() if ".index." in name)
