"""A checkpoint that is written while training continues holds its own step, and nothing later."""

import errno
import os
import threading

import pytest
import torch

from tests.train.tiny import assert_same_tensors, before_step, make_config, read_checkpoint
from trifocal.data import Loader
from trifocal.errors import UserError
from trifocal.runlog import read_metrics
from trifocal.train import resume, saving, train
from trifocal.train.checkpoint.manifest import verify_checkpoint
from trifocal.train.evaluator import Evaluator

ON = ("--checkpoint.asynchronous", "true", "--checkpoint.keep_last", "9")


def slow_writing(monkeypatch, until_step):
    """Writing step 2 ends only when step `until_step` begins; returns the steps begun meanwhile."""
    reached = threading.Event()
    begun = []
    healthy = saving.write_checkpoint

    def write(root, step, **parts):
        if step == 2:
            assert reached.wait(60)
        return healthy(root, step, **parts)

    def action(step, _):
        begun.append(step)
        if step == until_step:
            reached.set()

    monkeypatch.setattr(saving, "write_checkpoint", write)
    before_step(monkeypatch, action)
    return begun


def test_training_continues_and_what_is_written_is_the_right_step(tmp_path, monkeypatch):
    train(make_config(tmp_path, "--checkpoint.keep_last", "9", name="waiting"))
    with monkeypatch.context() as patch:
        begun = slow_writing(patch, until_step=4)
        assert train(make_config(tmp_path, *ON)).finished
    assert begun == [1, 2, 3, 4, 5, 6], "step 4 began before step 2 was written, or nothing had ever set it free"
    for name in ("step_00000002", "step_00000004", "step_00000006"):
        mine, theirs = (tmp_path / run / "checkpoints" / name for run in ("run", "waiting"))
        verify_checkpoint(mine)
        assert_same_tensors(read_checkpoint(mine), read_checkpoint(theirs))
        assert (mine / "rank0.json").read_text() == (theirs / "rank0.json").read_text()
    saved = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row.get("name") == "checkpoint_saved"]
    assert [row["message"].split()[0] for row in saved] == ["step_00000002", "step_00000004", "step_00000006"]
    assert all(0 < row["blocked_seconds"] <= row["save_seconds"] for row in saved)
    assert resume(tmp_path / "run", checkpoint="step_00000002").finished


def test_a_full_disk_is_loud_and_an_error_at_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    """An old checkpoint that cannot be deleted ends no run."""
    original = saving.write_checkpoint

    def save(root, step, **kwargs):
        if step in (4, 6):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(root, step, **kwargs)

    def busy(*_, **__):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(saving, "write_checkpoint", save)
    monkeypatch.setattr(saving, "prune_checkpoints", busy)
    with pytest.raises(UserError, match=r"checkpoint of step 6 could not be written: .*No space left"):
        train(make_config(tmp_path))
    said = capsys.readouterr().out
    assert "WARNING: an old checkpoint could not be deleted: [Errno 16]" in said
    assert "ERROR: the checkpoint of step 4 could not be written: [Errno 28] No space left" in said
    events = {row["name"]: row for row in read_metrics(tmp_path / "run" / "metrics.jsonl", "event")}
    assert events["checkpoint_failed"]["severity"] == "error"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]
    monkeypatch.undo()
    assert resume(tmp_path / "run").finished


def test_steps_are_saved_before_a_run_ends_by_its_data(tmp_path, monkeypatch):
    config = make_config(tmp_path, "--checkpoint.asynchronous", "true", "--evaluate.interval_steps", "0")
    original, calls = Loader.__next__, []

    def fail(loader):
        calls.append(loader)
        if len(calls) == 11:
            raise UserError("the network is gone")
        return original(loader)

    # Two micro-batches a step.
    monkeypatch.setattr(Loader, "__next__", fail)
    with pytest.raises(UserError, match="the network is gone; step 5 is saved"):
        train(config)
    assert (tmp_path / "run/checkpoints/step_00000005").is_dir()
    monkeypatch.setattr(Loader, "__next__", original)
    assert resume(tmp_path / "run").step == 6
    steps = [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl", "train")]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_steps_are_saved_before_a_look_at_the_model_ends_the_run(tmp_path, monkeypatch):
    """A GPU may have memory for a step, and none for more."""

    def too_much(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Evaluator, "evaluate", too_much)
    with pytest.raises(torch.OutOfMemoryError, match=r"try --train\..*activation_checkpointing all") as caught:
        train(make_config(tmp_path, "--evaluate.interval_steps", "3"))
    assert caught.value.__notes__ == ["step 3 is saved"]
    monkeypatch.undo()
    assert resume(tmp_path / "run").finished
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl", "train")] == [1, 2, 3, 4, 5, 6]
