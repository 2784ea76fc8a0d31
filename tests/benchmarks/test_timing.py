"""Timing on a CPU; on a GPU the same functions are exercised by every benchmark."""

import time

import torch

from lib.timing import Timing, time_call

CPU = torch.device("cpu")


def test_summary_is_median_and_fifths():
    assert Timing.of([5.0]) == (5.0, 5.0, 5.0, 1, 0.0)
    timing = Timing.of([float(x) for x in (9, 1, 2, 3, 4, 5, 6, 7, 8, 10, 0)])
    assert timing == (5.0, 2.0, 8.0, 11, 0.0)


def test_a_call_of_known_length():
    calls = []

    def call():
        calls.append(None)
        time.sleep(0.004)

    timing = time_call(call, CPU, budget_seconds=0.04, minimum_calls=2, maximum_calls=8)
    assert 4.0 <= timing.p20_ms <= timing.median_ms <= timing.p80_ms
    assert 2 <= timing.calls <= 8 and len(calls) == timing.calls + 2, "two calls warm up"
