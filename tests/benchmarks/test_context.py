"""`benchmarks/context.py`: a layer in two processes, and the comparison of rows."""

import argparse

import pytest

from tests import warm
from tests.children import load_script

context = load_script("benchmarks/context.py")


def test_a_layer_is_compared_and_timed(monkeypatch):
    warm.take_the_place_of_subprocess(monkeypatch, "trifocal.testing.processes")
    options = argparse.Namespace(device="cpu", tiny=True, tokens=0, calls=0, limit=60.0)
    row = context.layer_row(2, options)
    assert row["status"] == "ok" and min(row["ms"], row["forward_ms"], row["without_exchange_ms"]) > 0, row
    assert row["peak_gib"] is None


def test_rows_are_multiples_of_the_fewest_gpus():
    one = {"part": "layer", "gpus": 1, "tokens": 8, "status": "ok", "ms": 100.0, "peak_gib": 10.0}
    two = {**one, "gpus": 2, "ms": 50.0, "peak_gib": 6.0, "without_exchange_ms": 48.0}
    failed = {"part": "model", "gpus": 2, "tokens": 8, "status": "failed after 0 of 8 steps"}
    # Of a longer row one GPU holds nothing.
    longer = [{**two, "tokens": 16, "ms": 150.0}, {**two, "tokens": 16, "gpus": 8, "ms": 50.0}]
    found = context.compared([two, one, {**failed, "gpus": 1}, failed, *longer])
    assert found[1] == one and found[3] == failed
    assert (found[0]["base_gpus"], found[0]["times_base"], found[0]["memory_of_base"]) == (1, 2.0, 0.6)
    assert found[0]["exposed_share"] == pytest.approx(0.04)
    assert "base_gpus" not in found[4]
    assert (found[5]["base_gpus"], found[5]["times_base"], found[5]["efficiency"]) == (2, 3.0, 0.75)


def test_losses_are_judged_by_the_errors_of_one_gpu():
    exact = {"part": "losses", "tokens": 8, "status": "ok", "gpus": 1, "precision": "fp32", "losses": [5.0, 4.0]}
    one = {**exact, "precision": "bf16", "losses": [5.0, 4.01]}
    for value, ok in ((4.019, True), (3.981, True), (4.03, False)):
        four = {**one, "gpus": 4, "losses": [5.0, value]}
        found = context.compared([exact, one, four])
        assert found[0] == exact and found[1]["largest_difference"] == pytest.approx(0.01)
        assert found[2]["largest_difference"] == pytest.approx(abs(value - 4.0))
        assert (found[2]["status"] == "ok") == ok
    failed = {**one, "status": "failed after 3 of 10 steps", "losses": [5.0]}
    assert context.compared([exact, failed, four]) == [
        exact,
        failed,
        four | {"largest_difference": pytest.approx(0.03)},
    ]
    assert context.compared([one, four]) == [one, four]
