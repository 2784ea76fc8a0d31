"""The checks of a step's cost: healthy ones pass, each fault fails."""

import itertools
import json
import subprocess
import sys

import pytest
import torch
from tests.checks import faults

from trifocal.checks import cost_checks as cost
from trifocal.models import DecoderLM
from trifocal.ops import nsa_attention
from trifocal.testing.inputs import attention_inputs
from trifocal.testing.small_models import SMALL

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", [cost.stored_memory_growth, cost.stored_memory_per_token, cost.operation_count])
def test_healthy(check):
    found = check(CPU)
    assert found.passed, found


def test_layer_sweep_passes_and_prints_time_and_memory_of_every_depth():
    found = cost.layer_sweep(CPU)
    assert found.passed, found
    assert [int(line.split()[0]) for line in found.details[:6]] == [1, 2, 4, 5, 12, 24]
    assert all(" ms," in line and line.endswith(" MiB") for line in found.details[:6])


def test_layer_sweep_takes_no_notice_of_a_busy_machine(monkeypatch):
    """Another process takes the processor away for longer and longer, as in a run that failed with exponent 2.56."""
    moments = itertools.count()
    wall = dict.fromkeys(("now",), 0.0)

    def step(model, tokens):
        wall["now"] += len(model.blocks) ** 2.56

    monkeypatch.setattr(cost, "_step", step)
    monkeypatch.setattr(cost.time, "perf_counter", lambda: wall["now"])
    monkeypatch.setattr(cost.time, "process_time", lambda: next(moments))
    monkeypatch.setattr(cost, "_stored_bytes", lambda forward: len(forward.func.blocks))
    monkeypatch.setattr(cost.os, "getloadavg", lambda: (7.25, 3.0, 1.0))
    monkeypatch.setattr(cost.os, "cpu_count", lambda: 2)
    found = cost.layer_sweep(CPU)
    assert found.passed, found
    assert "machine busy: load 7.2 on 2 cores" in found.details


def test_layer_sweep_measures_again_what_a_burst_spoilt():
    """The first six rounds are spoilt; the work behind them is linear."""
    calls = []

    def bursts(model, tokens, device):
        calls.append(1)
        return len(model.blocks) ** (2.56 if len(calls) <= 6 * len(cost.DEPTHS) else 1)

    found = cost.layer_sweep(CPU, step_seconds=bursts)
    assert found.passed, found
    assert len(calls) == 7 * len(cost.DEPTHS)


