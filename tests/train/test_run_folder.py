"""The folder of a run while it trains, moved, deleted or replaced: never half a run, always one clear line."""

import errno
import json
import os
import runpy
import signal
import socket
import subprocess
import sys

import pytest
import torch

from tests import warm
from tests.children import environment
from tests.train.tiny import before_step, make_config, read_checkpoint, write_config
from tests.written_runs import wait_for
from trifocal import load_model
from trifocal.cli import main
from trifocal.errors import UserError
from trifocal.runlog import read_metrics
from trifocal.train import resume, run_folder, train
from trifocal.train.checkpoint.export import weights_step
from trifocal.train.checkpoint.pretrained import open_pretrained
from trifocal.train.run_folder import RunLock


def at_step(monkeypatch, number, action):
    before_step(monkeypatch, lambda step, _: action() if step == number else None)


@pytest.mark.parametrize("fate", ["moved", "replaced"])
def test_a_run_whose_folder_is_gone_stops_and_leaves_another_alone(tmp_path, monkeypatch, fate):
    run, moved = tmp_path / "run", tmp_path / "moved"

    def lose():
        run.rename(moved)
        if fate == "replaced":
            run.mkdir()
            (run / ".trifocal_run").write_text("trifocal run, format 1\nanother\n")

    at_step(monkeypatch, 3, lose)
    flags = ("--evaluate.interval_steps", "1", "--train.steps", "50")
    with pytest.raises(
        UserError, match=r"while its run trained: the run stopped after step 4, and its last .* step 2;"
    ):
        train(make_config(tmp_path, *flags))
    monkeypatch.undo()
    assert [path.name for path in run.rglob("*")] == ([".trifocal_run"] if fate == "replaced" else [])
    if fate == "moved":
        assert resume(moved, config=make_config(tmp_path)).finished
        assert [row["step"] for row in read_metrics(moved / "metrics.jsonl", "train")] == [1, 2, 3, 4, 5, 6]


def old_names(run):
    return sorted(path.name for path in run.parent.glob(f"{run.name}.*") if path.is_dir())


