"""Compiled training of transformers' model: the losses and gradients of the eager one, in few compilations."""

import functools
from typing import Any

import pytest
import torch
from tests.hf.test_modeling import padded
from torch import Tensor

from trifocal.hf import TrifocalForCausalLM
from trifocal.models.layers import run_block
from trifocal.testing.small_models import make_model, random_tokens, small_config

CPU = torch.device("cpu")


# PyTorch's own tracer warns about its own calls.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced and counted, but no code is made of them."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def graphs() -> int:
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


def gradients(model: TrifocalForCausalLM, batch: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def packed(lengths: list[int]) -> dict[str, Tensor]:
    tokens = random_tokens((1, sum(lengths)), 64, CPU)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens.masked_fill(positions == 0, -100)}


def test_it_is_the_eager_model(rows: list[Tensor]) -> None:
    eager, compiled = (
        TrifocalForCausalLM.from_decoder(make_model(small_config(), CPU, torch.float64)).train() for _ in range(2)
    )
    compiled.compile_training()
    tokens, mask = padded(rows, "left")
    batches = [
        packed([40, 1, 23, 50]),
        # As many tokens after filling.
        packed([64, 37]),
        {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)},
    ]
    # One for both layers, and the loss; then the loss of more tokens, padding included.
    for batch, expected_graphs in zip(batches, (2, 2, 3), strict=True):
        (expected, expected_gradients), (found, found_gradients) = (gradients(m, batch) for m in (eager, compiled))
        assert found.logits is None and expected.logits is not None
        # transformers computes the loss in float32.
        assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-6)
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
        assert graphs() == expected_graphs
    counted = compiled(**batches[0], num_items_in_batch=torch.tensor(7)).loss
    assert float(counted) == pytest.approx(float(eager(**batches[0], num_items_in_batch=7).loss), rel=1e-6)
    compiled.eval()
    assert compiled(**batches[0]).logits.shape == (1, 114, 64)


def test_layers_are_compiled_and_checkpointed_in_either_order(model: TrifocalForCausalLM) -> None:
    first, second = (TrifocalForCausalLM.from_decoder(model.to_decoder()) for _ in range(2))
    first.compile_training()
    first.gradient_checkpointing_enable()
    second.gradient_checkpointing_enable()
    second.compile_training()
    for changed in (first, second):
        for block in changed.model.blocks:
            run, checkpointed, _ = block.forward.args
            assert run is changed.model._run_block is not run_block and checkpointed
    first.gradient_checkpointing_disable()
    assert all(block.forward.args[:2] == (first.model._run_block, False) for block in first.model.blocks)


def test_a_loss_of_the_users_own_is_kept() -> None:
    model = TrifocalForCausalLM.from_decoder(make_model(small_config(), CPU, torch.float64)).train()
    model.compile_training()
    model.loss_function = lambda logits, **_: logits.sum()
    with torch.no_grad():
        output = model(**packed([5]))
    assert torch.equal(output.loss, output.logits.sum())
