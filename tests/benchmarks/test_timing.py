"""Timing on a CPU; on a GPU the same functions are exercised by tests/gpu and by every benchmark."""

import time

import torch

from lib.timing import Timing, device_ms, time_call

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


def test_the_device_is_held_up_for_twice_the_hosts_time(monkeypatch):
    """On a stand-in for a GPU with given answers."""
    told = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            told.append("event")

        def elapsed_time(self, end):
            return 7.0

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: told.append(cycles))
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.zeros(1))

    def call():
        time.sleep(0.01)
        told.append("call")

    assert device_ms(call, torch.device("cuda"), budget_seconds=0.0) == 7.0
    assert told[0] == "call" and told[1] >= 0.02 * 1e9 and told[2:5] == ["event", "call", "event"]
    assert len(told) == 1 + 3 * 4
