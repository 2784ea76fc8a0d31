"""The files of a run, and its behaviour when something goes wrong."""

import functools
import itertools
import json
import math
import os
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.train.tiny import WORDS, before_step, make_config
from tests.written_runs import Clock, wait_for
from trifocal.cli.train import _summary
from trifocal.data import prefetch
from trifocal.data.sources.text import TextSource
from trifocal.data.tokenizers import ByteTokenizer
from trifocal.errors import UserError
from trifocal.inference import Engine
from trifocal.models import flops_per_token
from trifocal.runlog import read_metrics
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.telemetry.attention_picture import read_picture
from trifocal.train import load_config, resume, run_logger, train
from trifocal.train import setup as train_setup
from trifocal.train.step.step import TrainStep
from trifocal.train.validation_loss import Evaluation, read_validation_batches


def test_a_deterministic_run_is_so_while_it_lasts(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []

    def look(step, arguments):
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))

    before_step(monkeypatch, look)
    train(make_config(tmp_path, "--train.steps", "1"))
    train(make_config(tmp_path, "--train.steps", "1", "--run.deterministic", "true"), overwrite=True)
    assert seen == [(False, None), (True, ":4096:8")]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_a_run_writes_what_it_promises(tmp_path, capsys, monkeypatch):
    config = make_config(
        tmp_path, "--log.sample_tokens", "8", "--train.steps", "40",
        "--log.interval_steps", "10", "--evaluate.interval_steps", "20", "--checkpoint.interval_steps", "10",
        "--checkpoint.keep_every_steps", "20", "--checkpoint.keep_last", "1", "--log.sample_interval_steps", "20",
    )  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    calls = iter(["", "", "computes with fewer threads", *[""] * 37])
    result = train(config, before_step=lambda: next(calls))
    run = tmp_path / "run"
    assert (result.finished, result.step, result.directory) == (True, 40, run)
    assert list(calls) == []
    [event] = [row for row in read_metrics(run / "metrics.jsonl", "event") if row["name"] == "threads"]
    assert (event["step"], event["message"]) == (2, "computes with fewer threads")
    assert load_config(run / "config.toml") == config
    assert json.loads((run / "env.json").read_text())["packages"]["numpy"] == np.__version__

    rows = read_metrics(run / "metrics.jsonl", "train")
    assert [row["step"] for row in rows] == [1, 10, 20, 30, 40]
    assert rows[-1]["loss"] < rows[0]["loss"] - 1.5, "forty steps on words must teach something"
    # Untrained, it knows nothing, with any initial weights.
    assert math.log(257) - 0.1 < rows[0]["loss"] < math.log(257) + 1
    assert rows[-1]["tokens_seen"] == 40 * 4 * 32
    assert rows[-1]["learning_rate"] == pytest.approx(1e-3)
    assert rows[-1]["epoch"] > 0
    for name in ("gradient_norm", "tokens_per_second", "step_seconds", "memory_allocated_bytes"):
        assert rows[-1][name] > 0
    assert 0 <= rows[-1]["data_wait_seconds_p50"] <= rows[-1]["data_wait_seconds_p95"]
    assert "executed_mfu" not in rows[-1], "no peak is known of a CPU"

    evaluations = read_metrics(run / "metrics.jsonl", "evaluation")
    assert [row["step"] for row in evaluations] == [20, 40]
    last = evaluations[-1]
    assert last["perplexity"] == pytest.approx(math.exp(last["validation_loss"]))
    assert result.evaluation.validation_loss == last["validation_loss"]

    assert [path.name for path in sorted((run / "samples").iterdir())] == ["step_00000020.txt", "step_00000040.txt"]
    assert result.sample.startswith("def ")
    assert (run / "samples" / "step_00000040.txt").read_text() == result.sample + "\n"
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step_00000020", "step_00000040"]

    heartbeat = [json.loads(line) for line in (run / "heartbeat" / "rank0.jsonl").read_text().splitlines()]
    assert (heartbeat[-1]["status"], heartbeat[-1]["step"]) == ("finished", 40)
    phases = {"data", "forward", "backward", "optimizer", "checkpoint", "evaluate", "telemetry", "sample"}
    assert phases <= heartbeat[-1]["total_seconds"].keys()
    printed = capsys.readouterr().out
    assert "step 40/40" in printed
    assert f"CPU, {json.loads((run / 'env.json').read_text())['cpu']['usable_cores']} cores" in printed


