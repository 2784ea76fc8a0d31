"""Speed-ups and crossovers from rows with known times."""

import pytest

from lib.comparison import crossovers, speedups

SHAPE = {"batch": 1, "heads": 4, "groups": 2, "head_dim": 8, "value_dim": 8, "dtype": "bf16"}


def row(name, tokens, forward, both, choices="", status="ok"):
    times = {"forward_ms": forward, "forward_backward_ms": both, "backward_ms": both - forward}
    return {**SHAPE, "shape": "x", "tokens": tokens, "row": name, "choices": choices, "status": status, **times}


def test_speedups_divide_the_dense_time_of_the_same_shape():
    rows = [
        row("dense cudnn", 64, 3.0, 10.0),
        row("dense flash", 64, 4.0, 12.0, status="failed: x"),
        row("whole", 64, 1.5, 4.0, "random"),
        row("window", 64, 0.1, 0.2),
        row("dense cudnn", 128, 30.0, 100.0),
    ]
    (found,) = speedups(rows)
    assert found["over"] == "dense cudnn" and found["choices"] == "random"
    assert (found["forward_ratio"], found["forward_backward_ratio"]) == (2.0, 2.5)
    assert found["backward_ratio"] == pytest.approx(7.0 / 2.5)


def test_crossover_lies_where_the_lines_cross():
    # Dense grows with the square, sparse linearly: they meet at 4,000 tokens.
    lengths = (1000, 2000, 3000, 8000, 16000)
    rows = [row("dense cudnn", t, t**2 / 1e6, t**2 / 1e5) for t in lengths]
    rows += [row("whole", t, t * 4000 / 1e6, t * 1e-5, "random") for t in lengths]
    for of_length in rows:
        of_length["forward_device_ms"] = of_length["forward_ms"] / (2.0 if of_length["row"] == "whole" else 1.0)
    # Another row, faster from the shortest length on.
    rows += [row("one branch", t, t * 500 / 1e6, t * 5e-6, "real") for t in lengths]
    forward, device, both, *branch = crossovers(rows)
    assert [found["row"] for found in branch] == ["one branch"] * 2 and forward["row"] == "whole"
    assert {found["first_faster_tokens"] for found in branch} == {1000}
    assert forward["measure"] == "forward" and forward["first_faster_tokens"] == 8000
    assert forward["crossover_tokens"] == pytest.approx(4000)
    assert forward["ratio_at_longest"] == pytest.approx(4.0)
    assert device["measure"] == "forward_device" and device["crossover_tokens"] == pytest.approx(2000)
    # Faster from the shortest on: where the lines cross was not measured.
    assert both["first_faster_tokens"] == 1000 and both["crossover_tokens"] is None


def test_a_later_slower_length_counts():
    rows = [row("dense flash", t, 1.0, 1.0) for t in (1, 2, 4)]
    rows += [row("whole", t, ms, ms, "local") for t, ms in ((1, 0.5), (2, 2.0), (4, 0.5))]
    assert crossovers(rows)[0]["first_faster_tokens"] == 4
    rows[-1]["forward_ms"] = 1.5
    found = crossovers(rows)[0]
    assert found["first_faster_tokens"] is None and found["crossover_tokens"] is None
