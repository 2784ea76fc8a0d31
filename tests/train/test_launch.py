"""A resumed run repeats the uninterrupted one bit for bit."""

import errno
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.tiny import before_step, make_config, read_checkpoint
from trifocal.distributed import DistributedContext
from trifocal.errors import UserError
from trifocal.runlog import read_metrics
from trifocal.runlog.run import read_run
from trifocal.runlog.stalls.verdict import judge
from trifocal.telemetry import attention_telemetry
from trifocal.train import RunConfig, load_config, resume, train
from trifocal.train.checkpoint.manifest import describe_files, verify_checkpoint, write_manifest
from trifocal.train.checkpoint.random_state import random_state, restore_random_state, seed_everything
from trifocal.train.launch import resume_notes

STEPS = ("--train.steps", "9")
# These need not be equal: they measure time and memory, or name the moment.
MEASURED = ("seconds", "bytes", "tokens_per_second")


def rows(run: Path, kind: str) -> list[dict[str, Any]]:
    found = read_metrics(run / "metrics.jsonl", kind)
    exact = {"bits_per_byte"}
    return [
        {name: value for name, value in row.items() if name in exact or not any(word in name for word in MEASURED)}
        for row in found
    ]


def state(run: Path) -> str:
    """The verdict on the run's process."""
    return judge(read_run(run).heartbeats[0][-1]).state


