"""The checks that go through the real trainer: healthy ones pass, each fault fails."""

import pytest
import torch
from tests.checks import faults

from trifocal.checks import training_checks as training
from trifocal.data import Loader
from trifocal.models import DecoderLM
from trifocal.nn import attention as nn_attention
from trifocal.train import loop, train_setup
from trifocal.train import step as train_step

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", [training.random_token_floor, training.resume_bit_for_bit, training.master_weights])
def test_healthy(check):
    found = check(CPU)
    assert found.passed, found


@pytest.fixture
def short(monkeypatch):
    """A fault is learned in half the steps."""
    monkeypatch.setattr(training, "FLOOR_STEPS", 80)


@pytest.mark.usefixtures("short")
def test_random_token_floor_finds_a_window_that_sees_the_next_token(monkeypatch):
    fault = faults.replacing_window(faults.leaking_window)

    def attention(*inputs, cu_seqlens=None, **rules):
        return fault(*inputs, **rules)

    monkeypatch.setattr(nn_attention, "nsa_attention", attention)
    found = training.random_token_floor(CPU)
    assert not found.passed
    assert found.figure > 40  # not chance: the loss has left the floor for good


@pytest.mark.usefixtures("short")
def test_random_token_floor_finds_targets_that_are_the_inputs(monkeypatch):
    healthy = train_step.batch_loss

    def unshifted(loss_function, batch, device, **rest):
        return healthy(loss_function, batch._replace(targets=batch.tokens), device, **rest)

    monkeypatch.setattr(train_step, "batch_loss", unshifted)
    assert not training.random_token_floor(CPU).passed


@pytest.mark.usefixtures("short")
def test_random_token_floor_finds_tokens_that_come_again(monkeypatch):
    """A few rows over and over are not fresh: the model learns them by heart."""
    healthy = train_setup.make_loader

    class Repeating:
        def __init__(self, loader):
            self.loader, self.batch = loader, next(loader)

        def __next__(self):
            return self.batch

        def __getattr__(self, name):
            return getattr(self.loader, name)

    monkeypatch.setattr(train_setup, "make_loader", lambda *args, **kwargs: Repeating(healthy(*args, **kwargs)))
    assert not training.random_token_floor(CPU).passed


def differing(found):
    return {line.removeprefix("differs: ") for line in found.details[1:]}


def test_resume_finds_random_generators_that_are_not_restored(monkeypatch):
    monkeypatch.setattr(train_setup, "restore_random_state", lambda state: None)
    found = training.resume_bit_for_bit(CPU)
    assert not found.passed
    assert differing(found) == {"random: python", "random: numpy", "random: torch"}


def test_resume_finds_data_that_start_afresh(monkeypatch):
    monkeypatch.setattr(Loader, "load_state_dict", lambda self, state: None)
    found = training.resume_bit_for_bit(CPU)
    assert not found.passed
    assert "process: data" in differing(found)


def test_resume_finds_weights_alone(monkeypatch):
    """The optimizer starts afresh: its moments are those of the steps since."""
    healthy = train_setup.load_checkpoint

    def weights_alone(path, *, model, optimizer, **rest):
        state = healthy(path, model=model, optimizer=optimizer, **rest)
        optimizer.state.clear()
        return state

    monkeypatch.setattr(train_setup, "load_checkpoint", weights_alone)
    assert not training.resume_bit_for_bit(CPU).passed


def test_resume_finds_a_schedule_that_starts_afresh(monkeypatch):
    healthy, calls = loop.learning_rate_of, []

    def forgetful(config, step):
        calls.append(step)
        # After the six steps of the uninterrupted run the resumed one counts from its own start.
        return healthy(config, step if len(calls) <= training.RESUME_STEPS else len(calls) - training.RESUME_STEPS)

    monkeypatch.setattr(loop, "learning_rate_of", forgetful)
    assert not training.resume_bit_for_bit(CPU).passed


def test_master_weights_find_bf16_weights():
    found = training.master_weights(CPU, make_model=lambda config: DecoderLM(config).to(torch.bfloat16))
    assert not found.passed


def test_master_weights_find_one_bf16_parameter():
    def make_model(config):
        model = DecoderLM(config)
        model.blocks[0].mlp.to(torch.bfloat16)
        return model

    assert not training.master_weights(CPU, make_model=make_model).passed


def test_master_weights_find_products_in_fp32():
    """An autocast that does nothing: right, but not the precision that was asked for."""

    def make_model(config):
        model = DecoderLM(config)
        healthy = model.forward

        def forward(*args, **kwargs):
            with torch.autocast("cpu", enabled=False):
                return healthy(*args, **kwargs)

        model.forward = forward
        return model

    found = training.master_weights(CPU, make_model=make_model)
    assert not found.passed
    assert "product in torch.float32" in found.details


def test_master_weights_find_steps_that_are_rounded_away():
    """fp32 in name: weights are rounded to bf16 after every step."""

    def make_optimizer(model, config):
        optimizer = training.make_optimizer(model, config)

        def round_weights(*_):
            for parameter in model.parameters():
                parameter.data.copy_(parameter.data.to(torch.bfloat16))

        round_weights()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(parameter.data.to(torch.bfloat16))
            assert parameter.dtype == torch.float32, name
        optimizer.register_step_post_hook(round_weights)
        return optimizer

    found = training.master_weights(CPU, make_optimizer=make_optimizer)
    assert not found.passed
    assert any("does not move" in line for line in found.details)
