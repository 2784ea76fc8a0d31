"""`benchmarks/training.py` on a CPU: the trainer's own steps, in this process and in workers."""

import io
import json
from dataclasses import asdict, replace

import pytest
import torch

from lib import training_worker as train_worker
from lib.recorder import Recorder, Refused
from lib.training_worker import TrainBench
from tests.benchmarks.tiny import MODEL
from tests.children import load_script
from tests.train.step.test_cuda_graphs import Repeater
from trifocal.errors import UserError
from trifocal.train.step import cuda_graphs

train = load_script("benchmarks/training.py")
TrainOptions, bench_train, speedups = train.TrainOptions, train.bench_train, train.speedups

TINY = {
    "sizes": ("2x32",), "model": MODEL, "compile": False, "precision": "fp32", "warmup_steps": 1, "timed_steps": 3,
    "device": "cpu", "data": ("random",),
}  # fmt: skip


def recorder(seconds=60.0):
    return Recorder(seconds, lambda text: None, lambda: None)


def test_models_are_measured_under_the_same_settings():
    cases = TrainOptions(**{**TINY, "sizes": ("2x32", "production")}).cases()
    assert [(case.size, case.model["attention"]) for case in cases] == [
        ("2x32", "nsa"), ("2x32", "dense"), ("production", "nsa"), ("production", "dense"),
    ]  # fmt: skip
    assert (cases[0].sequences, cases[0].tokens, cases[0].checkpointing) == (2, 32, "none")
    assert (cases[2].sequences, cases[2].micro_batch, cases[2].tokens, cases[2].checkpointing) == (4, 2, 2048, "all")
    assert {**cases[0].model, "attention": "dense"} == cases[1].model
    assert not any(case.cuda_graphs for case in cases), "a CPU records nothing"


ON_A_GPU = {
    (): ["a recorded", "production recorded", "a"],
    ("no", "yes"): ["a recorded", "production recorded", "a"],
    ("yes",): ["a recorded", "production recorded"],
    ("no",): ["a", "production"],
}


