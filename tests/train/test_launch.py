"""A resumed run repeats the uninterrupted one bit for bit."""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.tiny import assert_same_tensors, before_step, make_config, read_checkpoint, write_documents
from trifocal.cli import main
from trifocal.errors import UserError
from trifocal.report.tables import key_figures
from trifocal.runlog import read_metrics
from trifocal.runlog.run import read_run
from trifocal.runlog.stalls.verdict import verdicts
from trifocal.train import load_config, resume, train
from trifocal.train.checkpoint.manifest import describe_file, verify_checkpoint, write_manifest
from trifocal.train.config.load import override
from trifocal.train.launch import prolong_command

STEPS = ("--train.steps", "9")
# These need not be equal: they measure time and memory, or name the moment.
MEASURED = ("seconds", "bytes", "tokens_per_second")


def rows(run, kind):
    found = read_metrics(run / "metrics.jsonl", kind)
    exact = {"bits_per_byte"}
    return [
        {name: value for name, value in row.items() if name in exact or not any(word in name for word in MEASURED)}
        for row in found
    ]


def fail(step, _):
    raise MemoryError


def state(run):
    """The verdict on the run's process."""
    return verdicts(read_run(run))[0].state


def assert_same_run(run, other):
    """Every weight, every moment, every loss, the data's position and the generators."""
    name = "step_00000009"
    mine, theirs = read_checkpoint(run / "checkpoints" / name), read_checkpoint(other / "checkpoints" / name)
    assert_same_tensors(mine, theirs)
    assert sum("exp_avg" in key for key in mine) > 20
    states = [json.loads((path / "checkpoints" / name / "rank0.json").read_text()) for path in (run, other)]
    assert states[0] == states[1]
    assert states[0]["data"]["sample_index"] == 4 * 9
    for kind in ("train", "evaluation"):
        assert rows(run, kind) == rows(other, kind)
    assert [row["step"] for row in rows(run, "train")] == list(range(1, 10))
    weights = [path / "weights" / "model.safetensors" for path in (run, other)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of nine steps, with the checkpoints of the last two; other runs in its folder read the same files."""
    config = make_config(tmp_path_factory.mktemp("runs"), *STEPS, name="whole")
    assert train(config).finished
    return Path(config.run.directory)


@pytest.fixture
def copy(uninterrupted, tmp_path):
    """A copy of it, to be resumed."""
    return shutil.copytree(uninterrupted, tmp_path / "run")


def signal_at(monkeypatch, number, step):
    before_step(monkeypatch, lambda now, _: os.kill(os.getpid(), number) if now == step else None)


def test_the_name_of_a_configuration_is_none():
    with pytest.raises(ValueError, match="config must be a RunConfig, got str"):
        train("showcase")


def test_interruptions_change_nothing(uninterrupted, monkeypatch, capfd):
    """Crashed in step 4, stopped by SIGTERM in step 5 and by Ctrl-C in step 7; other random numbers in between.

    No checkpoint is due at either signal. Nor is an evaluation: an interrupted one leaves no figure. Row 3, which no
    checkpoint covers, is written once, not twice.
    """
    run = uninterrupted.with_name("interrupted")
    config = make_config(run.parent, *STEPS, name=run.name)

    def crash(step, _):
        if step == 4:
            raise MemoryError

    with monkeypatch.context() as patch:
        before_step(patch, crash)
        with pytest.raises(MemoryError):
            train(config)
    assert [row["step"] for row in rows(run, "train")] == [1, 2, 3]
    for number, step in ((signal.SIGTERM, 5), (signal.SIGINT, 7)):
        torch.rand(5), random.random(), np.random.rand()
        with monkeypatch.context() as patch:
            signal_at(patch, number, step)
            result = resume(run)
        assert (result.finished, result.step, state(run)) == (False, step, "stopped") and result.stop_requested
        assert f"{number.name}: saving at the end of this step" in capfd.readouterr().err
    result = resume(run)
    assert (result.finished, result.step, state(run)) == (True, 9, "finished") and not result.stop_requested
    assert_same_run(uninterrupted, run)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_earlier_checkpoint_replaces_the_later_one(copy, uninterrupted):
    """Also from a copy that somebody kept under another name; it stays."""
    newest = copy / "checkpoints" / "step_00000009"
    shutil.copytree(newest, newest.with_name("step_00000011"))
    (newest / "rank0.json").write_text("{}")
    with pytest.raises(UserError, match=r"rank0\.json.*--resume \S+/run --checkpoint step_00000008"):
        resume(copy, checkpoint=newest.name)
    shutil.copytree(newest.with_name("step_00000008"), newest.with_name("step_8"))
    assert resume(copy, checkpoint="step_8").finished
    assert sorted(path.name for path in newest.parent.iterdir()) == ["step_00000008", "step_00000009", "step_8"]
    assert_same_run(uninterrupted, copy)
    assert (newest / "rank0.json").read_text() != "{}"


def test_a_start_that_fails_leaves_the_run_as_it_was(copy, monkeypatch):
    """Its configuration and later checkpoints: whether the model or the data do not fit, or the first step fails."""
    names, saved = ["step_00000008", "step_00000009"], (copy / "config.toml").read_text()
    config = load_config(copy / "config.toml")

    def checkpoints():
        return sorted(path.name for path in (copy / "checkpoints").iterdir())

    for changes, expected in (
        ({"data.seed": 8}, r"data position belongs to .*: data\.seed 1337 -> 8; resume with the saved values$"),
        ({"model.mlp_dim": 48}, r"belongs to a different model: mlp_dim is 32 there, 48 here"),
    ):
        with pytest.raises(UserError, match=expected):
            resume(copy, checkpoint=names[0], config=override(config, changes))
        assert checkpoints() == names and (copy / "config.toml").read_text() == saved

    larger = override(config, {"train.micro_batch_size": 4})
    with monkeypatch.context() as patch:
        before_step(patch, fail)
        with pytest.raises(MemoryError):
            resume(copy, checkpoint=names[0], config=larger)
    assert checkpoints() == names and (copy / "config.toml").read_text() == saved
    assert resume(copy, checkpoint=names[0], config=larger).finished
    assert load_config(copy / "config.toml").train.micro_batch_size == 4 and checkpoints() == names


def test_a_run_is_prolonged_from_the_last_step_before_it_declines(tmp_path, monkeypatch, capsys):
    flags = ("--schedule.kind", "wsd", "--schedule.decay_fraction", "0.5", "--checkpoint.keep_last", "1")
    flags = (*flags, "--optimizer.kind", "muon")
    train(make_config(tmp_path, *flags))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step_00000003", "step_00000006"]
    with pytest.raises(UserError, match=r'optimizer\.kind is "muon" in .* and "adamw" here.*--model\.from'):
        resume(tmp_path / "run", config=make_config(tmp_path, *flags, "--optimizer.kind", "adamw"))
    longer = make_config(tmp_path, *flags, "--train.steps", "8")
    command = f"trifocal train --resume {tmp_path}/run --checkpoint step_00000003 --train.steps 8"
    assert prolong_command(tmp_path / "run", 8) == command
    with monkeypatch.context() as patch:
        before_step(patch, fail)
        with pytest.raises(MemoryError):
            resume(tmp_path / "run", config=longer)
    assert "declined, take --checkpoint step_00000003" in capsys.readouterr().out
    assert resume(tmp_path / "run", checkpoint="step_00000003", config=longer).finished
    assert "take --checkpoint" not in capsys.readouterr().out
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")
    assert [row["step"] for row in rows] == list(range(1, 9))
    # Step 4 is the last before the new decline, to a tenth; the warm-up was in steps 1 and 2.
    assert [row["learning_rate"] for row in rows] == pytest.approx(
        [0.005, 0.01, 0.01, 0.01, *(0.01 - 0.009 * step / 4 for step in (1, 2, 3, 4))]
    )


def test_a_run_of_several_sources_ends_on_better_text_and_is_prolonged(tmp_path, capsys):
    better = write_documents(tmp_path / "better", count=12)
    names = [f"text:{tmp_path / 'text'}", f"text:{better}"]
    for path in better.glob("*.txt"):
        path.write_text(path.read_text().upper())
    flags = ("--schedule.kind", "wsd", "--schedule.decay_fraction", "0.5", "--data.source", *names)
    flags = (*flags, "--data.weights", "3,1", "--data.weights_after", "1,7")
    config, run = make_config(tmp_path, *flags), tmp_path / "run"
    result = train(config)
    assert load_config(run / "config.toml") == config
    path = run / "checkpoints" / "step_00000006" / "rank0.json"
    saved = json.loads(path.read_text())["data"]
    # Three steps of four rows since the rate and the weights changed.
    assert [(own["weight"], own["rows"]) for own in saved["sources"]] == [(1, 1), (7, 11)]
    last = read_metrics(run / "metrics.jsonl", "train")[-1]
    assert [last[f"epoch/{name}"] for name in names] == [own["epoch"] for own in saved["sources"]]
    assert "epoch" not in last
    row = read_metrics(run / "metrics.jsonl", "evaluation")[-1]
    losses = [row[f"validation_loss/{name}"] for name in names]
    assert row["validation_loss"] == pytest.approx(sum(losses) / 2) and losses[0] != losses[1]
    assert row["bits_per_byte"] == pytest.approx(sum(row[f"bits_per_byte/{name}"] for name in names) / 2)
    assert [*result.evaluation.of_sources] == names
    out = capsys.readouterr().out
    assert f"{names[0]} + {names[1]}, 32 tokens a row" in out and f"({names[0]} {losses[0]:.4f}, {names[1]}" in out
    figures = key_figures(read_run(run))
    assert figures[f"validation loss, {names[1]}"] == f"{losses[1]:.4f}"
    assert figures["epochs"] == ", ".join(f"{name} {last[f'epoch/{name}']}" for name in names)
    # Each source is evaluated on the rows of a run on it.
    for name in names:
        assert main(["evaluate", str(run), "--only", "loss", "--source", name]) == 0
    assert main(["evaluate", str(run), "--only", "loss,needle", "--lengths", "80", "--samples", "1"]) == 0
    found = json.loads((run / "evaluation" / "step_00000006.json").read_text())["rows"]
    assert {row["source"]: row["loss"] for row in found if row["task"] == "loss"} == pytest.approx(
        dict(zip(names, losses, strict=True))
    )
    assert {row["source"] for row in found if row["task"] == "needle"} == set(names)

    assert resume(run, checkpoint="step_00000003").finished
    assert json.loads(path.read_text())["data"] == saved
    assert read_metrics(run / "metrics.jsonl", "train")[-1]["loss"] == last["loss"]
    # The change moves with the decline; another batch counts from the checkpoint.
    longer = make_config(tmp_path, *flags, "--train.steps", "8", "--train.global_batch_size", "8")
    assert resume(run, checkpoint="step_00000003", config=longer).finished
    saved = json.loads((path.parents[1] / "step_00000008" / "rank0.json").read_text())["data"]
    assert [own["rows"] for own in saved["sources"]] == [4, 28] and saved["sample_index"] == 12 + 5 * 8
    assert "weights ended" not in capsys.readouterr().out
    assert resume(run, config=override(longer, {"data.weights": (1.0, 3.0)})).finished
    assert "data.weights ended with step 4, and data.weights_after hold" in capsys.readouterr().out


def test_a_finished_run_continues_with_another_configuration(copy, capsys, monkeypatch):
    """More steps, another batch and other hyperparameters."""
    config = load_config(copy / "config.toml")
    assert resume(copy).step == 9
    assert "note: continues from step 9 of 9, with the saved configuration" in capsys.readouterr().out
    groups = []
    names = ("weight_decay", "betas", "eps")
    before_step(monkeypatch, lambda _, given: groups.append(given["optimizer"].param_groups))
    changes = {
        "train.steps": 11, "train.global_batch_size": 6, "optimizer.weight_decay": 0.25, "optimizer.beta1": 0.5,
        "optimizer.beta2": 0.75, "optimizer.epsilon": 1e-3, "log.sample_prompt": "a",
    }  # fmt: skip
    assert resume(copy, config=override(config, changes)).step == 11
    out = capsys.readouterr().out
    assert "note: continues from step 9 of 11; differs from the saved configuration: train.steps 9 -> 11, " in out
    for change in ("optimizer.beta1 0.9 -> 0.5, optimizer.beta2 0.95 -> 0.75, ", 'log.sample_prompt "def " -> "a"\n'):
        assert f", {change}" in out
    assert "learning rate: 0.001 in step 9, 0.00127 in step 10\n" in out
    taken = {row["step"]: row for row in read_metrics(copy / "metrics.jsonl", "train")}
    assert [taken[step]["learning_rate"] for step in (9, 10)] == pytest.approx([0.001, 0.00127], rel=0.01)
    assert [taken[step]["tokens_seen"] for step in (9, 10, 11)] == [36 * 32, 42 * 32, 48 * 32]
    found = [[group[name] for name in names] for group in groups[-1]]
    assert found == [[0.25, (0.5, 0.75), 1e-3], [0.0, (0.5, 0.75), 1e-3]]
    assert load_config(copy / "config.toml").train.steps == 11
    with pytest.raises(UserError, match=r"from step 11, past train\.steps 9; raise --train\.steps, or .* --checkpoint"):
        resume(copy, config=config)


def test_a_position_that_cannot_be_read_is_one_line(copy):
    """Intact by its manifest: written by another version, or by somebody who knows the format."""
    path = copy / "checkpoints" / "step_00000009"
    manifest, content = verify_checkpoint(path), (path / "rank0.json").read_text()
    damages = [
        lambda state: state.pop("step"),
        lambda state: state["data"]["sources"][0].pop("settings"),
        lambda state: state["data"]["sources"][0]["streams"].clear(),
        lambda state: state["random"].update(torch="AAAA"),
        lambda state: state["random"]["numpy"].__setitem__(1, 10**9),
    ]
    for damage in damages:
        broken = json.loads(content)
        damage(broken)
        (path / "rank0.json").write_text(json.dumps(broken))
        manifest["files"]["rank0.json"] = describe_file(path / "rank0.json")
        write_manifest(path, manifest)
        with pytest.raises(UserError, match=r"(position in|rank0\.json) .*cannot be read") as caught:
            resume(copy)
        assert "\n" not in str(caught.value)


def test_a_resume_that_the_launcher_repeats_starts_where_the_first_was_asked_to(tmp_path, monkeypatch):
    """Until its first step has ended: from then on it continues from its newest checkpoint."""
    config = make_config(tmp_path, *STEPS, "--checkpoint.interval_steps", "3", "--checkpoint.keep_last", "9")
    run, asked = tmp_path / "run", "step_00000003"
    assert train(config).finished
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    def resumed():
        return [row["step"] for row in read_metrics(run / "metrics.jsonl") if row.get("name") == "resumed"]

    # Nothing of an earlier start is in the metrics, then all but a step.
    for events in ([3], [3, 3]):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
            before_step(patch, fail)
            resume(run, checkpoint=asked)
        assert resumed() == events
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [asked, "step_00000006", "step_00000009"]

    def fail_late(step, _):
        if step >= 8:
            raise MemoryError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        before_step(patch, fail_late)
        resume(run, checkpoint=asked)
    assert resume(run, checkpoint=asked).finished
    assert resumed() == [3, 3, 3, 6]
    (run / "metrics.jsonl").unlink()
    assert resume(run, checkpoint=asked).finished
    assert resumed() == [3]
    # Its run has deleted it since.
    shutil.rmtree(run / "checkpoints" / asked)
    assert resume(run, checkpoint=asked).finished
    assert resumed()[-1] == 9
