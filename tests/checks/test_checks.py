"""Every check: a healthy installation passes it, and a fault that was really made once fails it."""

import contextlib
import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import warm
from tests.checks import faults
from trifocal.checks import (
    attention_checks,
    cost_checks,
    model_checks,
    operation_checks,
    process_worker,
    training_checks,
)
from trifocal.checks.measurement import Skipped, largest
from trifocal.checks.process_worker import Case
from trifocal.checks.registry import CHECKS
from trifocal.data import DataConfig
from trifocal.distributed.processes import DistributedContext
from trifocal.errors import UserError
from trifocal.inference import cached_attention
from trifocal.models import DecoderLM
from trifocal.nn import attention as nn_attention
from trifocal.nn import rotate
from trifocal.ops import nsa_attention
from trifocal.ops.choice_loss import choice_loss
from trifocal.ops.decode import linear as decode_linear
from trifocal.testing.inputs import attention_inputs
from trifocal.testing.small_models import SMALL, make_model
from trifocal.train import setup as train_setup
from trifocal.train.config.load import load_config

CPU = torch.device("cpu")
FAULTS = {}


def fault(name):
    """A test's fault in the check of this name: calls the check with it."""

    def keep(measure):
        FAULTS[name] = measure
        return measure

    return keep


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Few parallel cases, in processes that need not import everything first; fewer steps and tokens."""
    warm.take_the_place_of_subprocess(monkeypatch, "trifocal.testing.processes")
    cases = Case("ddp", checkpointing=True), Case("fsdp", accumulation=2), Case("ddp", accumulation=2, index=True)
    monkeypatch.setattr(training_checks, "PARALLEL_CASES", cases)
    monkeypatch.setattr(training_checks, "FLOOR_STEPS", 80)
    monkeypatch.setattr(cost_checks, "LENGTHS", (64, 128, 192))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_healthy(check):
    found = check.measure(CPU)
    if check.name == "backend-parity":
        assert isinstance(found, Skipped) and "triton" in found.reason
    else:
        assert found.passed, found


def test_every_check_has_a_fault():
    assert set(FAULTS) == {check.name for check in CHECKS}
    assert set().union(*(check.guards for check in CHECKS)) == set(range(1, 16))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_finds(check, monkeypatch):
    found = FAULTS[check.name](check.measure, monkeypatch)
    assert not found.passed, found


def sparse_layers_call(function, make):
    """Makes models as `make` does, but their sparse layers call another function."""

    def make_with_fault(config, *options):
        model = make(config, *options)
        return faults.with_attention(model, function) if "nsa" in config.attention_of_layers else model

    return make_with_fault


@fault("full-coverage")
def window_that_sees_the_next_token(measure, monkeypatch):
    monkeypatch.setattr(attention_checks, "nsa_attention", faults.replacing_window(faults.leaking_window))
    return measure(CPU)


@fault("oracle")
def halved_gradient(measure, monkeypatch):
    monkeypatch.setattr(attention_checks, "nsa_attention", faults.halved_value_gradient)
    return measure(CPU)


@fault("backend-parity")
def one_wrong_gradient(measure, monkeypatch):
    """Kernels that are the reference, but for the gradient of `v_slc`."""

    def attention(*inputs, backend, **rules):
        o = nsa_attention(*inputs, backend="reference", **rules)
        extra = inputs[4].sum() * 0.1
        return o + (extra - extra.detach()) if backend == "triton" else o

    monkeypatch.setattr(attention_checks, "nsa_attention", attention)
    return measure(CPU)


@fault("choice-loss")
def gradient_of_the_queries(measure, monkeypatch):
    def leaking(q, *others, **index):
        loss, recall = choice_loss(q, *others, **index)
        return torch.stack((loss + 0.1 * (q.sum() - q.sum().detach()), recall))

    monkeypatch.setattr(attention_checks, "choice_loss", leaking)
    return measure(CPU)


@fault("rope-distance")
def heads_rotated_as_one_vector(measure, monkeypatch):
    def rotate_concatenated(x, cos, sin):
        """Every head takes its own frequencies from a common table."""
        pairs = x.shape[2] * x.shape[3] // 2
        frequencies = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        # The positions, from the angle of the first pair, which turns by one radian a token, and from the second.
        angles = torch.atan2(sin, cos)[:, :1] * frequencies
        flat = x.flatten(2).unflatten(2, (1, -1))
        return rotate(flat, angles.cos(), angles.sin()).view_as(x)

    monkeypatch.setattr(attention_checks, "rotate", rotate_concatenated)
    return measure(CPU)


@fault("future-leak")
def leaks_in_training_prefill_and_decoding(measure, monkeypatch):
    def attention(*inputs, cu_seqlens=None, **rules):
        if cu_seqlens is not None:
            return nsa_attention(*inputs, cu_seqlens=cu_seqlens, **rules)
        return leaking(*inputs, **rules)

    leaking = faults.replacing_window(faults.leaking_window)
    later = faults.at_other_lengths(cached_attention.decode_attention, lambda lengths: lengths + 1)
    monkeypatch.setattr(cached_attention, "nsa_attention", leaking)
    monkeypatch.setattr(cached_attention, "decode_attention", later)
    monkeypatch.setattr(model_checks, "make_model", sparse_layers_call(attention, make_model))
    found = measure(CPU)
    counts = {line.partition(":")[0]: int(line.rpartition(" ")[2]) for line in found.details}
    of_nsa = {name: count for name, count in counts.items() if name.startswith("nsa")}
    assert of_nsa.pop("nsa, packed documents") == 0 and len(of_nsa) == 3 and min(of_nsa.values()) > 0
    return found


@fault("decode-equals-prefill")
def query_that_sees_only_the_first_key(measure, monkeypatch):
    first = faults.at_other_lengths(cached_attention.decode_attention, lambda lengths: lengths * 0)
    monkeypatch.setattr(cached_attention, "decode_attention", first)
    return measure(CPU)


@fault("batch-invariance")
def products_of_all_rows_together(measure, monkeypatch):
    monkeypatch.setattr(decode_linear, "_linear", torch.nn.functional.linear)
    found = measure(CPU)
    assert found.details[-1].startswith("the mix: ") and not found.details[-1].endswith(": 0")
    return found


@fault("checkpointing-gradients")
def late_binding(measure, monkeypatch):
    monkeypatch.setattr(DecoderLM, "_last_residual", faults.late_bound_residual)
    found = measure(CPU)
    assert found.figure > 0.5  # wrong by more than half: not rounding
    return found


@fault("index-in-any-loop")
def loop_that_teaches_nothing(measure, monkeypatch):
    def make(*arguments):
        model = make_model(*arguments)
        for layer in model.attention_layers():
            layer.choice_loss_weight = 0.0
        return model

    monkeypatch.setattr(model_checks, "make_model", make)
    return measure(CPU)


@fault("parameter-gradients")
def branch_that_is_skipped(measure, monkeypatch):
    def make(*arguments):
        model = make_model(*arguments)
        for name, parameter in model.named_parameters():
            if "k_compressor" in name:
                parameter.register_hook(lambda gradient: gradient * 0)
        return model

    monkeypatch.setattr(model_checks, "make_model", make)
    found = measure(CPU)
    assert "k_compressor" in found.details[0]
    return found


@fault("operation-count")
def loop_over_tokens(measure, monkeypatch):
    def looped(q, *rest, **rules):
        for t in range(q.shape[1] // 64):
            q[:, t].cosh()
        return nsa_attention(q, *rest, **rules)

    monkeypatch.setattr(cost_checks, "DecoderLM", sparse_layers_call(looped, DecoderLM))
    found = measure(CPU)
    assert "aten.cosh.default: 2, 4, 6" in found.details
    return found


def test_operation_count_looks_into_the_choice_of_blocks(monkeypatch):
    """`select_blocks` is one operator to the dispatcher."""
    healthy = cost_checks.reference.select_blocks

    def looped(q, k_cmp, lse, *rest):
        for t in range(q.shape[1]):
            q[:, t].sum()
        return healthy(q, k_cmp, lse, *rest)

    monkeypatch.setattr(cost_checks.reference, "select_blocks", looped)
    assert not cost_checks.operation_count(CPU).passed


@fault("stored-memory")
def copy_of_keys_per_query(measure, monkeypatch):
    inputs = attention_inputs(SMALL, 40, CPU, torch.float64)
    torch.testing.assert_close(faults.copies_per_query(*inputs, SMALL), nsa_attention(*inputs, SMALL))
    monkeypatch.setattr(cost_checks, "nsa_attention", faults.copies_per_query)
    return measure(CPU)


@fault("layer-sweep")
def cliff_at_five_layers(measure, monkeypatch):
    """The reported failure: four layers work, five hang."""

    def cliff(model, tokens, device):
        return len(model.blocks) * (100 if len(model.blocks) >= 5 else 1)

    monkeypatch.setattr(cost_checks, "step_seconds", cliff)
    return measure(CPU)


def test_layer_sweep_measures_again_what_a_burst_spoilt(monkeypatch):
    """Another process spoils the first six rounds; the work behind them is linear."""
    calls = []

    def bursts(model, tokens, device):
        calls.append(1)
        return len(model.blocks) ** (2.56 if len(calls) <= 6 * len(cost_checks.DEPTHS) else 1)

    monkeypatch.setattr(cost_checks, "step_seconds", bursts)
    found = cost_checks.layer_sweep(CPU)
    assert found.passed, found
    assert len(calls) == 7 * len(cost_checks.DEPTHS)


@fault("random-token-floor")
def training_that_sees_the_next_token(measure, monkeypatch):
    leaking = faults.replacing_window(faults.leaking_window)
    monkeypatch.setattr(
        nn_attention, "nsa_attention", lambda *inputs, cu_seqlens=None, **rules: leaking(*inputs, **rules)
    )
    found = measure(CPU)
    assert found.figure > 40  # not chance: the loss has left the floor for good
    return found


@fault("resume-bit-for-bit")
def only_weights(measure, monkeypatch):
    """The optimizer starts afresh: its moments are those of the steps since."""
    healthy = train_setup.load_checkpoint

    def load(path, *, model, optimizer, **rest):
        state = healthy(path, model=model, optimizer=optimizer, **rest)
        optimizer.state.clear()
        return state

    monkeypatch.setattr(train_setup, "load_checkpoint", load)
    return measure(CPU)


@fault("master-weights")
def bf16_weights(measure, monkeypatch):
    monkeypatch.setattr(training_checks, "DecoderLM", lambda config: DecoderLM(config).to(torch.bfloat16))
    return measure(CPU)


@fault("parallel-gradients")
def late_binding_in_every_process(measure, monkeypatch):
    # The faulty models teach no index.
    cases = [case for case in training_checks.PARALLEL_CASES if not case.index]
    monkeypatch.setattr(training_checks, "PARALLEL_CASES", cases)
    faults.before_the_worker(monkeypatch, "from tests.checks.faults import late_bound_models; late_bound_models()")
    found = measure(CPU)
    assert found.figure > 0.1
    return found


def test_parallel_gradients_find_copies_that_differ_by_a_bit(monkeypatch):
    processes, case = DistributedContext(), Case("none", num_layers=1)
    one = process_worker.gradients_of_one(case, processes)
    assert process_worker.gradient_difference(case, processes, one) == (0.0, "")
    monkeypatch.setattr(DistributedContext, "gather", lambda _, copy: [copy, np.nextafter(copy, np.inf)])
    assert process_worker.gradient_difference(case, processes, one)[0] == float("inf")


@fault("unknown-flags")
def flags_that_are_swallowed(measure, monkeypatch):
    def swallow(path, overrides):
        try:
            return load_config(path, overrides)
        except UserError:
            return load_config(path)

    monkeypatch.setattr(operation_checks, "load_config", swallow)
    return measure(CPU)


@fault("heartbeat")
def beats_at_the_start_of_a_phase_only(measure, monkeypatch):
    """Written by the training thread when it enters a phase: silent while it is busy."""

    class AtPhaseStart:
        def __init__(self, path, rank, interval_seconds):
            self.path = path / f"rank{rank}.jsonl"

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        @contextlib.contextmanager
        def phase(self, name):
            row = {"unix_time_seconds": time.time(), "phase": name, "phase_seconds": 0.0}
            self.path.write_text(json.dumps(row) + "\n")
            yield

    monkeypatch.setattr(operation_checks, "TRIES", 1)
    monkeypatch.setattr(operation_checks, "Heartbeat", AtPhaseStart)
    return measure(CPU)


@fault("failing-source")
def silent_fallback(measure, monkeypatch):
    first_batch = operation_checks.first_batch

    def fall_back(config):
        try:
            return first_batch(config)
        except (UserError, OSError):
            return first_batch(DataConfig(source="synthetic"))

    monkeypatch.setattr(operation_checks, "first_batch", fall_back)
    found = measure(CPU)
    assert found.figure == 7
    return found


def test_a_signal_in_the_last_step_of_a_training_ends_the_check(monkeypatch):
    train = training_checks.train

    def interrupted(config):
        return replace(train(config), stop_requested=True)

    monkeypatch.setattr(training_checks, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training_checks.random_token_floor(CPU)


def test_a_figure_that_is_not_finite_is_the_largest():
    found = largest({"a": 1.0, "b": float("nan"), "c": 2.0, "d": 0.5, "e": 3.0}, 5.0, "error")
    assert not found.passed and found.details == ("b: nan", "e: 3", "c: 2", "a: 1")
    assert largest({"a": 1.0, "c": 2.0}, 5.0, "error").passed