@pytest.mark.parametrize("wanted", ON_A_GPU, ids=str)
def test_recorded_rows_come_first_and_models_side_by_side(wanted, monkeypatch):
    monkeypatch.setattr(TrainOptions, "torch_device", torch.device("cuda"))
    cases = TrainOptions(**{**TINY, "sizes": ("2x32", "production"), "cuda_graphs": wanted}).cases()
    found = [case.size.replace("2x32", "a") + " recorded" * case.cuda_graphs for case in cases]
    assert found == [name for name in ON_A_GPU[wanted] for _ in range(2)]
    assert [case.model["attention"] for case in cases] == ["nsa", "dense"] * (len(cases) // 2)
    for sparse, dense in zip(cases[::2], cases[1::2], strict=True):
        assert replace(sparse, model=dense.model) == dense


def test_text_is_measured_beside_random_bytes():
    """By default, for both models: documents of many lengths; a new one begins in every sequence."""
    options = {name: value for name, value in TINY.items() if name != "data"} | {"sizes": ("4x3000",)}
    cases = TrainOptions(**options).cases()
    assert [(case.data, case.model["attention"]) for case in cases] == [
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


def test_lengths_of_documents():
    """A median of 1,000 tokens and the long tail of texts, where no sequence cuts them."""
    lengths = train_worker.document_boundaries(1, 10_000_000).diff().double()
    assert lengths.median().item() == pytest.approx(1000, rel=0.03)
    assert lengths.mean().item() == pytest.approx(1650, rel=0.05)
    assert (lengths > 2700).double().mean().item() == pytest.approx(1 / 6, abs=0.02)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_row_of_text(attention):
    case = TrainOptions(**{**TINY, "attention": (attention,), "data": ("text",), "sizes": ("2x300",)}).cases()[0]
    bench = TrainBench(case)
    bench.warm_up()
    figures = bench.figures()
    assert figures["tokens_per_second"] > 0
    assert figures["executed_tflop_per_step"] is figures["dense_equivalent_mfu"] is None, "for whole sequences alone"


def test_graphs_and_kernels_need_a_gpu():
    with pytest.raises(UserError, match="--profiled-steps needs a GPU"):
        bench_train(TrainOptions(**TINY, profiled_steps=1), recorder())
    for wanted in (("yes",), ("no", "yes")):
        with pytest.raises(UserError, match="--cuda-graphs yes needs a GPU"):
            TrainOptions(**TINY, cuda_graphs=wanted).cases()


@pytest.fixture
def recorded_bench(monkeypatch):
    """Makes a bench whose recordings are repetitions; everything around them is the trainer's."""
    monkeypatch.setattr(cuda_graphs, "GraphRecorder", Repeater)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(Repeater, "recordings", 0)
    monkeypatch.setattr(Repeater, "passes", 0)

    def make(case):
        bench = TrainBench(case)
        recorded = cuda_graphs.MicroBatchGraphs(bench.model, bench.model.parameters(), bench.device, case.precision)
        bench.graphs = bench.train_step.graphs = recorded
        return bench

    return make


@pytest.mark.parametrize("attention", [0, 1], ids=["nsa", "dense"])
def test_one_micro_batch_a_step_is_recorded_before_it_is_timed(recorded_bench, attention):
    case = TrainOptions(**TINY).cases()[attention]
    plain, recorded = TrainBench(case), recorded_bench(case)
    parameters = recorded.optimizer.param_groups[0]["params"]
    plain.warm_up()
    recorded.warm_up()
    assert (Repeater.passes, Repeater.recordings) == (1, 0), "the one warm-up step is computed without a graph"
    places = [parameter.grad.data_ptr() for parameter in parameters]
    expected, figures = plain.figures(), recorded.figures()
    assert Repeater.recordings == 1
    assert Repeater.passes == case.warmup_steps + 1 + case.timed_steps
    assert [parameter.grad.data_ptr() for parameter in parameters] == places, "graphs add to what stays"
    for key in ("first_loss", "first_gradient_norm", "loss"):
        assert figures[key] == pytest.approx(expected[key], rel=1e-5)


def test_a_timed_step_that_records_is_no_figure(recorded_bench):
    bench = recorded_bench(TrainOptions(**TINY).cases()[0])
    with pytest.raises(AssertionError, match="a timed step recorded"):
        bench.figures()


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


def test_kernels_and_gaps_are_tables_beside_the_rows(monkeypatch):
    kernel, gap = {"kernel": "gemm", "ms": 0.5}, {"after": "gemm", "before": "norm", "ms": 0.1}
    figures = {"tokens_per_second": 1.0, "peak_gib": None, "first_step_seconds": 1.0}

    class Profiled:
        def __init__(self, case, *_):
            self.case, self.name = case, "profiled"
            self.answers = iter([{"status": "ok"}, {"status": "ok", **figures, "kernels": [kernel], "gaps": [gap]}])

        def answer(self):
            return next(self.answers)

        def go(self):
            pass

        close = go

    monkeypatch.setattr(train, "Worker", Profiled)
    found = recorder()
    train._measure_together(TrainOptions(**TINY, attention=("dense",)).cases(), 1, found)
    assert "kernels" not in found.rows[0] and "gaps" not in found.rows[0]
    assert found.tables == {"kernels": [{"row": "profiled", **kernel}], "gaps": [{"row": "profiled", **gap}]}


def test_workers_measure_both_models():
    rows = recorder()
    bench_train(TrainOptions(**TINY, workers=2), rows)
    assert [(row["attention"], row["status"]) for row in rows.rows] == [("nsa", "ok"), ("dense", "ok")]
    (ratios,) = speedups(rows.rows)
    expected = rows.rows[0]["tokens_per_second"] / rows.rows[1]["tokens_per_second"]
    assert ratios["tokens_per_second_ratio"] == pytest.approx(expected)


def test_a_row_whose_time_runs_out_while_it_waits_for_its_turn():
    worker = train.Worker(TrainOptions(**TINY).cases()[0], 1, 60.0)
    assert worker.answer() == {"status": "ok"}
    worker._stop()
    worker._process.wait()
    worker.go()
    assert worker.answer() == {"status": "not run: the time limit has passed"}
    worker.close()


def test_like_is_compared_with_like():
    keys = ("size", "attention", "cuda_graphs", "data", "tokens_per_second", "peak_gib", "status")
    figures = [
        ("nsa", True, "random", 90.0, 6.0),
        ("dense", True, "random", 60.0, 2.0),
        ("nsa", False, "random", 30.0, 1.0),
        ("dense", False, "random", 60.0, 4.0),
        ("nsa", False, "text", 30.0, 1.0),
        ("dense", False, "text", 90.0, 1.0),
    ]
    rows = [dict(zip(keys, ("2x32", *row, "ok"), strict=True)) for row in figures]
    columns = ("size", "cuda_graphs", "data", "tokens_per_second_ratio", "peak_gib_ratio")
    both = speedups(rows)
    assert [tuple(row) for row in both] == [columns] * 3
    assert [tuple(row.values()) for row in both] == [
        ("2x32", True, "random", 1.5, 3.0), ("2x32", False, "random", 0.5, 0.25),
        ("2x32", False, "text", pytest.approx(1 / 3), 1.0),
    ]  # fmt: skip
    rows[1]["status"] = "not run: the time limit has passed"
    assert speedups(rows) == both[1:], "another setting does not compare"


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

    monkeypatch.setattr(train, "check_model_parity", refuse)
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
