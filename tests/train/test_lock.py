"""Two that train in one folder: the second is refused, and the first notices nothing."""

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.children import environment
from tests.train.tiny import before_step, make_config
from tests.written_runs import wait_for
from trifocal.errors import UserError
from trifocal.runlog import read_metrics
from trifocal.train import load_config, resume, run_folder, train
from trifocal.train.run_folder import LOCK_FILE, RunLock

# `python -c HOLD FOLDER FILE`: makes the file when it has the lock.
HOLD = """
import sys, time
from pathlib import Path
from trifocal.train.run_folder import RunLock
with RunLock() as lock:
    lock.acquire(Path(sys.argv[1]))
    Path(sys.argv[2]).touch()
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "WAIT_SECONDS", 0.0)


@pytest.mark.parametrize("second", ["resume", "overwrite"])
def test_a_run_that_goes_on_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str) -> None:
    config = make_config(tmp_path)
    refused: list[str] = []

    def intrude(step: int, arguments: dict[str, Any]) -> None:
        if step == 4:
            with pytest.raises(UserError, match=rf"run is in use: process {os.getpid()} on .*trains there") as caught:
                resume(config.run.directory) if second == "resume" else train(config, overwrite=True)
            refused.append(str(caught.value))

    before_step(monkeypatch, intrude)
    assert train(config).finished
    assert len(refused) == 1
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl", "train")] == [1, 2, 3, 4, 5, 6]
    assert not list((tmp_path / "run/checkpoints").glob("superseded_*"))


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    held = tmp_path / "held"
    command = [sys.executable, "-c", HOLD, str(tmp_path), str(held)]
    child = warm.popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    try:
        wait_for(held.exists)
        with RunLock() as lock, pytest.raises(UserError, match=f"process {child.pid} on {socket.gethostname()} trains"):
            lock.acquire(tmp_path)
    finally:
        child.kill()
        child.wait()
    for _ in range(2):
        with RunLock() as lock:
            assert lock.acquire(tmp_path) == ""


def test_the_lock_of_a_folder_that_was_renamed_meanwhile_is_not_that_of_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    held = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)

    def rename_and_give_back(seconds: float) -> None:
        folder.rename(tmp_path / "run.old-1")
        folder.mkdir()
        fcntl.flock(held, fcntl.LOCK_UN)

    monkeypatch.setattr(run_folder, "WAIT_SECONDS", 60.0)
    monkeypatch.setattr(run_folder.time, "sleep", rename_and_give_back)
    try:
        with RunLock() as lock, pytest.raises(UserError, match="was renamed or deleted by the process"):
            lock.acquire(folder)
    finally:
        os.close(held)


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(run_folder.fcntl, "flock", no_locks)
    assert train(make_config(tmp_path, "--train.steps", "1")).finished
    notes = [row["message"] for row in read_metrics(tmp_path / "run/metrics.jsonl", "event") if row["name"] == "note"]
    assert any("has no locks" in note for note in notes)


def test_what_a_killed_start_left_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_FILE).write_text("node7 12\n")
    assert train(make_config(tmp_path, "--train.steps", "1")).finished


def test_a_run_without_a_checkpoint_says_how_to_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: int, arguments: dict[str, Any]) -> None:
        raise RuntimeError("killed")

    before_step(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="killed"):
        train(make_config(tmp_path))
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"no checkpoint yet; .*trifocal train \S+/run/config\.toml --overwrite"):
        resume(tmp_path / "run")
    assert train(load_config(tmp_path / "run/config.toml", ["--train.steps", "1"]), overwrite=True).finished