def assert_same_run(run: Path, other: Path, last: int = 9) -> None:
    """Every weight, every moment, every loss, the data's position and the generators."""
    name = f"step_{last:08d}"
    mine, theirs = read_checkpoint(run / "checkpoints" / name), read_checkpoint(other / "checkpoints" / name)
    assert mine.keys() == theirs.keys()
    assert sum("exp_avg" in key for key in mine) > 20
    for key in mine:
        assert torch.equal(mine[key], theirs[key]), key
    states = [json.loads((path / "checkpoints" / name / "rank0.json").read_text()) for path in (run, other)]
    assert states[0] == states[1]
    assert states[0]["data"]["sample_index"] == 4 * last
    for kind in ("train", "evaluation"):
        assert rows(run, kind) == rows(other, kind)
    assert [row["step"] for row in rows(run, "train")] == list(range(1, last + 1))
    weights = [path / "weights" / "model.safetensors" for path in (run, other)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.fixture
def uninterrupted(tmp_path: Path) -> Path:
    config = make_config(tmp_path, *STEPS, name="whole")
    assert train(config).finished
    return tmp_path / "whole"


def signal_at(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, step: int) -> None:
    before_step(monkeypatch, lambda now, _: os.kill(os.getpid(), number) if now == step else None)


def test_two_interruptions_change_nothing(
    tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Stopped by SIGTERM in step 5 and by Ctrl-C in step 7, other random numbers in between.

    No checkpoint is due at either step. Nor is an evaluation: an interrupted one leaves no figure.
    """
    config = make_config(tmp_path, *STEPS)
    with monkeypatch.context() as patch:
        signal_at(patch, signal.SIGTERM, 5)
        result = train(config)
        assert (result.finished, result.step) == (False, 5)
        assert state(tmp_path / "run") == "stopped"
    assert "SIGTERM: saving at the end of this step" in capfd.readouterr().err
    torch.rand(5), random.random(), np.random.rand()
    with monkeypatch.context() as patch:
        signal_at(patch, signal.SIGINT, 7)
        result = resume(tmp_path / "run")
        assert (result.finished, result.step) == (False, 7)
        assert state(tmp_path / "run") == "stopped"
    result = resume(tmp_path / "run")
    assert (result.finished, result.step) == (True, 9)
    assert state(tmp_path / "run") == "finished"
    assert_same_run(uninterrupted, tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_crash_between_checkpoints_changes_nothing(
    tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in step 6, after rows of step 5 that no checkpoint covers; they are written once, not twice."""

    def crash(step: int, _: Any) -> None:
        if step == 6:
            raise MemoryError

    with monkeypatch.context() as patch:
        before_step(patch, crash)
        with pytest.raises(MemoryError):
            train(make_config(tmp_path, *STEPS))
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == [1, 2, 3, 4, 5]
    assert resume(tmp_path / "run").finished
    assert_same_run(uninterrupted, tmp_path / "run")


def test_going_on_from_an_earlier_checkpoint_replaces_the_later_one(tmp_path: Path, uninterrupted: Path) -> None:
    train(make_config(tmp_path, *STEPS))
    newest = tmp_path / "run" / "checkpoints" / "step_00000009"
    (newest / "rank0.json").write_text("{}")
    with pytest.raises(UserError, match=r"rank0\.json.*--resume \S+/run --checkpoint step_00000008"):
        resume(tmp_path / "run")
    assert resume(tmp_path / "run", checkpoint="step_00000008").finished
    assert_same_run(uninterrupted, tmp_path / "run")
    assert (newest / "rank0.json").read_text() != "{}"


def test_a_start_that_fails_leaves_the_run_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration and later checkpoints: whether the data do not fit, or the first step fails."""
    train(make_config(tmp_path))
    run = tmp_path / "run"
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step_00000004", "step_00000006"]
    config = (run / "config.toml").read_text()

    def unchanged() -> bool:
        found = sorted(path.name for path in (run / "checkpoints").iterdir())
        return found == names and (run / "config.toml").read_text() == config

    with pytest.raises(UserError, match="data position belongs to"):
        resume(run, checkpoint="step_00000004", config=make_config(tmp_path, "--data.seed", "8"))
    assert unchanged()

    def fail(step: int, _: Any) -> None:
        raise MemoryError

    larger = make_config(tmp_path, "--train.micro_batch_size", "4")
    with monkeypatch.context() as patch:
        before_step(patch, fail)
        with pytest.raises(MemoryError):
            resume(run, checkpoint="step_00000004", config=larger)
    assert unchanged()
    assert resume(run, checkpoint="step_00000004", config=larger).finished
    assert load_config(run / "config.toml").train.micro_batch_size == 4
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == names


def test_a_start_that_the_disk_refuses_may_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, rename = make_config(tmp_path, "--train.steps", "1"), Path.replace

    def fail(path: Path, target: Path) -> Path:
        if target.name == "env.json":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            train(config)
    assert train(config).finished


def test_a_resumed_run_that_begins_to_evaluate_needs_held_out_text(tmp_path: Path) -> None:
    nothing = ("--data.validation_fraction", "1e-9")
    train(make_config(tmp_path, *nothing, "--evaluate.interval_steps", "0", "--train.steps", "2"))
    with pytest.raises(UserError, match="the validation split is empty"):
        resume(tmp_path / "run", config=make_config(tmp_path, *nothing, "--evaluate.interval_steps", "6"))
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl", "train")] == [1, 2]


def test_a_finished_run_goes_on_to_more_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(tmp_path)
    train(config)
    assert resume(tmp_path / "run").step == 6
    assert "note: continues from step 6 of 6, with the saved configuration" in capsys.readouterr().out
    longer = make_config(tmp_path, "--train.steps", "8")
    assert resume(tmp_path / "run", config=longer).step == 8
    out = capsys.readouterr().out
    assert "note: continues from step 6 of 8; differs from the saved configuration: train.steps 6 -> 8\n" in out
    assert "learning rate: 0.001 in step 6, 0.0016 in step 7\n" in out
    taken = {row["step"]: row["learning_rate"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl", "train")}
    assert (taken[6], taken[7]) == pytest.approx((0.001, 0.0016), rel=0.01)
    assert load_config(tmp_path / "run" / "config.toml").train.steps == 8
    with pytest.raises(UserError, match=r"of step 8, past train\.steps 6; raise --train\.steps, or .* --checkpoint"):
        resume(tmp_path / "run", config=config)


def test_an_alarm_that_is_on_does_not_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_telemetry, "CLOSED_GATE", 1.0)
    flags = ("--log.telemetry_interval_steps", "2", "--evaluate.interval_steps", "0")
    train(make_config(tmp_path, *flags, "--train.steps", "2"))
    assert resume(tmp_path / "run", config=make_config(tmp_path, *flags, "--train.steps", "4")).finished
    events = read_metrics(tmp_path / "run" / "metrics.jsonl", "event")
    assert [row["step"] for row in events if row["name"] == "gate_closed"] == [2] * 6, "three branches, two layers"


def test_tokens_are_counted_by_the_batch_of_each_step(tmp_path: Path) -> None:
    nothing = ("--evaluate.interval_steps", "0", "--log.telemetry_interval_steps", "0", "--train.micro_batch_size", "1")
    train(make_config(tmp_path, "--train.steps", "2", *nothing))
    larger = make_config(tmp_path, "--train.steps", "4", "--train.global_batch_size", "6", *nothing)
    assert resume(tmp_path / "run", config=larger).finished
    seen = [row["tokens_seen"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl", "train")]
    assert seen == [4 * 32, 8 * 32, 14 * 32, 20 * 32]


def test_a_resumed_run_takes_the_optimizer_s_hyperparameters_from_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = ("--evaluate.interval_steps", "0", "--log.telemetry_interval_steps", "0")
    train(make_config(tmp_path, "--train.steps", "2", *nothing))
    seen: list[Any] = []
    names = ("weight_decay", "betas", "eps")
    before_step(
        monkeypatch,
        lambda _, given: seen.append([[g[name] for name in names] for g in given["optimizer"].param_groups]),
    )
    flags = ("--optimizer.weight_decay", "0.25", "--optimizer.beta1", "0.5", "--optimizer.beta2", "0.75")
    other = make_config(tmp_path, "--train.steps", "3", *flags, "--optimizer.epsilon", "1e-3", *nothing)
    assert resume(tmp_path / "run", config=other).finished
    assert seen == [[[0.25, (0.5, 0.75), 1e-3], [0.0, (0.5, 0.75), 1e-3]]]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--model.mlp_dim", "48"), r"belongs to a different model: mlp_dim is 32 there, 48 here"),
        (
            ("--train.sequence_length", "16"),
            r"data position belongs to .*: train\.sequence_length 32 -> 16; resume with the saved values$",
        ),
    ],
)
def test_a_checkpoint_of_another_model_or_other_data_is_refused(
    tmp_path: Path, flags: tuple[str, ...], expected: str
) -> None:
    train(make_config(tmp_path))
    before = (tmp_path / "run" / "config.toml").read_text()
    other: RunConfig = make_config(tmp_path, "--train.steps", "8", *flags)
    with pytest.raises(UserError, match=expected):
        resume(tmp_path / "run", config=other)
    assert (tmp_path / "run" / "config.toml").read_text() == before


def test_all_generators_come_back() -> None:
    seed_everything(11)
    torch.rand(3), random.gauss(0, 1), np.random.randn()
    state = json.loads(json.dumps(random_state()))
    expected = [torch.rand(3).tolist(), random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()]
    seed_everything(12)
    restore_random_state(state)
    drawn = [torch.rand(3).tolist(), random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()]
    assert drawn == expected


def test_every_key_that_differs_is_named_with_both_values(tmp_path: Path) -> None:
    saved = make_config(tmp_path)
    now = make_config(tmp_path, "--optimizer.beta2", "0.9", "--train.compile", "true", "--log.sinks", "wandb", name="x")
    note = "learning rate: 0.0055 in step 4, 0.00232 in step 5"
    assert resume_notes(saved, now, 4)[1:] == [note] and resume_notes(saved, now, 6)[1:] == []
    assert resume_notes(saved, now, 4)[0] == (
        "continues from step 4 of 6; differs from the saved configuration: train.compile false -> true, "
        'optimizer.beta2 0.95 -> 0.9, log.sinks "" -> "wandb"'
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("step"),
        lambda state: state["data"].pop("settings"),
        lambda state: state["data"]["position"].clear(),
        lambda state: state["random"].update(torch="AAAA"),
        lambda state: state["random"]["numpy"].__setitem__(1, 10**9),
    ],
)
def test_a_position_that_cannot_be_read_is_one_line(tmp_path: Path, damage: Any) -> None:
    """Intact by its manifest: written by another version, or by somebody who knows the format."""
    train(make_config(tmp_path, "--train.steps", "2", "--evaluate.interval_steps", "0"))
    path = tmp_path / "run" / "checkpoints" / "step_00000002"
    manifest = verify_checkpoint(path)
    state = json.loads((path / "rank0.json").read_text())
    damage(state)
    (path / "rank0.json").write_text(json.dumps(state))
    found = describe_files(path, DistributedContext())
    manifest["files"]["rank0.json"] = found["rank0.json"]
    write_manifest(path, manifest)
    with pytest.raises(UserError, match=r"(position in|rank0\.json) .*cannot be read") as caught:
        resume(tmp_path / "run")
    assert "\n" not in str(caught.value)
