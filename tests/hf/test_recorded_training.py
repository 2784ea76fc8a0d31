"""Recorded training of transformers' model: the losses and gradients of compiled training, whatever is recorded.

CUDA graphs need a GPU, and tests/gpu has them. Here a recording does the same work again.
"""

import copy
from typing import Any

import pytest
import torch
from tests.hf.recorder import not_compiled, record_on_a_cpu, recorder_of
from tests.hf.test_compiled_training import gradients, packed
from torch import Tensor

from trifocal.hf import TrifocalForCausalLM
from trifocal.testing.small_models import make_model, random_tokens, small_config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_a_cpu(monkeypatch)


def pair(**changes: Any) -> tuple[TrifocalForCausalLM, TrifocalForCausalLM]:
    """A compiled model and a recorded one, with equal weights in float64."""
    compiled, recorded = (
        TrifocalForCausalLM.from_decoder(make_model(small_config(**changes), CPU, torch.float64)).train()
        for _ in range(2)
    )
    compiled.compile_training()
    recorded.compile_training(cuda_graphs=True)
    return compiled, recorded


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
    """Embeddings, hidden states, a model without gradients, passes without gradients and in evaluation."""
    compiled, recorded = pair()
    for seed in range(3):
        batch = rows(seed)
        embedded = compiled.model.embedding(batch["input_ids"]).detach()
        found = [m(inputs_embeds=embedded, labels=batch["labels"]).loss for m in (compiled, recorded)]
        assert torch.equal(*found)
        assert len(recorded(**rows(1), output_hidden_states=True).hidden_states) == 3
        recorded.requires_grad_(False)
        assert not recorded(**rows(1)).loss.requires_grad
        recorded.requires_grad_(True)
        with torch.no_grad():
            assert recorded(**rows(1)).logits is not None
    assert recorded.eval()(**rows(1)).logits is not None
    assert recorder_of(recorded).recordings == 0


@pytest.mark.parametrize(("hidden", "recordings"), [(0, 1), (7, 0)], ids=["mask of ones", "padding"])
def test_a_mask_that_hides_nothing_is_recorded(hidden: int, recordings: int) -> None:
    compiled, recorded = pair()
    for seed in range(3):
        tokens = random_tokens((2, 40), 64, CPU, seed=seed)
        mask = torch.ones_like(tokens)
        mask[0, :hidden] = 0
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
        assert_same(compiled, recorded, batch)
    assert recorder_of(recorded).recordings == recordings


class ExactLinear(torch.nn.Linear):
    """Products in fp32, whatever autocast says."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


def test_the_backward_pass_is_outside_of_autocast() -> None:
    """As a trainer's: in bf16, a product of fp32 in the backward pass is not rounded."""
    compiled, recorded = pair()
    for model in (compiled.float(), recorded.float()):
        model.head.__class__ = ExactLinear
    for seed in range(3):
        found = []
        for model in (compiled, recorded):
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**rows(seed)).loss
            loss.backward()
            found.append({name: parameter.grad for name, parameter in model.named_parameters()})
        for name, gradient in found[0].items():
            assert torch.equal(found[1][name], gradient), name
    assert recorder_of(recorded).recordings == 1


def test_nothing_outside_of_a_recording_is_in_its_backward_pass() -> None:
    """Autograd's nodes of parameters belong to the stream on which a loss that still lives first used them.

    A hook of a parameter shows whether the recorded pass went through its node.
    """
    _, recorded = pair()
    calls = []
    weight = recorded.model.norm.weight
    weight.register_hook(lambda gradient: calls.append(gradient.clone()))
    for number in range(1, 4):
        weight.grad = None
        loss = recorded(**rows(number)).loss
        assert len(calls) == number - 1
        loss.backward()
        assert len(calls) == number and torch.equal(calls[-1], weight.grad)


def test_all_recordings_share_one_copy_of_the_gradients() -> None:
    _, recorded = pair()
    for lengths in ([40, 60], [100], [30]):
        for _ in range(2):
            recorded(**packed(lengths)).loss.backward()
    assert recorder_of(recorded).recordings == 3
    places = {
        tuple(gradient.data_ptr() for gradient in recording.gradients)
        for recording in recorder_of(recorded)._graphs.recordings.values()
    }
    assert len(places) == 1
    recorded(**packed([40, 60])).loss.backward()
    first = recorded(**packed([40, 60])).loss
    recorded(**packed([100])).loss.backward()
    with pytest.raises(RuntimeError, match=r"call backward\(\) before the model's next batch"):
        first.backward()


def test_weights_that_move_are_recorded_anew() -> None:
    """Also those that are not trained; by a recorder of its own, because a pool without graphs takes no other."""
    compiled, recorded = pair()
    for model in (compiled, recorded):
        model.model.blocks[0].requires_grad_(False)
    batch = rows(1)
    for _ in range(2):
        recorded(**batch).loss.backward()
    recorder = recorder_of(recorded)._graphs.recorder
    for model in (compiled, recorded):
        weight = model.model.blocks[0].attention.v_proj.weight
        weight.data = weight.data * 2
    assert recorder_of(recorded).recordings == 1
    for number in range(3):
        losses = [model(**batch).loss.detach() for model in (compiled, recorded)]
        assert float(losses[1]) == pytest.approx(float(losses[0]), rel=1e-12)
        assert recorder_of(recorded).recordings == min(number, 1)
    assert recorder_of(recorded)._graphs.recorder is not recorder


def test_a_copy_records_for_itself() -> None:
    compiled, recorded = pair()
    for seed in range(2):
        assert_same(compiled, recorded, rows(seed))
    # CUDA's graphs and streams have no copies.
    recorder_of(recorded)._graphs.recorder.stream = (None for _ in range(1))
    twin = copy.deepcopy(recorded)
    assert recorder_of(twin).recordings == 0 and recorder_of(recorded).recordings == 1
    with torch.no_grad():
        for weight in twin.parameters():
            weight.mul_(1.5)
    assert_same(compiled, recorded, rows(3))
    compiled.load_state_dict(twin.state_dict())
    for seed in range(3):
        assert_same(compiled, twin, rows(seed))
    assert recorder_of(twin).recordings == 1


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
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        recorded(**rows(1), inputs_embeds=torch.zeros(2, 48, 32))
    with pytest.raises(ValueError, match=r"input_ids must have the shape \[B, T\]"):
        recorded(torch.arange(5), labels=torch.arange(5))


def test_on_a_cpu_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = TrifocalForCausalLM.from_decoder(make_model(small_config(), CPU)).train()
    monkeypatch.setattr(torch, "compile", not_compiled)
    model.compile_training(cuda_graphs=True)
    for _ in range(2):
        model(**rows(1)).loss.backward()
    assert recorder_of(model).recordings == 0
