"""`trifocal bench attention` on a CPU with the reference: every row, its figures, refusals and limits."""

import json

import pytest

from trifocal.bench import attention_speed as attention
from trifocal.bench.attention_speed import AttentionBench, AttentionOptions
from trifocal.bench.first_call import measure
from trifocal.bench.recorder import Recorder, Refused
from trifocal.errors import UserError
from trifocal.ops import Geometry

GEOMETRY = Geometry(8, 4, 16, 3, 1, 1, 16)
TINY = {
    "tokens": (48, 80), "heads": ("4/2",), "head_dim": 16, "value_dim": 8, "geometry": GEOMETRY, "dtype": "fp32",
    "device": "cpu", "call_seconds": 1e-4, "first_call": False,
}  # fmt: skip


def bench(**changes):
    said = []
    options = AttentionOptions(**{**TINY, **changes})
    made = AttentionBench(options, Recorder(options.seconds, said.append, lambda: None))
    made.run()
    return made, said


@pytest.fixture(scope="module")
def everything():
    return bench(choices=("random", "smooth"))[0].recorder.rows


def test_rows_of_every_kind(everything):
    found = [(row["row"], row["choices"], row["status"].partition(":")[0]) for row in everything if row["tokens"] == 80]
    assert found == [
        ("dense cudnn", "", "not available"),
        ("dense flash", "", "ok"),
        ("compression", "", "ok"),
        ("end to end", "random", "ok"),
        ("whole", "random", "ok"),
        ("compressed", "", "ok"),
        ("scoring", "", "ok"),
        ("selected", "random", "ok"),
        ("window", "", "ok"),
        ("rest", "random", "ok"),
        ("whole", "smooth", "ok"),
        ("selected", "smooth", "ok"),
        ("rest", "smooth", "ok"),
        ("flex causal", "", "not available"),
        ("flex window", "", "not available"),
        ("fla parallel_nsa", "", "not available"),
    ]


def test_figures_fit_one_another(everything):
    json.dumps(everything)
    for row in everything:
        if row["status"] != "ok" or row["row"] == "rest":
            continue
        assert 0 < row["forward_p20_ms"] <= row["forward_ms"] <= row["forward_p80_ms"]
        assert row["forward_tflop_per_second"] == pytest.approx(row["forward_tflop"] / row["forward_ms"] * 1000)
        if row["row"] != "scoring":
            assert row["backward_ms"] == pytest.approx(row["forward_backward_ms"] - row["forward_ms"])
            assert row["forward_backward_tflop"] > row["forward_tflop"]
            assert row["forward_backward_gib"] > row["forward_gib"] > 0
        assert row["backend"] == (None if row["row"].startswith("dense") else "reference")
    at_80 = {(row["row"], row["choices"]): row for row in everything if row["tokens"] == 80}
    whole, rest = at_80["whole", "random"], at_80["rest", "random"]
    compression, everything = at_80["compression", ""], at_80["end to end", "random"]
    assert everything["forward_gib"] == pytest.approx(whole["forward_gib"] + compression["forward_gib"])
    parts = [at_80[key] for key in (("compressed", ""), ("scoring", ""), ("selected", "random"), ("window", ""))]
    assert rest["forward_ms"] + sum(part["forward_ms"] for part in parts) == pytest.approx(whole["forward_ms"])
    assert sum(part["forward_tflop"] for part in parts) == pytest.approx(whole["forward_tflop"])


@pytest.mark.parametrize(
    "direction, present, absent",
    [("forward", "forward_ms", "forward_backward_ms"), ("backward", "backward_ms", "forward_ms")],
)
def test_directions(direction, present, absent):
    made, _ = bench(direction=direction, tokens=(48,), rows=("whole", "flash"))
    assert [row["row"] for row in made.recorder.rows] == ["dense flash", "whole"]
    for row in made.recorder.rows:
        assert row[present] is not None and absent not in row


def test_wrong_results_are_not_timed(monkeypatch):
    def refuse(*args):
        raise Refused("the gradient of q is off")

    monkeypatch.setattr(attention, "check_parity", refuse)
    made, said = bench(rows=("whole", "parts", "flash", "end_to_end", "compression"))
    statuses = {row["row"]: row["status"] for row in made.recorder.rows}
    refused = dict.fromkeys(("whole", "end to end", "compression"), "refused: the gradient of q is off")
    assert statuses == {"dense flash": "ok", **refused}
    assert made.recorder.exit_status == 1 and any("refused" in line for line in said)


def test_a_gate_that_breaks_lets_nothing_through(monkeypatch):
    def broken(*args):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(attention, "check_parity", broken)
    made, _ = bench(rows=("whole", "parts"), choices=("local", "smooth"))
    assert {row["status"] for row in made.recorder.rows} == {
        "refused: the comparison with float64 failed: RuntimeError: no kernel"
    }


def test_one_failure_does_not_stop_the_rest(monkeypatch):
    def broken(*args, **rules):
        raise RuntimeError("launch failed")

    monkeypatch.setattr(attention, "window_attention", broken)
    made, _ = bench(tokens=(48,), rows=("whole", "parts"))
    statuses = {row["row"]: row["status"] for row in made.recorder.rows}
    assert statuses.pop("window") == "failed: RuntimeError: launch failed"
    assert set(statuses.values()) == {"ok"} and "rest" not in statuses


def test_past_the_limit_rows_are_listed():
    made, _ = bench(seconds=1e-6, rows=("whole", "flash"))
    assert len(made.recorder.rows) == 4
    assert all(row["status"].startswith("not run") for row in made.recorder.rows)


def test_first_call_in_this_process():
    shape = AttentionOptions(**TINY).all_shapes()[0]
    request = {
        "shape": vars(shape), "geometry": vars(GEOMETRY), "dtype": "float32", "device": "cpu", "backend": "reference",
    }  # fmt: skip
    answer = measure(request)
    assert 0 < answer["forward_seconds"] < answer["forward_backward_seconds"]


def test_named_shapes_are_the_default_and_bad_options_are_refused():
    assert [shape.name for shape in AttentionOptions().all_shapes()] == ["A", "B", "C", "D"]
    assert [shape.tokens for shape in AttentionOptions(shapes=("D",), tokens=(5,)).all_shapes()] == [2048, 5]
    for changes in ({"batch": 0}, {"seconds": 0.0}, {"value_dim": -1}, {"call_seconds": 0.0}):
        with pytest.raises(UserError, match=next(iter(changes)).replace("_", "-")):
            AttentionOptions(**changes)
