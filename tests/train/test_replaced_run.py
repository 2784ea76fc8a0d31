"""A run that is to be replaced stays until the first step of the new one has ended."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests import warm
from tests.children import environment
from tests.distributed.workers import train as start
from tests.train.tiny import before_step, make_config, write_config

from trifocal.cli import main
from trifocal.errors import UserError
from trifocal.runlog import read_metrics
from trifocal.train import NonFiniteError, resume, train
from trifocal.train import lock as lock_module
from trifocal.train.lock import LOCK_FILE, RunLock
from trifocal.train.replaced_run import delete_replaced, failed_path, replace_run, replaced_path, restore_replaced
from trifocal.train.run_files import mark_run

QUICK = ("--evaluate.interval_steps", "0", "--log.telemetry_interval_steps", "0")
Tree = dict[str, bytes]

# `python -c STAND_STILL FILE ARGUMENTS…`: the command, which stands still before its first step.
STAND_STILL = """
import sys, time
from pathlib import Path
from trifocal.train.step import TrainStep
from trifocal.cli import main
def still(*args, **kwargs):
    Path(sys.argv[1]).touch()
    time.sleep(600)
TrainStep.run = still
sys.exit(main(sys.argv[2:]))
"""


def tree(folder: Path) -> Tree:
    """Every file of a run; not the lock."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOCK_FILE)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def beside(run: Path) -> list[str]:
    """The folders beside a run that belong to its replacement."""
    return [path.name for path in sorted(run.parent.iterdir()) if path.name.lstrip(".").startswith(f"{run.name}.")]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of a finished run in the folder `run` beside it, of four steps and another seed."""
    path = write_config(tmp_path)
    train(make_config(tmp_path, *QUICK, "--train.steps", "4", "--run.seed", "3"))
    return path


@pytest.fixture
def standing_still(config: Path) -> Iterator[Callable[[], Any]]:
    """Starts a process that is to replace the run, and stands still before its first step."""
    started: list[Any] = []

    def start() -> Any:
        mark = config.with_name("mark")
        mark.unlink(missing_ok=True)
        command = [sys.executable, "-c", STAND_STILL, str(mark), "train", str(config), "--overwrite", *QUICK]
        with config.with_name("error").open("wb") as error:
            variables = environment(OMP_NUM_THREADS=1)
            process = warm.popen(command, stdout=subprocess.DEVNULL, stderr=error, env=variables)
        started.append(process)
        deadline = time.monotonic() + 60
        while not mark.exists():
            assert time.monotonic() < deadline and process.poll() is None, config.with_name("error").read_text()
            time.sleep(0.05)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_wrong_setting_of_the_data_costs_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, broken = config.with_name("run"), config.with_name("broken")
    broken.mkdir()
    # Long enough for the first batch to be read before the line that cannot be.
    for index in range(4):
        (broken / f"{index}.jsonl").write_text('{"text": "some words"}\n{"words": "no text"}\n')
    before = tree(run)
    for source, says in ((f"jsonl:{broken}", "text"), (f"jsonl:{broken}#words", "words")):
        assert main(["train", str(config), "--overwrite", *QUICK, "--data.source", source]) == 2
        error = capsys.readouterr().err
        assert says in error and "Traceback" not in error, error
        assert f"the run that was in {run} is there as before" in error
        assert tree(run) == before and beside(run) == ["run.toml"]
    assert resume(run).step == 4
    assert main(["generate", str(run), "--prompt", "the", "--max-new-tokens", "2"]) == 0


def test_a_start_that_was_killed_is_undone_by_the_next(
    config: Path, standing_still: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = config.with_name("run")
    before = tree(run)
    for again in ("resume", "refused", "overwrite"):
        process = standing_still()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert tree(replaced_path(run)) == before
        capsys.readouterr()
        assert main(["generate", str(run), "--prompt", "the"]) == 2
        assert f"the run that was there before is in {replaced_path(run)}" in capsys.readouterr().err
        assert main(["generate", str(replaced_path(run)), "--prompt", "the", "--max-new-tokens", "2"]) == 0
        if again == "resume":
            assert main(["train", "--resume", str(run)]) == 0
            before = tree(run)
            assert [row["step"] for row in read_metrics(run / "metrics.jsonl", "train")] == [1, 2, 3, 4]
        elif again == "refused":
            assert main(["train", str(config)]) == 2
            assert tree(run) == before
        else:
            assert main(["train", str(config), "--overwrite", *QUICK]) == 0
            assert len(read_metrics(run / "metrics.jsonl", "train")) == 6
        printed = capsys.readouterr()
        assert f"the run that was in {run} is there as before" in printed.err
        assert ("holds a run already" in printed.err) == (again == "refused")
        assert (failed_path(run) / "config.toml").exists()
        assert not replaced_path(run).exists()


def test_another_process_leaves_both_runs_alone(
    config: Path, standing_still: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "WAIT_SECONDS", 0.0)
    run = config.with_name("run")
    before = tree(run)
    process = standing_still()
    new = tree(run).keys()
    for attempt in (
        lambda: train(make_config(config.parent), overwrite=True),
        lambda: train(make_config(config.parent)),
        lambda: resume(run),
    ):
        with pytest.raises(UserError, match=f"is in use: process {process.pid} "):
            attempt()
    assert tree(replaced_path(run)) == before and tree(run).keys() == new


def test_a_run_that_starts_well_leaves_nothing_of_the_other(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config.with_name("run")
    before, seen = tree(run), []

    def look(step: int, arguments: dict[str, Any]) -> None:
        seen.append(tree(replaced_path(run)))

    before_step(monkeypatch, look)
    assert train(make_config(config.parent, *QUICK), overwrite=True).finished
    assert seen == [before, *[{}] * 5]
    expected = {
        "config.toml",
        "env.json",
        "backends.json",
        "metrics.jsonl",
        "heartbeat",
        "checkpoints",
        "dumps",
        "weights",
        ".trifocal_run",
    }
    assert {path.name for path in run.iterdir()} == expected | {LOCK_FILE}
    assert beside(run) == ["run.toml"]


def test_a_first_step_that_fails_keeps_its_dump_and_gives_the_place_back(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config.with_name("run")
    before = tree(run)

    def explode(step: int, arguments: dict[str, Any]) -> None:
        next(arguments["loss_function"].parameters()).data.fill_(float("inf"))

    before_step(monkeypatch, explode)
    with pytest.raises(NonFiniteError):
        train(make_config(config.parent, *QUICK), overwrite=True)
    assert f"is there as before: the first step of its replacement did not end; its files are in {run}.failed" in (
        capsys.readouterr().err
    )
    assert (failed_path(run) / "dumps" / "step_00000001" / "summary.json").is_file()
    assert tree(run) == before
    monkeypatch.undo()
    assert train(make_config(config.parent, *QUICK), overwrite=True).finished
    assert not replaced_path(run).exists()


def test_folders_of_these_names_that_are_no_runs_are_left_alone(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config.with_name("run")
    before = tree(run)
    for place in (replaced_path(run), failed_path(run)):
        place.mkdir()
        (place / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds a run already"):
        train(make_config(config.parent))
    with pytest.raises(UserError, match=r"stays as it was: it cannot be renamed to \S+/\.run\.replaced .*not empty"):
        train(make_config(config.parent, *QUICK), overwrite=True)
    assert tree(run) == before
    (replaced_path(run) / "thesis.tex").unlink()

    def fail(step: int, arguments: dict[str, Any]) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        before_step(patch, fail)
        with pytest.raises(MemoryError):
            train(make_config(config.parent, *QUICK), overwrite=True)
    assert "could not be put back, and waits in" in capsys.readouterr().err
    assert tree(replaced_path(run)) == before and (failed_path(run) / "thesis.tex").exists()
    failed_path(run).rename(run.parent / "thesis")
    assert resume(run).step == 4
    assert tree(run).keys() == before.keys()


def website(folder: Path) -> None:
    """A folder of somebody's with a file of the name that a run's configuration has."""
    (folder / "content").mkdir(parents=True)
    (folder / "content" / "index.md").touch()
    (folder / "config.toml").write_text('baseURL = "https://example.org/"\n')


def with_notes(run: Path) -> None:
    (run / "notes").mkdir()
    (run / "thesis.tex").touch()


def with_linked_checkpoints(run: Path) -> None:
    (run / "checkpoints").rename(run.parent / "elsewhere")
    (run / "checkpoints").symlink_to(run.parent / "elsewhere")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda run: (shutil.rmtree(run), website(run)), r"has no \.trifocal_run, by which a run is known.*--resume"),
        (lambda run: (run / ".trifocal_run").write_text("mine"), r"has no \.trifocal_run"),
        (lambda run: (run / ".trifocal_run").unlink(), r"of an older version, trifocal train --resume \S+/run adds"),
        (with_notes, "beside the run it holds notes, thesis.tex; move that"),
        (with_linked_checkpoints, r"beside the run it holds checkpoints \(a link\)"),
    ],
)
def test_what_is_not_a_run_is_never_replaced(config: Path, make: Callable[[Path], Any], says: str) -> None:
    run = config.with_name("run")
    make(run)
    before = tree(run)
    with pytest.raises(UserError, match=says):
        train(make_config(config.parent, *QUICK), overwrite=True)
    assert tree(run) == before and beside(run) == ["run.toml"]


def test_a_run_of_an_older_version_is_known_after_a_resume(config: Path) -> None:
    run = config.with_name("run")
    (run / ".trifocal_run").unlink()
    assert resume(run).step == 4
    assert train(make_config(config.parent, *QUICK), overwrite=True).finished


def test_a_mount_point_and_the_folder_one_is_in_are_not_renamed(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config.with_name("run")
    before = tree(run)
    new = make_config(config.parent, *QUICK)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_mount", lambda path: path == run)
        with pytest.raises(UserError, match="it is a mount point, which cannot be renamed; choose another"):
            train(new, overwrite=True)
    with monkeypatch.context() as patch:
        patch.chdir(run / "checkpoints")
        with pytest.raises(UserError, match="it is the folder that you are in"):
            train(new, overwrite=True)
    assert tree(run) == before and beside(run) == ["run.toml"]


def test_a_link_to_a_run_stays_one(config: Path) -> None:
    run, volume = config.with_name("run"), config.with_name("volume")
    volume.mkdir()
    run.rename(volume / "real")
    run.symlink_to(volume / "real")
    assert train(make_config(config.parent, *QUICK), overwrite=True).finished
    assert run.is_symlink() and len(read_metrics(volume / "real" / "metrics.jsonl", "train")) == 6
    assert [path.name for path in volume.iterdir()] == ["real"]


def test_ctrl_c_before_the_first_step_gives_the_place_back(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config.with_name("run")
    before = tree(run)

    def interrupt(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    monkeypatch.setattr("trifocal.train.run_logger.write_environment", interrupt)
    assert main(["train", str(config), "--overwrite", *QUICK]) == 130
    assert f"the run that was in {run} is there as before" in capsys.readouterr().err
    assert tree(run) == before and beside(run) == ["run.toml"]


class Killed(BaseException):
    """In place of SIGKILL."""


@contextlib.contextmanager
def killed_at(call: int) -> Iterator[list[int]]:
    """The process dies before one of its changes to the disk; yields how many there were."""
    calls = [0]

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == call:
                raise Killed
            return original(*arguments, **options)

        return change

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "mkdir", "rmdir", "unlink", "write_text"):
            patch.setattr(Path, name, counting(getattr(Path, name)))
        # Of a whole folder: its single steps leave nothing but a smaller one.
        patch.setattr("shutil.rmtree", counting(__import__("shutil").rmtree))
        with contextlib.suppress(Killed):
            yield calls


@pytest.mark.parametrize("fails", [True, False])
def test_it_may_be_killed_at_any_moment(tmp_path: Path, fails: bool) -> None:
    """Before each single change to the disk, and again before each one of the recovery."""

    def replace(run: Path) -> None:
        with RunLock() as lock:
            lock.acquire(run)
            restore_replaced(run, lock)
            replace_run(run, lock)
            mark_run(run)
            (run / "config.toml").write_text("new")
            (run / "weights").mkdir()
            (run / "weights" / "w").write_text("new")
            restore_replaced(run, lock) if fails else delete_replaced(run, lock)

    def make(run: Path) -> Tree:
        run.mkdir()
        mark_run(run)
        for name in ("config.toml", "metrics.jsonl", "checkpoints/step_00000004/w", "weights/w", "dumps/old.txt"):
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_text(f"old {name}")
        return tree(run)

    outcomes = set()
    with killed_at(0) as calls:
        make(tmp_path / "count")
        calls[0] = 0
        replace(tmp_path / "count")
        changes = calls[0]
    assert changes == (10 if fails else 9)
    for first in range(1, changes + 1):
        for second in range(1, changes + 1):
            run = tmp_path / f"{first}_{second}"
            old = make(run)
            with killed_at(first):
                replace(run)
            with RunLock() as lock, killed_at(second) as calls:
                restore_replaced(run, lock)
            with RunLock() as lock:
                restore_replaced(run, lock)
            found = tree(run)
            outcomes.add(found == old)
            if found != old:
                assert not fails
                assert {**found, ".trifocal_run": b""} == {
                    "config.toml": b"new",
                    "weights/w": b"new",
                    ".trifocal_run": b"",
                }
            if calls[0] < second:
                # The recovery was over before.
                break
    assert outcomes == ({True} if fails else {True, False})


def test_a_full_disk_and_a_folder_that_cannot_be_renamed_leave_it_whole(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config.with_name("run")
    before = tree(run)
    new = make_config(config.parent, *QUICK)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    original = Path.rename

    def busy(path: Path, target: Path) -> Path:
        if path == run:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return original(path, target)

    back = "cannot make run.directory .*No space left.*; the run .* is there as before"
    for place, replacement, says in (
        ("pathlib.Path.rename", busy, "stays as it was: it cannot be renamed to .*busy"),
        ("trifocal.train.run_directory.mark_run", full, back),
        ("trifocal.train.run_directory.save_config", full, back),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, replacement)
            with pytest.raises(UserError, match=says):
                train(new, overwrite=True)
        assert tree(run) == before and beside(run) == ["run.toml"]


def test_what_cannot_be_deleted_is_said_and_never_put_back(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config.with_name("run")
    with monkeypatch.context() as patch:
        patch.setattr("trifocal.train.replaced_run.shutil.rmtree", lambda *_, **__: None)
        assert train(make_config(config.parent, *QUICK), overwrite=True).finished
    assert "/.run.deleting could not be deleted: it is not needed any more; rm -r " in capsys.readouterr().out
    assert resume(run).step == 6
    assert beside(run) == ["run.toml"]


@pytest.mark.parametrize("always", [True, False])
def test_torchrun_starts_again_and_never_takes_the_earlier_run_for_its_own(
    config: Path, tmp_path: Path, always: bool
) -> None:
    """Two starts with one store, as torchrun keeps it; a process of the first is killed."""
    run, fault, store = config.with_name("run"), tmp_path / "fault", dist.TCPStore("127.0.0.1", 0, is_master=True)
    torchrun = {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    before = tree(run)
    name = "die_in_first_steps" if always else "die_in_first_step"
    for expected in ([1, -signal.SIGKILL], [1, -signal.SIGKILL] if always else [0, 0]):
        workers = start(tmp_path, config, "--overwrite", *QUICK, fault=name, FAULT_FILE=str(fault), **torchrun)
        assert [end.status for end in workers.join()] == expected, workers.error(0)
        assert fault.exists()
    if always:
        with RunLock() as lock:
            restore_replaced(run, lock)
        assert tree(run) == before
    else:
        rows = read_metrics(run / "metrics.jsonl")
        assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
        assert "resumed" not in [row.get("name") for row in rows]
        assert not replaced_path(run).exists()