@pytest.mark.parametrize("only", ["all", "chooser"])
def test_utilisation_counts_the_documents_of_the_step_and_what_is_trained(tmp_path, monkeypatch, only):
    """Rows of 64 tokens have several documents, and nothing goes back through a frozen model."""
    monkeypatch.setattr(run_logger, "peak_bf16_flops", lambda name: 1e9)
    flags = ("--model.chooser", "index", "--train.sequence_length", "64", "--train.steps", "1", "--train.only", only)
    config = make_config(tmp_path, *flags)
    documents = []
    original = TrainStep.run

    def run(self, step, batches, **kwargs):
        for batch in batches:
            # The borders that the targets and the rows have.
            ends = [index + 1 for index, target in enumerate(batch.targets.flatten().tolist()) if target < 0]
            ends = sorted({*ends, *range(64, batch.tokens.numel() + 1, 64)})
            documents.extend(end - begin for begin, end in itertools.pairwise([0, *ends]))
        return original(self, step, batches, **kwargs)

    monkeypatch.setattr(TrainStep, "run", run)
    train(config)
    [row] = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")
    assert sum(documents) == 4 * 64 and len(documents) > 4
    kind = "training" if only == "all" else "forward"
    for figure in ("executed", "dense_equivalent"):
        needed = sum(n * getattr(flops_per_token(config.model, n), f"{figure}_{kind}") for n in documents) / 256
        assert row[f"{figure}_mfu"] == pytest.approx(row["tokens_per_second"] * needed / 1e9, rel=1e-6)


def test_the_saved_config_names_the_commit_that_the_loader_found(tmp_path, monkeypatch, capsys):
    """And the first lines name the attention of the layers."""
    commit, asked = "0123456789abcdef", []
    original = train_setup.Loader

    def pinning(data, **arguments):
        asked.append(data.revision)
        loader = original(data, **arguments)
        loader.config = replace(loader.config, revision=commit)
        return loader

    monkeypatch.setattr(train_setup, "Loader", pinning)
    config = make_config(tmp_path, "--train.steps", "1", "--model.layer_types", "dense", "window")
    train(config)
    assert " parameters, dense, window attention\n" in capsys.readouterr().out
    assert load_config(tmp_path / "run" / "config.toml").data == replace(config.data, revision=commit)
    resume(tmp_path / "run")
    assert asked == ["main", commit]


def test_a_full_disk_under_samples_and_pictures_costs_only_them(tmp_path, monkeypatch, capsys):
    def block(step, *_):
        for name in ("samples", "attention"):
            (tmp_path / "run" / name).touch()

    before_step(monkeypatch, block)
    settings = ("--evaluate.interval_steps", "1", "--log.sample_interval_steps", "1", "--log.sample_tokens", "4")
    assert train(make_config(tmp_path, *settings, "--train.steps", "1")).finished
    printed = capsys.readouterr().out
    events = [row for row in read_metrics(tmp_path / "run/metrics.jsonl", "event") if row["name"] == "write_failed"]
    for what in ("attention picture", "sample"):
        assert f"WARNING: the {what} of step 1 could not be written" in printed
        assert any(f"the {what} of" in row["message"] for row in events)


def test_a_first_step_that_fails_empties_a_folder_that_is_a_link(tmp_path, monkeypatch):
    (tmp_path / "volume").mkdir()
    (tmp_path / "run").symlink_to("volume")

    def too_much(step, _):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        before_step(patch, too_much)
        with pytest.raises(torch.OutOfMemoryError):
            train(make_config(tmp_path))
    assert not list(tmp_path.glob("volume/*"))
    assert train(make_config(tmp_path)).finished


def test_every_evaluation_stores_the_same_sequence_as_the_model_sees_it(tmp_path):
    flags = ("--train.steps", "2", "--evaluate.interval_steps", "1", "--train.sequence_length", "192")
    config = make_config(tmp_path, *flags)
    assert train(config).finished
    paths = sorted((tmp_path / "run" / "attention").iterdir())
    assert [path.name for path in paths] == ["step_00000001.npz", "step_00000002.npz"]
    first, last = (read_picture(path) for path in paths)
    assert (first.step, last.step) == (1, 2) and first.texts == last.texts
    # Another sequence has fewer documents, all of them shorter.
    batches = read_validation_batches(config, ByteTokenizer())
    assert first.positions.max() + 1 == max(length for batch in batches for length in batch.document_lengths)
    assert len(first.texts) == 192 and set("".join(first.texts)) <= {*"".join(WORDS), " ", "\n", ".", "∎"}
    # A new document begins after each separator.
    begins = [index for index in range(1, 192) if first.positions[index] == 0]
    assert begins == [index for index in range(1, 192) if first.texts[index - 1] == "∎"]
    assert train(make_config(tmp_path, *flags, "--log.telemetry_interval_steps", "0"), overwrite=True).finished
    assert not (tmp_path / "run" / "attention").exists()


