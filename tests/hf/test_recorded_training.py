"""Recorded training of transformers' model: the losses and gradients of compiled training, whatever is recorded.

CUDA graphs need a GPU, and tests/gpu has them. Here a recording is a function that does the same work again and writes
into the same tensors.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hf.test_compiled_training import gradients, packed
from trifocal.hf import TrifocalForCausalLM
from trifocal.hf.recorded_training import RecordedTraining
from trifocal.testing.small_models import make_model, random_tokens, small_config

CPU = torch.device("cpu")


class Recorder:
    """A recorder for a CPU: a replay overwrites the tensors of the first result, as a graph would."""

    def __init__(self, device: torch.device) -> None:
        self.recorded = 0

    def warm_up(self, work: Callable[[], Any]) -> Any:
        return work()

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.recorded += 1
        loss, found = work()

        def replay() -> None:
            new_loss, new = work()
            loss.copy_(new_loss)
            for own, given in zip(found, new, strict=True):
                if own is not None:
                    own.copy_(given)

        # Nothing is done while a graph is recorded.
        loss.fill_(float("nan"))
        return replay, (loss, found)


def not_compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Another function that does the same: what is recorded does not depend on who made its code."""
    return functools.partial(function)


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", not_compiled)
    monkeypatch.setattr("trifocal.hf.recorded_training.GraphRecorder", Recorder)
    monkeypatch.setattr(RecordedTraining, "takes", staticmethod(lambda device: True))


def pair(**changes: Any) -> tuple[TrifocalForCausalLM, TrifocalForCausalLM]:
    """A compiled model and a recorded one, with equal weights in float64."""
    compiled, recorded = (
        TrifocalForCausalLM.from_decoder(make_model(small_config(**changes), CPU, torch.float64)).train()
        for _ in range(2)
    )
    compiled.compile_training()
    recorded.compile_training(cuda_graphs=True)
    return compiled, recorded


def recorder_of(model: TrifocalForCausalLM) -> RecordedTraining:
    assert model._training_loss is not None and model._training_loss._recorded is not None
    return model._training_loss._recorded


def rows(seed: int) -> dict[str, Tensor]:
    tokens = random_tokens((2, 48), 64, CPU, seed=seed)
    return {"input_ids": tokens, "labels": tokens}


def assert_same(compiled: TrifocalForCausalLM, recorded: TrifocalForCausalLM, batch: dict[str, Any]) -> None:
    (expected, expected_gradients), (found, found_gradients) = (gradients(m, batch) for m in (compiled, recorded))
    assert found.logits is None
    assert float(found.loss.detach()) == pytest.approx(float(expected.loss.detach()), rel=1e-12)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_every_kind_of_batch_is_recorded_once(checkpointed: bool) -> None:
    """Computed, recorded, replayed with other values: packs of other borders are one kind, whole rows another."""
    compiled, recorded = pair()
    if checkpointed:
        recorded.gradient_checkpointing_enable()
    for lengths in ([40, 1, 23, 50], [64, 37], [3, 98, 10]):
        assert_same(compiled, recorded, packed(lengths))
    assert recorder_of(recorded).recordings == 1
    for seed in range(3):
        assert_same(compiled, recorded, rows(seed))
    assert recorder_of(recorded).recordings == 2
    assert_same(compiled, recorded, packed([101]))
    counted = {"num_items_in_batch": torch.tensor(7)}
    for number in (torch.tensor(7), torch.tensor(9), 11):
        assert_same(compiled, recorded, rows(4) | {"num_items_in_batch": number})
    assert_same(compiled, recorded, packed([90, 20]) | counted)


def test_gradients_follow_the_optimizer_and_add_up() -> None:
    """Weights change in place; an accumulated and scaled loss is what transformers' trainer asks for."""
    compiled, recorded = pair()
    for model in (compiled, recorded):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            for half in range(2):
                (model(**packed([50, 51 + half])).loss / 2 * (step + 1)).backward()
            optimizer.step()
    for (name, expected), found in zip(compiled.named_parameters(), recorded.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=name)


def test_only_what_is_trained_gets_gradients() -> None:
    compiled, recorded = pair(tie_embeddings=True)
    for model in (compiled, recorded):
        model.model.blocks[0].requires_grad_(False)
        for seed in range(3):
            model.zero_grad()
            model(**rows(seed)).loss.backward()
    for (name, expected), found in zip(compiled.named_parameters(), recorded.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None) == (not expected.requires_grad), name
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-12, msg=name)
    recorded.model.blocks[0].requires_grad_(True)
    compiled.model.blocks[0].requires_grad_(True)
    assert_same(compiled, recorded, rows(5))


def test_an_output_projection_that_is_replaced_counts() -> None:
    """As PEFT replaces it, whatever was recorded before."""
    compiled, recorded = pair()
    assert_same(compiled, recorded, rows(1))
    assert_same(compiled, recorded, rows(2))
    for model in (compiled, recorded):
        head = torch.nn.Linear(*model.head.weight.shape[::-1], bias=False, dtype=torch.float64)
        torch.nn.init.constant_(head.weight, 0.25)
        model.head = head
    for seed in range(3):
        assert_same(compiled, recorded, rows(seed))
    assert float(recorded(**rows(1)).loss.detach()) == pytest.approx(torch.log(torch.tensor(64.0)).item())


def test_what_is_not_recorded_is_right_too() -> None:
    """Padding, hidden states, passes without gradients and in evaluation."""
    compiled, recorded = pair()
    tokens = random_tokens((2, 30), 64, CPU)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    for _ in range(3):
        assert_same(
            compiled,
            recorded,
            {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)},
        )
        assert len(recorded(**rows(1), output_hidden_states=True).hidden_states) == 3
        with torch.no_grad():
            assert recorded(**rows(1)).logits is not None
    assert recorded.eval()(**rows(1)).logits is not None
    assert recorder_of(recorded).recordings == 0


def test_a_loss_whose_gradients_are_gone_says_so() -> None:
    _, recorded = pair()
    for _ in range(2):
        recorded(**rows(1)).loss.backward()
    first, second = recorded(**rows(2)).loss, recorded(**rows(3)).loss
    second.backward()
    with pytest.raises(RuntimeError, match=r"call backward\(\) before the model's next batch"):
        first.backward()


def test_what_cannot_be_recorded_is_refused() -> None:
    _, recorded = pair()
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(ValueError, match="not in fp16"):
        recorded(**rows(1))
    with pytest.raises(ValueError, match="output_attentions=True is not possible"):
        recorded(**rows(1), output_attentions=True)
    with pytest.raises(ValueError, match="do not know the argument typo"):
        recorded(**rows(1), typo=1)


def test_on_a_cpu_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = TrifocalForCausalLM.from_decoder(make_model(small_config(), CPU)).train()
    monkeypatch.setattr(torch, "compile", not_compiled)
    model.compile_training(cuda_graphs=True)
    for _ in range(2):
        model(**rows(1)).loss.backward()
    assert recorder_of(model).recordings == 0
