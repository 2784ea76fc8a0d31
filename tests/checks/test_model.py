"""The checks of the model: healthy ones pass, each fault fails."""

import types

import pytest
import torch

from tests.checks import faults
from trifocal.checks import model_checks as checks
from trifocal.generate import NSACache
from trifocal.ops import nsa_attention
from trifocal.testing.small_models import make_model

CPU = torch.device("cpu")
HEALTHY = (checks.checkpointing, checks.future_leak, checks.decode, checks.parameter_gradients)


def making(change):
    """`make_model` whose models are changed: `change(model)`."""

    def make(config, device, dtype):
        model = make_model(config, device, dtype)
        change(model)
        return model

    return make


def attending_with(function):
    def change(model):
        if model.config.attention == "nsa":
            faults.with_attention(model, function)

    return making(change)


@pytest.mark.parametrize("check", HEALTHY)
def test_healthy(check):
    found = check(CPU)
    assert found.passed, found


def test_the_harness_that_puts_faults_in_is_healthy():
    for check in (checks.future_leak, checks.decode):
        assert check(CPU, make_model=attending_with(nsa_attention)).passed


def test_checkpointing_finds_late_binding():
    found = checks.checkpointing(CPU, checkpoint=faults.late_bound_checkpointing)
    assert not found.passed
    assert found.figure > 0.5  # wrong by more than half: not rounding


def test_checkpointing_finds_one_wrong_parameter():
    def halve_one(model):
        model.blocks[2].mlp.down_proj.weight.register_hook(lambda gradient: gradient * 0.5)

    found = checks.checkpointing(CPU, checkpoint=halve_one)
    assert not found.passed
    assert "blocks.2.mlp.down_proj.weight" in found.details[0]


def test_checkpointing_finds_a_lost_gradient():
    def freeze_one(model):
        model.blocks[1].attention.q_proj.weight.requires_grad_(False)

    assert not checks.checkpointing(CPU, checkpoint=freeze_one).passed


@pytest.mark.parametrize(
    "fault",
    [faults.replacing_window(faults.leaking_window), faults.softmax_over_future_blocks],
    ids=["window sees the next token", "softmax over future blocks"],
)
def test_future_leak_finds(fault):
    def attention(*inputs, cu_seqlens=None, **rules):
        if cu_seqlens is not None:
            return nsa_attention(*inputs, cu_seqlens=cu_seqlens, **rules)
        return fault(*inputs, **rules)

    found = checks.future_leak(CPU, make_model=attending_with(attention))
    assert not found.passed
    counts = {line.partition(":")[0]: int(line.rpartition(" ")[2]) for line in found.details}
    assert counts["training"] > 0
    assert counts["prefill in chunks"] > 0
    assert counts["decoding, 3 tokens a step"] > 0
    assert counts["packed documents"] == 0


def test_future_leak_finds_documents_that_see_one_another():
    found = checks.future_leak(CPU, make_model=attending_with(faults.ignoring_documents))
    assert not found.passed
    assert found.details[-1] != "packed documents: 0"
    assert found.details[0] == "training: 0"


def test_future_leak_finds_a_model_that_sees_nothing():
    def blind(model):
        model._last_residual = lambda tokens, *_: torch.zeros(*tokens.shape, model.config.dim)

    assert not checks.future_leak(CPU, make_model=making(blind)).passed


def test_decode_finds_a_query_that_sees_only_the_first_key():
    attention = faults.replacing_window(faults.top_left_window)
    assert not checks.decode(CPU, make_model=attending_with(attention)).passed


def test_decode_finds_it_in_the_dense_twin():
    found = checks.decode(CPU, make_model=making(faults.one_query_sees_the_first_key))
    assert not found.passed
    assert found.details[1].startswith("dense")


def test_decode_finds_a_compression_cache_that_prefill_does_not_fill(monkeypatch):
    healthy = NSACache.extend

    def extend(self, raw, selected, window, compress):
        if self.length == 0 and raw[0].shape[1] > 1:
            raw = tuple(torch.zeros_like(x) for x in raw)
        return healthy(self, raw, selected, window, compress)

    monkeypatch.setattr(NSACache, "extend", extend)
    assert not checks.decode(CPU).passed


def test_decode_finds_a_window_cache_one_too_short(monkeypatch):
    healthy = NSACache.extend

    def extend(self, raw, selected, window, compress):
        compressed, whole, (k, v) = healthy(self, raw, selected, window, compress)
        first = 1 if k.shape[1] >= self.geometry.window_size else 0
        k, v = k.clone(), v.clone()
        k[:, :first], v[:, :first] = 0, 0
        return compressed, whole, (k, v)

    monkeypatch.setattr(NSACache, "extend", extend)
    assert not checks.decode(CPU).passed


def test_decode_finds_blocks_rotated_by_another_position(monkeypatch):
    healthy = NSACache.extend

    def extend(self, raw, selected, window, compress):
        return healthy(self, raw, selected, window, lambda k, v, first: compress(k, v, first + 1))

    monkeypatch.setattr(NSACache, "extend", extend)
    assert not checks.decode(CPU).passed


def test_parameter_gradients_find_a_skipped_branch():
    """A branch that is left out when it sees nothing leaves its parameters without a gradient."""

    def change(model):
        for layer in model.attention_layers():
            for parameter in layer.k_compressor.parameters():
                parameter.register_hook(lambda gradient: gradient * 0)

    found = checks.parameter_gradients(CPU, make_model=making(change))
    assert not found.passed
    assert "k_compressor" in found.details[0]


def test_parameter_gradients_find_a_parameter_that_nothing_uses():
    def change(model):
        model.register_parameter("forgotten", torch.nn.Parameter(torch.ones(3)))

    found = checks.parameter_gradients(CPU, make_model=making(change))
    assert found.figure == 9
    assert "forgotten" in found.details[0]


def test_parameter_gradients_find_nan():
    def change(model):
        healthy = model.forward

        def forward(self, tokens, targets=None, *, cu_seqlens=None, cache=None):
            loss = healthy(tokens, targets, cu_seqlens=cu_seqlens, cache=cache)
            return loss * torch.nan if tokens.shape[1] < 4 else loss

        model.forward = types.MethodType(forward, model)

    found = checks.parameter_gradients(CPU, make_model=making(change))
    assert not found.passed
    assert "shorter than a block" in found.details[0]