def test_only_overwrite_renames_the_earlier_run_and_leaves_it_there(tmp_path, capsys, monkeypatch):
    run, place = tmp_path / "run", tmp_path / "volume" / "real"
    place.mkdir(parents=True)
    run.symlink_to(place)
    config = make_config(tmp_path, "--train.steps", "1", "--evaluate.interval_steps", "0")
    train(config)
    (run / "notes.txt").write_text("of the user")
    (tmp_path / "run-2").mkdir()
    first = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"holds a run already.*--resume \S+/run\).*--overwrite.*ory \S+/run-3\)$"):
        train(config)
    for number in (1, 2):
        train(config, overwrite=True)
        assert capsys.readouterr().err.splitlines()[-1] == (
            f"trifocal: the run that was in {place} is now in {place}.old-{number}"
        )
    old = place.with_name(f"{place.name}.old-1")
    assert {path.relative_to(old): path.read_bytes() for path in old.rglob("*") if path.is_file()} == first
    assert resume(old).step == 1

    # A start that fails leaves the earlier run renamed, and says where it is.
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("trifocal.train.run_logger.write_environment", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(config, overwrite=True)
    assert f"is now in {place}.old-3" in capsys.readouterr().err
    assert old_names(place) == [f"{place.name}.old-{number}" for number in (1, 2, 3)]
    assert train(config).finished
    # Nothing is renamed under a user's feet, nor what is no run.
    with monkeypatch.context() as patch:
        patch.chdir(place / "checkpoints")
        with pytest.raises(UserError, match="it is the current folder"):
            train(config, overwrite=True)
    (run / ".trifocal_run").unlink()
    with pytest.raises(UserError, match=r"is not a Trifocal run \(no \.trifocal_run\)"):
        train(config, overwrite=True)
    assert (run / "checkpoints").is_dir() and len(old_names(place)) == 3


LINKS = (".lock", ".trifocal_run", ".config.toml.partial", "metrics.jsonl", "heartbeat/rank0.jsonl", "checkpoints")


def test_no_link_in_a_foreign_run_is_followed(tmp_path):
    run = train(make_config(tmp_path, "--train.steps", "2", "--log.telemetry_interval_steps", "0")).directory
    longer = make_config(tmp_path, "--train.steps", "4")
    for name in LINKS:
        path, victim = run / name, tmp_path / "victim"
        was_there = path.exists()
        if was_there:
            path.rename(victim)
        else:
            victim.write_text("mine")
        path.symlink_to(victim)
        before = {file: file.read_bytes() for file in [victim, *victim.rglob("*")] if file.is_file()}
        with pytest.raises(UserError, match=rf"{name} is a (symbolic )?link") as caught:
            resume(run, config=longer)
        assert "\n" not in str(caught.value)
        assert before == {file: file.read_bytes() for file in [victim, *victim.rglob("*")] if file.is_file()}
        path.unlink()
        victim.rename(path) if was_there else victim.unlink()
    assert resume(run, config=longer).finished


def test_only_links_that_wandb_made_may_stay(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (elsewhere, run / "wandb", run / "checkpoints" / "wandb"):
        folder.mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to(elsewhere)
    run_folder.check_files(run)
    (run / "checkpoints" / "wandb" / "latest-run").symlink_to(elsewhere)
    with pytest.raises(UserError, match="checkpoints/wandb/latest-run is a symbolic link"):
        run_folder.check_files(run)
    (run / "checkpoints" / "wandb" / "latest-run").unlink()
    (run / "wandb").rename(tmp_path / "wandb")
    (run / "wandb").symlink_to(elsewhere)
    with pytest.raises(UserError, match="wandb is a symbolic link"):
        run_folder.check_files(run)


def open_path(run):
    found = open_pretrained(run)
    return found.path


def step_of(weights):
    return int(json.loads((weights / "trainer_state.json").read_text())["global_step"])


def test_the_weights_are_those_of_the_last_checkpoint_however_a_run_ends(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    assert train(make_config(tmp_path)).finished
    assert step_of(run / "weights") == 6
    assert open_path(run) == run / "weights"
    file = run / "weights" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=r"model\.safetensors has changed .*; take a checkpoint of its run instead"):
        load_model(run)
    file.write_bytes(content)
    steps = []
    with monkeypatch.context() as patch:

        def stop():
            steps.append(open_path(run))
            os.kill(os.getpid(), signal.SIGTERM)

        at_step(patch, 9, stop)
        assert resume(run, config=make_config(tmp_path, "--train.steps", "20")).step == 9
    assert steps == [run / "checkpoints" / "step_00000008"], "the weights are of an earlier step"
    assert f"{run / 'weights'} has an earlier step until this run ends" in capsys.readouterr().out
    assert step_of(run / "weights") == 9
    saved = read_checkpoint(run / "checkpoints" / "step_00000009")
    for name, tensor in load_model(run / "weights").state_dict().items():
        assert torch.equal(tensor, saved[f"model.{name}"]), name

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("trifocal.train.checkpoint.export.save_weights", full)
    told = []
    at_step(monkeypatch, 10, lambda: told.append(weights_step(run / "weights")))
    with pytest.raises(UserError, match=r"step 12 is saved, but its weights could not .*No space left.*earlier"):
        resume(run, checkpoint="step_00000008", config=make_config(tmp_path, "--train.steps", "12"))
    assert told == [None], "this run has another model of step 9"
    assert not (run / "weights" / "trainer_state.json").exists()


def test_home_is_expanded_and_advice_can_be_pasted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = write_config(tmp_path)
    assert main(["train", "~/run.toml", "--run.directory", "~/at home", "--train.steps", "2"]) == 0
    assert not (tmp_path / "~").exists() and (tmp_path / "at home" / "config.toml").is_file()
    assert f"trifocal report '{tmp_path}/at home'" in capsys.readouterr().out
    assert main(["train", "--resume=~/at home", "--train.steps", "3"]) == 0
    capsys.readouterr()
    assert main(["train", str(path), "--run.directory", "-x", "--train.steps", "1"]) == 0
    assert 'trifocal generate ./-x --prompt "the beginning of a text"' in capsys.readouterr().out
    assert main(["train", str(path), "--data.source", "builtin", "--run.directory", "y", "--train.steps", "1"]) == 0
    assert 'trifocal generate y --prompt "import "' in capsys.readouterr().out


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


def test_a_run_that_trains_is_left_alone(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    refused = []

    def intrude():
        for second in (lambda: resume(config.run.directory), lambda: train(config, overwrite=True)):
            with pytest.raises(UserError, match=rf"run is in use: process {os.getpid()} on .*trains there") as caught:
                second()
            refused.append(str(caught.value))

    at_step(monkeypatch, 4, intrude)
    assert train(config).finished
    # Neither a resume nor `sparsify` can take another --run.directory.
    assert len(refused) == 2 and all(message.endswith(", or end it first") for message in refused)
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl", "train")] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run/checkpoints/step_00000006").is_dir()


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path):
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
            lock.acquire(tmp_path)


def test_a_lock_stays_with_its_folder(tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    with RunLock() as lock:
        lock.acquire(run)
        assert lock.holds(run)
        run.rename(moved)
        run.mkdir()
        (run / ".lock").touch()
        assert lock.holds(moved) and not lock.holds(run)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".lock").symlink_to(victim)
    with RunLock() as lock, pytest.raises(OSError, match="symbolic links"):
        lock.acquire(tmp_path)
    assert victim.read_text() == "mine"


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(run_folder.fcntl, "flock", no_locks)
    with RunLock() as lock:
        lock.acquire(tmp_path)
    assert "has no locks" in capsys.readouterr().err
    # On macOS flock's error has another number than the similar one.
    monkeypatch.setattr(errno, "ENOTSUP", 45)
    assert 45 in runpy.run_path(run_folder.__file__)["_NO_LOCKS"]