@pytest.mark.parametrize(("load", "lines"), [(1.9, 0), (2.1, 1)])
def test_a_busy_machine_has_more_to_do_than_cores(load, lines, monkeypatch):
    monkeypatch.setattr(cost.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(cost.os, "cpu_count", lambda: 2)
    assert len(cost.machine_busy()) == lines


def test_layer_sweep_finds_time_that_grows_with_the_square_of_depth():
    """Every layer makes each other one more expensive."""

    def slower(model, tokens, device):
        return cost.step_seconds(model, tokens, device) * len(model.blocks)

    found = cost.layer_sweep(CPU, step_seconds=slower, rounds=2, most_rounds=2)
    assert not found.passed
    assert "time" in found.details[-1]


def test_layer_sweep_finds_a_cliff_at_five_layers():
    """The reported failure: four layers work, five hang."""

    def cliff(model, tokens, device):
        return cost.step_seconds(model, tokens, device) * (100 if len(model.blocks) >= 5 else 1)

    assert not cost.layer_sweep(CPU, step_seconds=cliff, rounds=2, most_rounds=2).passed


def test_layer_sweep_finds_memory_that_grows_with_the_square_of_depth():
    class Keep(torch.autograd.Function):
        """Stores copies for backward, as many as there are layers before."""

        @staticmethod
        def forward(ctx, x, copies):
            ctx.save_for_backward(*(x.repeat(1, 1, 8) for _ in range(copies)))
            return x.clone()

        @staticmethod
        def backward(ctx, upstream):
            return upstream, None

    def make_model(config):
        model = DecoderLM(config)
        for depth, layer in enumerate(model.blocks):
            layer.register_forward_hook(lambda _m, _x, out, depth=depth: Keep.apply(out, depth))
        return model

    def linear(model, tokens, device):
        return 0.001 * len(model.blocks)

    found = cost.layer_sweep(CPU, make_model=make_model, step_seconds=linear, rounds=1)
    assert not found.passed
    assert "memory" in found.details[-1]


def test_stored_memory_growth_finds_scores_that_are_kept():
    """Dense scores, T * S a head, kept by autograd."""

    def make_model(config):
        def attention(q, *rest, **rules):
            k_win, v_win = rest[4:6]
            mask = torch.ones(q.shape[1], k_win.shape[1], dtype=torch.bool).tril()
            return nsa_attention(q, *rest, **rules) + 0 * faults.masked_attention(q, k_win, v_win, mask)

        return faults.with_attention(DecoderLM(config), attention)

    assert not cost.stored_memory_growth(CPU, make_model=make_model).passed


def test_stored_memory_growth_finds_a_boolean_mask_that_is_kept():
    class KeepMask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
            return x.clone()

        @staticmethod
        def backward(ctx, upstream):
            return upstream

    def make_model(config):
        return faults.with_attention(
            DecoderLM(config), lambda q, *rest, **rules: nsa_attention(KeepMask.apply(q), *rest, **rules)
        )

    assert not cost.stored_memory_growth(CPU, make_model=make_model).passed


def test_stored_memory_per_token_finds_a_copy_of_keys_per_query():
    found = cost.stored_memory_per_token(CPU, attention=lambda *x, backend: faults.copies_per_query(*x))
    assert not found.passed
    assert found.figure > 10


def test_the_copying_fault_is_right_otherwise():
    """It is what it claims: the same attention, stored badly."""
    inputs = attention_inputs(SMALL, 40, CPU, torch.float64)
    torch.testing.assert_close(faults.copies_per_query(*inputs, SMALL), nsa_attention(*inputs, SMALL))


def test_operation_count_finds_a_loop_over_tokens():
    def looped(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, geometry, **rules):
        o = nsa_attention(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, geometry, **rules)
        return torch.cat([o[:, t : t + 1] for t in range(o.shape[1])], 1)

    def make_model(config):
        return faults.with_attention(DecoderLM(config), looped)

    found = cost.operation_count(CPU, make_model=make_model)
    assert not found.passed
    assert found.figure >= 2 * (512 - 64)


def test_operation_count_leaves_out_what_the_first_step_of_a_length_prepares():
    """As kernels are compiled on a GPU before a first call, by operations on the meta device."""

    def make_model(config):
        prepared = set()

        def preparing(q, *rest, **rules):
            if q.shape[1] not in prepared:
                prepared.add(q.shape[1])
                for _ in range(q.shape[1] // 64):
                    torch.empty(q.shape, device="meta")
            return nsa_attention(q, *rest, **rules)

        return faults.with_attention(DecoderLM(config), preparing)

    found = cost.operation_count(CPU, make_model=make_model)
    assert found.passed, found
    assert len(found.details) == 3


def test_what_is_compiled_ahead_depends_on_the_length():
    """Why the first step is not counted: a GPU's backward pass cuts 512 tokens into parts, and shorter rows not."""
    run = subprocess.run([sys.executable, "-c", AHEAD], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    counts = json.loads(run.stdout)
    assert counts[0] == counts[1] < counts[2]


AHEAD = """
import json

import torch

from trifocal.checks import cost_checks as cost
from trifocal.ops import devices, pipeline
from trifocal.ops.triton import launch
from trifocal.testing.small_models import MINIMAL

counts = []
for length in cost.LENGTHS:
    def empty(*shape):
        return torch.empty(2, *shape, device="meta")

    blocks = MINIMAL.num_compressed_blocks(length)
    branches = tuple(empty(keys, 2, 16) for keys in (blocks, blocks, *[length] * 4))
    call = (MINIMAL, 0.25, True, empty(length, 8, 16), branches, empty(length, 8, 3), None, None)
    with launch.no_launches():
        devices.multiprocessors = lambda device: 132
        with torch.no_grad():
            counts.append(cost._count_operations(lambda: pipeline._run_kernels(*call)).total())
print(json.dumps(counts))
"""


def test_operation_count_names_the_operations_that_differ():
    def looped(q, *rest, **rules):
        for t in range(q.shape[1] // 64):
            q[:, t].cosh()
        return nsa_attention(q, *rest, **rules)

    found = cost.operation_count(CPU, make_model=lambda config: faults.with_attention(DecoderLM(config), looped))
    assert not found.passed
    assert "aten.cosh.default: 2, 8, 16" in found.details


def test_operation_count_finds_a_loop_inside_the_choice_of_blocks(monkeypatch):
    """`select_blocks` is one operator to the dispatcher; the check looks into it."""
    healthy = cost.reference.select_blocks

    def looped(q, k_cmp, lse, *rest):
        for t in range(q.shape[1]):
            q[:, t].sum()
        return healthy(q, k_cmp, lse, *rest)

    monkeypatch.setattr(cost.reference, "select_blocks", looped)
    assert not cost.operation_count(CPU).passed
