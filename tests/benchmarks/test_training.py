"""`benchmarks/training.py` on a CPU: the trainer's own steps, in this process and in workers."""

from dataclasses import replace

import pytest

from lib.recorder import Recorder, Refused
from lib.training_worker import TrainBench
from tests.benchmarks.tiny import MODEL
from tests.children import load_script

train = load_script("benchmarks/training.py")
TrainOptions, bench_train, speedups = train.TrainOptions, train.bench_train, train.speedups

TINY = {
    "sizes": ("2x32",), "model": MODEL, "compile": False, "precision": "fp32", "warmup_steps": 1, "timed_steps": 3,
    "device": "cpu", "data": ("random",),
}  # fmt: skip


def recorder(seconds=200.0):
    return Recorder(seconds, lambda text: None, lambda: None)


def test_models_are_measured_under_the_same_settings():
    cases = TrainOptions(**{**TINY, "sizes": ("2x32", "production")}).cases()
    assert [(case.size, case.attention) for case in cases] == [
        ("2x32", "nsa"), ("2x32", "dense"), ("production", "nsa"), ("production", "dense"),
    ]  # fmt: skip
    assert (cases[0].sequences, cases[0].tokens, cases[0].checkpointing) == (2, 32, "none")
    assert (cases[2].sequences, cases[2].micro_batch, cases[2].tokens, cases[2].checkpointing) == (4, 4, 2048, "none")
    assert {**cases[0].model, "attention": "dense"} == cases[1].model
    assert not any(case.cuda_graphs for case in cases), "a CPU records nothing"


def test_text_is_measured_beside_random_bytes():
    """By default, for both models: documents of many lengths; a new one begins in every sequence."""
    options = {name: value for name, value in TINY.items() if name != "data"} | {"sizes": ("4x3000",)}
    cases = TrainOptions(**options).cases()
    assert [(case.data, case.attention) for case in cases] == [
        ("random", "nsa"), ("random", "dense"), ("text", "nsa"), ("text", "dense"),
    ]  # fmt: skip
    assert cases[2].labels()["data"] == "text"
    bench = TrainBench(replace(cases[3], micro_batch=2))
    boundaries = [batch.cu_seqlens for batch in bench.batches]
    assert len(boundaries) == 2
    for cu_seqlens in boundaries:
        assert cu_seqlens[0] == 0 and cu_seqlens[-1] == 6000 and 3000 in cu_seqlens
        assert (cu_seqlens.diff() > 0).all() and cu_seqlens.numel() > 4
    assert TrainBench(cases[1]).batches[0].cu_seqlens is None


def test_steps_train_and_are_timed():
    case = TrainOptions(**TINY).cases()[0]
    bench = TrainBench(case)
    before = [parameter.detach().clone() for parameter in bench.optimizer.param_groups[0]["params"]]
    bench.warm_up()
    figures = bench.figures()
    assert figures["timed_steps"] == 3
    assert figures["tokens_per_second"] == pytest.approx(2 * 32 / figures["step_ms"] * 1000)
    assert figures["step_p20_ms"] <= figures["step_ms"] <= figures["step_p80_ms"]
    assert figures["executed_tflop_per_step"] > 0 and figures["first_step_seconds"] > 0
    assert figures["executed_mfu"] is None, "no peak of a CPU is known"
    after = bench.optimizer.param_groups[0]["params"]
    assert any(not b.equal(a) for b, a in zip(before, after, strict=True))


def test_workers_measure_both_models():
    rows = recorder()
    bench_train(TrainOptions(**TINY, workers=2), rows)
    assert [(row["attention"], row["status"]) for row in rows.rows] == [("nsa", "ok"), ("dense", "ok")]
    (ratios,) = speedups(rows.rows)
    expected = rows.rows[0]["tokens_per_second"] / rows.rows[1]["tokens_per_second"]
    assert ratios["tokens_per_second_over_dense"] == pytest.approx(expected)


def test_like_is_compared_with_like():
    keys = ("size", "attention", "cuda_graphs", "data", "tokens_per_second", "peak_gib", "status")
    figures = [
        ("mix", True, "random", 90.0, 6.0),
        ("mix-dense", True, "random", 30.0, 3.0),
        ("dense", True, "random", 60.0, 2.0),
        ("nsa", False, "text", 30.0, 1.0),
        ("dense", False, "text", 90.0, None),
    ]
    rows = [dict(zip(keys, ("2x32", *row, "ok"), strict=True)) for row in figures]
    expected = [
        {"attention": "mix", "tokens_per_second_over_dense": 1.5, "peak_gib_over_dense": 3.0,
         "tokens_per_second_over_mix-dense": 3.0, "peak_gib_over_mix-dense": 2.0},
        {"attention": "mix-dense", "tokens_per_second_over_dense": 0.5, "peak_gib_over_dense": 1.5},
        {"attention": "nsa", "tokens_per_second_over_dense": pytest.approx(1 / 3)},
    ]  # fmt: skip
    settings = [(True, "random"), (True, "random"), (False, "text")]
    expected = [
        {"size": "2x32", "cuda_graphs": graphs, "data": data} | row
        for (graphs, data), row in zip(settings, expected, strict=True)
    ]
    assert speedups(rows) == expected
    rows[-1]["status"] = "not run: the time limit has passed"
    assert speedups(rows) == expected[:2], "another setting does not compare"


def test_wrong_results_are_not_timed(monkeypatch):
    def refuse(*args):
        raise Refused("o is off")

    monkeypatch.setattr(train, "check_model_parity", refuse)
    monkeypatch.setattr(train, "_measure_together", lambda cases, workers, recorder: ran.extend(cases))
    ran, rows = [], recorder()
    bench_train(TrainOptions(**TINY), rows)
    assert [row["status"] for row in rows.rows] == ["refused: o is off"]
    assert [case.attention for case in ran] == ["dense"]
