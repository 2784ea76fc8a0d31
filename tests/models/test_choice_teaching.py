"""The queries that teach the choice, where processes share a row: together those of one process, each once."""

from typing import Any

import pytest
import torch

from trifocal.models import DecoderLM
from trifocal.models.choice_teaching import ChoiceTeaching, Lessons
from trifocal.nn.context import ContextShard, OwnTokens
from trifocal.ops import Documents, Geometry
from trifocal.testing.small_models import random_tokens, small_config


@pytest.mark.parametrize("borders", [None, (0, 1, 30, 52, 60, 104)])
def test_chunks_share_out_the_queries(borders: tuple[int, ...] | None) -> None:
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
    [whole] = Lessons.of_step(model.attention_layers(), teaching, tokens, positions).of_layer(0)
    found = []
    for rank in range(4):
        shard = ContextShard(rank, 4, list)
        own = OwnTokens.of(shard, shard.own(tokens), documents)
        samples = Lessons.of_step(model.attention_layers(), teaching, tokens, positions, own).of_layer(0)
        for chunk, sample in zip(own.chunks, samples, strict=True):
            assert ((chunk.first_token <= sample.tokens) & (sample.tokens < chunk.num_keys)).all()
            assert ((sample.starts >= 0) & (sample.starts <= sample.tokens)).all()
            pairs = torch.stack((sample.tokens, sample.starts), -1)[sample.eligible]
            found += map(tuple, pairs.tolist())
    expected = torch.stack((whole.tokens, whole.starts), -1)[whole.eligible].tolist()
    assert sorted(found) == sorted(map(tuple, expected)) and found


def _call(model: DecoderLM, tokens: torch.Tensor, **given: Any) -> dict[str, torch.Tensor]:
    """The gradients of the index's parameters after a training call on these tokens."""
    model.zero_grad()
    model(tokens[:, :-1], tokens[:, 1:], **given).backward()
    return {name: p.grad for name, p in model.named_parameters() if ".index." in name and p.grad is not None}
