"""The checks of the model: healthy ones pass, each fault fails."""

import types
from dataclasses import replace

import pytest
import torch

from tests.checks import faults
from trifocal.checks import model_checks as checks
from trifocal.generate import cached_layers, cached_model, prefill
from trifocal.ops import nsa_attention
from trifocal.ops.decode import linear as decode_linear
from trifocal.testing.small_models import SMALL, make_model

CPU = torch.device("cpu")
HEALTHY = (checks.checkpointing, checks.future_leak, checks.decode, checks.batch_invariance, checks.parameter_gradients)


def making(change):
    """`make_model` whose models are changed: `change(model)`."""

    def make(config, device, dtype):
        model = make_model(config, device, dtype)
        change(model)
        return model

    return make


def attending_with(function):
    def change(model):
        if "nsa" in model.config.attention_of_layers:
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
def test_future_leak_finds(fault, monkeypatch):
    def attention(*inputs, cu_seqlens=None, **rules):
        if cu_seqlens is not None:
            return nsa_attention(*inputs, cu_seqlens=cu_seqlens, **rules)
        return fault(*inputs, **rules)

    later = faults.at_other_lengths(cached_layers.decode_attention, lambda lengths: lengths + 1)
    monkeypatch.setattr(cached_layers, "nsa_attention", fault)
    monkeypatch.setattr(cached_layers, "decode_attention", later)
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


@pytest.mark.parametrize(("model", "name"), [(0, "decode_attention"), (1, "decode_dense_attention")])
def test_decode_finds_a_query_that_sees_only_the_first_key(model, name, monkeypatch):
    fault = faults.at_other_lengths(getattr(cached_layers, name), lambda lengths: lengths * 0)
    monkeypatch.setattr(cached_layers, name, fault)
    found = checks.decode(CPU)
    assert not found.passed
    errors = [float(line.split()[1]) for line in found.details]
    assert errors[model] > found.bound > errors[1 - model]


def test_decode_finds_a_compression_cache_that_prefill_does_not_fill(monkeypatch):
    def only_the_window(self):
        for ring, places, x in self._rings:
            # One token less than a compressed block, and eight new ones.
            if ring.shape[2] != SMALL.compression_block_size - 1 + 8:
                ring[self.row].index_copy_(1, places, x)

    monkeypatch.setattr(prefill.Chunk, "write_rings", only_the_window)
    assert not checks.decode(CPU).passed


def test_decode_finds_a_window_cache_one_too_short(monkeypatch):
    healthy = cached_model.decode_geometry

    def shorter(config, max_length):
        geometry = healthy(config, max_length)
        return replace(geometry, window_size=geometry.window_size - 1)

    monkeypatch.setattr(cached_model, "decode_geometry", shorter)
    assert not checks.decode(CPU).passed


def test_decode_finds_blocks_rotated_by_another_position(monkeypatch):
    healthy = prefill.Chunk.rotate

    def rotate(self, x, first=None, stride=1):
        # Blocks are a stride apart.
        return healthy(self, x, first if stride == 1 else first + 1, stride)

    monkeypatch.setattr(prefill.Chunk, "rotate", rotate)
    assert not checks.decode(CPU).passed


def test_batch_invariance_finds_products_of_all_rows_together(monkeypatch):
    monkeypatch.setattr(decode_linear, "_linear", torch.nn.functional.linear)
    found = checks.batch_invariance(CPU)
    assert not found.passed and found.details[0] != "nsa: 0"


def test_parameter_gradients_find_a_skipped_branch():
    """A branch that is left out when it sees nothing leaves its parameters without a gradient."""

    def change(model):
        for name, parameter in model.named_parameters():
            if "k_compressor" in name:
                parameter.register_hook(lambda gradient: gradient * 0)

    found = checks.parameter_gradients(CPU, make_model=making(change))
    assert not found.passed
    assert "k_compressor" in found.details[0]


def test_parameter_gradients_find_a_parameter_that_nothing_uses():
    def change(model):
        model.register_parameter("forgotten", torch.nn.Parameter(torch.ones(3)))

    found = checks.parameter_gradients(CPU, make_model=making(change))
    assert found.figure == 12
    assert "forgotten" in found.details[0]


def test_parameter_gradients_find_nan():
    def change(model):
        healthy = model.forward

        def forward(self, tokens, targets=None, *, cu_seqlens=None):
            loss = healthy(tokens, targets, cu_seqlens=cu_seqlens)
            return loss * torch.nan if tokens.shape[1] < 4 else loss

        model.forward = types.MethodType(forward, model)

    found = checks.parameter_gradients(CPU, make_model=making(change))
    assert not found.passed
    assert "shorter than a block" in found.details[0]
