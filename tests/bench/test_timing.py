"""Timing on a CPU; on a GPU the same functions are exercised by tests/gpu and by every benchmark."""

import time

import pytest
import torch

from trifocal.bench.timing import Timing, extra_peak_bytes, time_call

CPU = torch.device("cpu")


def test_summary_is_median_and_fifths():
    assert Timing.of([5.0]) == (5.0, 5.0, 5.0, 1)
    timing = Timing.of([float(x) for x in (9, 1, 2, 3, 4, 5, 6, 7, 8, 10, 0)])
    assert timing == (5.0, 2.0, 8.0, 11)


def test_a_call_of_known_length():
    calls = []

    def call():
        calls.append(None)
        time.sleep(0.004)

    timing = time_call(call, CPU, budget_seconds=0.04, minimum_calls=2, maximum_calls=8)
    assert 4.0 <= timing.p20_ms <= timing.median_ms <= timing.p80_ms
    assert 2 <= timing.calls <= 8 and len(calls) == timing.calls + 2, "two calls warm up"


@pytest.mark.parametrize("budget, calls", [(0.0, 3), (100.0, 6)])
def test_the_number_of_calls_is_bounded(budget, calls):
    assert time_call(lambda: None, CPU, budget_seconds=budget, minimum_calls=3, maximum_calls=6).calls == calls


def test_memory_is_not_known_on_a_cpu():
    assert extra_peak_bytes(lambda: torch.zeros(10), CPU) is None
