"""The model as transformers compiles it: the losses and gradients of the eager one, in few graphs; and exported."""

import pytest
import torch

from tests.hf.test_modeling import padded
from trifocal.hf import TrifocalForCausalLM
from trifocal.testing.small_models import make_model, random_tokens, small_config

CPU = torch.device("cpu")
# PyTorch's own tracer warns about its own calls.
pytestmark = pytest.mark.filterwarnings("ignore")


def gradients(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return float(loss), [parameter.grad.clone() for parameter in model.parameters()]


def packed(lengths):
    tokens = random_tokens((1, sum(lengths)), 64, CPU)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens.masked_fill(positions == 0, -100)}


def test_it_is_the_eager_model(rows):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    config = small_config(num_layers=1, attention="selected")
    model = TrifocalForCausalLM.from_decoder(make_model(config, CPU, torch.float64)).train()
    # Graphs are traced and counted, but no code is made of them.
    compiled = torch.compile(model, backend="eager")
    tokens, mask = padded(rows, "left")
    padding = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    # The second makes lengths dynamic; from then on, packs share graphs. Padding makes others.
    for batch, adds in (
        (packed([40, 1, 23, 50]), True),
        (packed([64, 37]), True),
        (packed([60, 5, 8]), False),
        (padding, True),
    ):
        before = counters["stats"]["unique_graphs"]
        (expected, expected_gradients), (found, found_gradients) = (gradients(m, batch) for m in (model, compiled))
        assert (counters["stats"]["unique_graphs"] > before) == adds
        assert found == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(found_gradients, expected_gradients, rtol=1e-5, atol=1e-6)
    # The layout of documents is read between two graphs, and nothing else is.
    assert all("row_layout" in reason for reason in counters["graph_break"])


@torch.no_grad()
def test_an_exported_graph_takes_tokens_only(model, rows):
    tokens, mask = padded(rows, "right", more=3)
    graph = torch.export.export(model, (), {"input_ids": tokens}).module()
    expected = model(tokens, use_cache=False).logits
    torch.testing.assert_close(graph(input_ids=tokens).logits, expected, rtol=1e-9, atol=1e-9)
    for given in ({"attention_mask": mask}, {"position_ids": mask.cumsum(1) - 1}):
        with pytest.raises(ValueError, match="export takes input_ids or inputs_embeds only"):
            torch.export.export(model, (), {"input_ids": tokens} | given)