def test_samples_share_a_seed_and_pauses_are_no_training(tmp_path, monkeypatch, capsys):
    seeds, original, clock, made = [], Engine.run, Clock(), []

    def heartbeat(*args, **kwargs):
        made.append(Heartbeat(*args, clock=clock, **kwargs))
        return made[0]

    def slow(self, requests):
        seeds.extend(request.sampling.seed for request in requests)
        clock.pass_seconds(20.0)
        return original(self, requests)

    def step_takes(step, parts):
        if step == 3:
            # The process is stopped for an hour; the heartbeat, which has begun, notices it as soon as it continues.
            wait_for(lambda: made[0]._last_beat is not None)
            clock.pass_seconds(3600.0)
            made[0].seconds_run()
        clock.pass_seconds(step)

    monkeypatch.setattr(Engine, "run", slow)
    monkeypatch.setattr("trifocal.train.run_logger.Heartbeat", heartbeat)
    before_step(monkeypatch, step_takes)
    flags = ("--train.steps", "5", "--log.sample_interval_steps", "2", "--log.sample_tokens", "2")
    train(make_config(tmp_path, *flags, "--log.interval_steps", "4", "--evaluate.interval_steps", "0"))
    assert seeds == [7, 7, 7]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")
    # The sample of step 2 is within the second row, whose steps took two, three and four seconds.
    assert [(row["step"], row["step_seconds"]) for row in rows] == [(1, 1.0), (4, 3.0), (5, 5.0)]
    # Three steps took 29 seconds, a sample included.
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 4/5")]
    assert line.endswith("ETA 0:10")


# PyTorch's tracer warns about its own calls.
@pytest.mark.filterwarnings("ignore")
def test_compiled_checkpointed_and_plain_runs_learn_the_same(tmp_path, monkeypatch):
    """torch.compile with the eager backend: the wiring is ours, the code generator is not. Any attention will do."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    losses = {}
    for name, flags in {
        "plain": (),
        "compiled": ("--train.compile", "true"),
        "checkpointed": ("--train.activation_checkpointing", "0:1"),
    }.items():
        small = ("--train.steps", "2", "--model.num_layers", "1", "--model.attention", "dense")
        train(make_config(tmp_path, *flags, *small, name=name))
        losses[name] = [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl", "train")]
    assert losses["checkpointed"] == losses["plain"]
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-5)
    heartbeat = (tmp_path / "compiled" / "heartbeat" / "rank0.jsonl").read_text().splitlines()[-1]
    assert "compile" in json.loads(heartbeat)["total_seconds"]
    events = {row["name"]: row["message"] for row in read_metrics(tmp_path / "compiled" / "metrics.jsonl", "event")}
    assert "compiles the model" in events["compiling"]
    assert "compiled in" in events["compiled"]


def test_a_source_that_gives_nothing_for_a_while_is_an_event(tmp_path, monkeypatch, capsys):
    original, reads = TextSource.read, itertools.count()

    def slow_read(self, shard, cursor):
        time.sleep(0.6 if next(reads) == 0 else 0.0)
        return original(self, shard, cursor)

    monkeypatch.setattr(TextSource, "read", slow_read)
    monkeypatch.setattr(prefetch, "STALL_SECONDS", 0.2)
    flags = ("--train.steps", "1", "--evaluate.interval_steps", "0")
    run = train(make_config(tmp_path, *flags)).directory
    events = read_metrics(run / "metrics.jsonl", "event")
    stalls = [row for row in events if row["name"] == "data_stall"]
    (came,) = [row["message"] for row in events if row["name"] == "first_batch"]
    assert came.startswith("the first batch came after ") and float(came.split()[5]) >= 0.6
    assert stalls and stalls[0]["severity"] == "warning" and stalls[0]["stall_seconds"] >= 0.2
    assert "data stall: no batch for 0 s; the data thread is" in stalls[0]["message"]
    shown = capsys.readouterr().out
    assert "WARNING: data stall" in shown and came not in shown, "a short wait is only in the metrics"


def test_skipped_documents_are_counted_and_said(tmp_path):
    lines = [json.dumps({"text": None if number in (3, 4) else " ".join(WORDS)}) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    flags = ("--data.source", f"jsonl:{tmp_path / 'a.jsonl'}", "--evaluate.interval_steps", "0", "--train.steps", "3")
    flags += ("--data.validation_fraction", "0")
    with pytest.raises(UserError, match=r"a\.jsonl:4: field 'text' is null; data\.on_bad_document \"skip\""):
        train(make_config(tmp_path, *flags))
    config = make_config(tmp_path, *flags, "--data.on_bad_document", "skip")
    result = train(config, overwrite=True)
    assert result.skipped_documents == 2
    assert "skipped 2 bad documents (data.on_bad_document)" in _summary(config, result, advise=True)
    # Only a model of text is to continue one.
    for bits, asked in ((1.4, True), (None, False)):
        measured = replace(result, evaluation=Evaluation(1.0, math.e, bits))
        assert ("trifocal generate" in _summary(config, measured, advise=True)) == asked
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["skipped_documents"] for row in rows if row["kind"] == "train"][-1] == 2
    (event,) = [row for row in rows if row.get("name") == "documents_skipped"]
    assert "a.jsonl:4: field 'text' is null" in event["message"] and event["severity"] == "warning"
