"""A checkpoint that is written while training goes on holds the step that it is of, and nothing later."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.tiny import before_step, make_config, read_checkpoint
from trifocal.errors import UserError
from trifocal.runlog import read_metrics
from trifocal.train import resume, saving, train
from trifocal.train.checkpoint.manifest import verify_checkpoint

ON = ("--checkpoint.asynchronous", "true", "--checkpoint.keep_last", "9")


def slow_writing(monkeypatch: pytest.MonkeyPatch, until_step: int) -> list[int]:
    """Writing step 2 ends only when step `until_step` begins; returns the steps begun meanwhile."""
    reached = threading.Event()
    begun: list[int] = []
    healthy = saving.write_checkpoint

    def write(root: Path, step: int, **parts: Any) -> Path:
        if step == 2:
            assert reached.wait(60)
        return healthy(root, step, **parts)

    def action(step: int, _: Any) -> None:
        begun.append(step)
        if step == until_step:
            reached.set()

    monkeypatch.setattr(saving, "write_checkpoint", write)
    before_step(monkeypatch, action)
    return begun


def test_training_goes_on_and_what_is_written_is_the_step_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make_config(tmp_path, "--checkpoint.keep_last", "9", name="waiting"))
    with monkeypatch.context() as patch:
        begun = slow_writing(patch, until_step=4)
        assert train(make_config(tmp_path, *ON)).finished
    assert begun == [1, 2, 3, 4, 5, 6], "step 4 began before step 2 was written, or nothing had ever set it free"
    for name in ("step_00000002", "step_00000004", "step_00000006"):
        mine, theirs = (tmp_path / run / "checkpoints" / name for run in ("run", "waiting"))
        verify_checkpoint(mine)
        tensors, expected = read_checkpoint(mine), read_checkpoint(theirs)
        assert tensors.keys() == expected.keys()
        for key in tensors:
            assert torch.equal(tensors[key], expected[key]), (name, key)
        assert (mine / "rank0.json").read_text() == (theirs / "rank0.json").read_text()
    saved = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row.get("name") == "checkpoint_saved"]
    assert [row["message"].split()[0] for row in saved] == ["step_00000002", "step_00000004", "step_00000006"]
    assert all(0 < row["blocked_seconds"] <= row["save_seconds"] for row in saved)
    assert resume(tmp_path / "run", checkpoint="step_00000002").finished


def test_what_is_no_fault_of_the_disk_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: Any, **__: Any) -> Path:
        raise UserError("out of luck")

    monkeypatch.setattr(saving, "write_checkpoint", write)
    with pytest.raises(UserError, match="out of luck"):
        train(make_config(tmp_path, *ON))
