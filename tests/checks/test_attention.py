"""The checks of the attention: healthy ones pass, each fault fails."""

import dataclasses

import pytest
import torch
from tests.checks import faults

from trifocal.checks import Measurement, Skipped, positions
from trifocal.checks import attention_checks as attention
from trifocal.nn import rotate
from trifocal.ops import nsa_attention

CPU = torch.device("cpu")
FULL_COVERAGE = (attention.full_coverage_float32, attention.full_coverage_float64)
ORACLES = (attention.float64_oracle, attention.float32_oracle)


@pytest.mark.parametrize("check", [*FULL_COVERAGE, *ORACLES, positions.rope_distance])
def test_healthy(check):
    found = check(CPU)
    assert found.passed, found
    assert 0 < found.figure < found.bound


@pytest.mark.parametrize("check", FULL_COVERAGE)
@pytest.mark.parametrize(
    "fault",
    [
        faults.replacing_window(faults.leaking_window),
        faults.replacing_window(lambda q, k, v, w: faults.narrow_window(q, k, v, q.shape[1])),
        faults.halved_value_gradient,
    ],
    ids=["leaking window", "window one short of everything", "gradient of v halved"],
)
def test_full_coverage_finds(check, fault):
    assert not check(CPU, attention=fault).passed


@pytest.mark.parametrize("check", ORACLES)
@pytest.mark.parametrize(
    "fault",
    [
        faults.ignoring_documents,
        faults.halved_value_gradient,
        lambda *x, **rules: nsa_attention(*x, **rules) * (1 + 1e-5),
        lambda *x, **rules: nsa_attention(*x, **rules).detach() + 0 * x[0].sum() + sum(0 * y.sum() for y in x[1:8]),
    ],
    ids=["documents ignored", "gradient of v halved", "off by 1e-5", "no gradient"],
)
def test_oracle_finds(check, fault):
    found = check(CPU, attention=fault)
    assert not found.passed
    assert "gradient" in " ".join(found.details) or " in o" in " ".join(found.details)


@pytest.mark.parametrize("check", ORACLES)
def test_oracle_finds_a_window_off_by_one(check):
    def narrow(*inputs, **rules):
        *tensors, geometry = inputs
        return nsa_attention(*tensors, dataclasses.replace(geometry, window_size=geometry.window_size - 1), **rules)

    assert not check(CPU, attention=narrow).passed


def test_oracle_finds_a_wrong_choice():
    """The choice is the attention's own in float64; in float32 the oracle's is given, by design."""
    assert not attention.float64_oracle(CPU, attention=faults.unscaled_importance).passed


def test_backend_parity_is_skipped_with_the_reason_where_no_kernel_runs():
    found = attention.backend_parity(CPU)
    assert isinstance(found, Skipped)
    assert "triton" in found.reason


def stand_in(change):
    """Kernels that are the reference, changed: `change(o, inputs)`."""

    def both(*inputs, backend, **rules):
        o = nsa_attention(*inputs, backend="reference", **rules)
        return change(o, inputs) if backend == "triton" else o

    return both


def test_backend_parity_passes_equal_kernels():
    found = attention.backend_parity(CPU, attention=stand_in(lambda o, _: o))
    assert isinstance(found, Measurement)
    assert found.passed, found


@pytest.mark.parametrize(
    "change",
    [
        lambda o, _: o * 1.05,
        lambda o, x: o + (x[4].sum() - x[4].sum().detach()) * 0.1,
        lambda o, _: torch.where(torch.arange(o.shape[1])[:, None, None] == 7, torch.nan, o),
    ],
    ids=["values", "one gradient", "one NaN"],
)
def test_backend_parity_finds(change):
    assert not attention.backend_parity(CPU, attention=stand_in(change)).passed


def test_rope_distance_finds_heads_rotated_as_one_vector():
    def rotate_concatenated(x, cos, sin):
        """One long vector of all heads: every head takes frequencies of its own from a common table."""
        pairs = x.shape[2] * x.shape[3] // 2
        frequencies = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        # The positions, from the angle of the first pair, which turns by one radian a token, and from the second.
        angles = torch.atan2(sin, cos)[:, :1] * frequencies
        flat = x.flatten(2).unflatten(2, (1, -1))
        return rotate(flat, angles.cos(), angles.sin()).view_as(x)

    assert not positions.rope_distance(CPU, rotate=rotate_concatenated).passed


def test_rope_distance_finds_keys_that_are_not_rotated():
    assert not positions.rope_distance(CPU, rotate=lambda x, c, s: x if x.shape[2] == 2 else rotate(x, c, s)).passed
