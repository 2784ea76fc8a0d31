"""The whole training step as one graph, without a break."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trifocal.models import DecoderLM

# PyTorch's own tracer warns about its own calls.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("options", "checkpointed"),
    [
        ({}, False),
        ({"compressor": "mlp", "gate": "softmax"}, True),
        ({"attention": "dense"}, True),
    ],
    ids=str,
)
def test_compiles_whole_and_equals_eager(
    make_model: Callable[..., DecoderLM], options: dict[str, Any], checkpointed: bool
) -> None:
    torch._dynamo.reset()
    model = make_model(num_layers=1, **options)
    tokens = torch.randint(31, (2, 30))
    loss = model(tokens, tokens)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    model.set_activation_checkpointing(0, int(checkpointed))
    compiled_loss = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens, tokens)
    given = torch.autograd.grad(compiled_loss, list(model.parameters()))
    torch.testing.assert_close(compiled_loss, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(given, expected, rtol=1e-11, atol=1e-12)
