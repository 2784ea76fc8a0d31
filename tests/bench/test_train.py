"""`trifocal bench train` on a CPU: the trainer's own steps, in this process and in workers."""

import io
import json
from dataclasses import asdict

import pytest

from tests.bench.tiny import MODEL
from trifocal.bench import train, train_worker
from trifocal.bench.recorder import Recorder, Refused
from trifocal.bench.train import TrainOptions, bench_train, speedups
from trifocal.bench.train_worker import TrainBench
from trifocal.errors import UserError

TINY = {
    "sizes": ("2x32",), "model": MODEL, "compile": False, "precision": "fp32", "warmup_steps": 1, "timed_steps": 3,
    "device": "cpu",
}  # fmt: skip


def recorder(seconds=60.0):
    return Recorder(seconds, lambda text: None, lambda: None)


def test_cases_are_twins_under_the_same_settings():
    cases = TrainOptions(**{**TINY, "sizes": ("2x32", "production")}).cases()
    assert [(case.size, case.model["attention"]) for case in cases] == [
        ("2x32", "nsa"), ("2x32", "dense"), ("production", "nsa"), ("production", "dense"),
    ]  # fmt: skip
    assert (cases[0].sequences, cases[0].tokens, cases[0].checkpointing) == (2, 32, "none")
    assert (cases[2].sequences, cases[2].micro_batch, cases[2].tokens, cases[2].checkpointing) == (4, 2, 2048, "all")
    assert {**cases[0].model, "attention": "dense"} == cases[1].model


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


def test_micro_batches_make_up_the_step():
    case = TrainOptions(**TINY).cases()[0]
    bench = TrainBench(type(case)(**{**vars(case), "sequences": 4, "micro_batch": 2}))
    assert [batch.tokens.shape for batch in bench.batches] == [(2, 32), (2, 32)]
    assert bench.batches[0].tokens[:, 1:].equal(bench.batches[0].targets[:, :-1])


def test_borders_make_packed_documents():
    case = TrainOptions(**TINY).cases()[0]
    bench = TrainBench(type(case)(**{**vars(case), "borders": 2}))
    assert bench.batches[0].cu_seqlens.tolist() == [0, 10, 21, 32, 42, 53, 64]
    bench.warm_up()
    assert bench.figures()["loss"] > 0


def test_workers_measure_both_twins():
    rows = recorder()
    bench_train(TrainOptions(**TINY, workers=2), rows)
    assert [(row["attention"], row["status"]) for row in rows.rows] == [("nsa", "ok"), ("dense", "ok")]
    (ratios,) = speedups(rows.rows)
    expected = rows.rows[0]["tokens_per_second"] / rows.rows[1]["tokens_per_second"]
    assert ratios["tokens_per_second_ratio"] == pytest.approx(expected)


def test_a_worker_that_fails_says_why(capsys):
    case = asdict(TrainOptions(**TINY).cases()[0])
    train_worker.main(json.dumps({**case, "device": "nowhere"}))
    assert json.loads(capsys.readouterr().out)["status"].startswith("failed: RuntimeError")


def test_a_worker_waits_for_its_turn(capsys, monkeypatch):
    request = json.dumps(asdict(TrainOptions(**TINY).cases()[0]))
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    train_worker.main(request)
    ready, figures = map(json.loads, capsys.readouterr().out.splitlines())
    assert ready == {"status": "ok"} and figures["tokens_per_second"] > 0
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    train_worker.main(request)
    assert len(capsys.readouterr().out.splitlines()) == 1, "nobody is left to answer"


def test_the_limit_ends_a_worker():
    rows = recorder(0.3)
    bench_train(TrainOptions(**{**TINY, "attention": ("dense",)}), rows)
    assert rows.rows[0]["status"] == "not run: the time limit has passed"


def test_wrong_results_are_not_timed(monkeypatch):
    def refuse(*args):
        raise Refused("o is off")

    monkeypatch.setattr(train, "check_parity", refuse)
    monkeypatch.setattr(train, "_measure_together", lambda cases, workers, recorder: ran.extend(cases))
    ran, rows = [], recorder()
    bench_train(TrainOptions(**TINY), rows)
    assert [row["status"] for row in rows.rows] == ["refused: o is off"]
    assert [case.model["attention"] for case in ran] == ["dense"]


@pytest.mark.parametrize("sizes", ["x32", "2x", "32", "0x4", "2x32x4", "productive"])
def test_bad_sizes_are_refused(sizes):
    with pytest.raises(UserError, match="sequences x tokens"):
        TrainOptions(**{**TINY, "sizes": (sizes,)}).cases()


def test_bad_options_are_refused():
    for changes in ({"workers": 0}, {"timed_steps": 0}, {"seconds": 0.0}):
        with pytest.raises(UserError, match=next(iter(changes)).replace("_", "-")):
            TrainOptions(**changes)
