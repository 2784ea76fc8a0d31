"""A run that is to be replaced stays until the first step of the new one has ended, whatever happens before."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.children import ROOT, environment
from tests.train.tiny import before_step, make_config, write_config
from trifocal.cli import main
from trifocal.diagnostics import read_metrics
from trifocal.errors import UserError
from trifocal.train import NonFiniteError, resume, train
from trifocal.train import lock as lock_module
from trifocal.train.earlier_run import EARLIER_RUN, FAILED_START, let_go, put_back, set_aside
from trifocal.train.lock import LOCK_FILE, RunLock

QUICK = ("--evaluate.interval_steps", "0", "--log.telemetry_interval_steps", "0")
Tree = dict[str, bytes]

# `python -c STAND_STILL FILE ARGUMENTS…`: the command, which stands still before its first step.
STAND_STILL = """
import sys, time
from pathlib import Path
import trifocal.train.loop as loop
from trifocal.cli import main
def still(*args, **kwargs):
    Path(sys.argv[1]).touch()
    time.sleep(600)
loop.train_step = still
sys.exit(main(sys.argv[2:]))
"""


def tree(folder: Path) -> Tree:
    """Every file of a run; not the lock, nor what a failed start has left."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOCK_FILE)
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return {name: content for name, content in found.items() if not name.startswith(FAILED_START)}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of a finished run in the folder `run` beside it, of four steps and another seed."""
    path = write_config(tmp_path)
    train(make_config(tmp_path, *QUICK, "--train.steps", "4", "--run.seed", "3"))
    return path


@pytest.fixture
def standing_still(config: Path) -> Iterator[Callable[[], "subprocess.Popen[str]"]]:
    """Starts a process that is to replace the run, and stands still before its first step."""
    started: list[subprocess.Popen[str]] = []

    def start() -> "subprocess.Popen[str]":
        mark = config.with_name("mark")
        mark.unlink(missing_ok=True)
        command = [sys.executable, "-c", STAND_STILL, str(mark), "train", str(config), "--overwrite", *QUICK]
        process = subprocess.Popen(command, env=environment(OMP_NUM_THREADS=1), stderr=subprocess.PIPE, text=True)
        started.append(process)
        deadline = time.monotonic() + 60
        while not mark.exists():
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.05)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_wrong_setting_of_the_data_costs_nothing(config: Path) -> None:
    run, broken = config.with_name("run"), config.with_name("broken")
    broken.mkdir()
    # Long enough for the first batch to be read before the line that cannot be.
    for index in range(4):
        (broken / f"{index}.jsonl").write_text('{"text": "some words"}\n{"words": "no text"}\n')
    before = tree(run)
    for source, says in ((f"jsonl:{broken}", "text"), (f"jsonl:{broken}#words", "words")):
        command = [
            sys.executable,
            "-m",
            "trifocal",
            "train",
            str(config),
            "--overwrite",
            *QUICK,
            "--data.source",
            source,
        ]
        ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2 and says in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
        assert f"the run that was in {run} is there as before" in ended.stderr
        assert tree(run) == before and not (run / FAILED_START).exists()
    assert resume(run).step == 4
    assert main(["generate", str(run), "--prompt", "the", "--max-new-tokens", "2"]) == 0


def test_a_start_that_was_killed_is_undone_by_the_next(
    config: Path, standing_still: Callable[[], "subprocess.Popen[str]"], capsys: pytest.CaptureFixture[str]
) -> None:
    run = config.with_name("run")
    before = tree(run)
    for again in ("resume", "refused", "overwrite"):
        process = standing_still()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert tree(run / EARLIER_RUN) == before
        capsys.readouterr()
        assert main(["generate", str(run), "--prompt", "the"]) == 2
        assert f"the run that was there before is in {run / EARLIER_RUN}" in capsys.readouterr().err
        assert main(["generate", str(run / EARLIER_RUN), "--prompt", "the", "--max-new-tokens", "2"]) == 0
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
        assert (run / FAILED_START / "config.toml").exists() == (again == "refused")
    assert not any((run / name).exists() for name in (EARLIER_RUN, FAILED_START))


def test_another_process_leaves_both_runs_alone(
    config: Path, standing_still: Callable[[], "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
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
    assert tree(run / EARLIER_RUN) == before and tree(run).keys() == new


def test_a_run_that_starts_well_leaves_nothing_of_the_other(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config.with_name("run")
    (run / "notes.txt").touch()
    before, seen = tree(run), []

    def look(step: int, arguments: dict[str, Any]) -> None:
        seen.append(tree(run / EARLIER_RUN))

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
    }
    assert {path.name for path in run.iterdir()} == expected | {LOCK_FILE}


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
    assert (
        f"is there as before: the first step of its replacement did not end; what the other one left is in {run}"
        in (capsys.readouterr().err)
    )
    assert (run / FAILED_START / "dumps" / "step_00000001" / "summary.json").is_file()
    assert tree(run) == before
    monkeypatch.undo()
    assert train(make_config(config.parent, *QUICK), overwrite=True).finished
    assert not (run / FAILED_START).exists()


def test_a_folder_of_that_name_without_a_run_is_not_taken_for_one(config: Path) -> None:
    run = config.with_name("run")
    (run / EARLIER_RUN).mkdir()
    (run / EARLIER_RUN / "thesis.tex").touch()
    before = tree(run)
    with pytest.raises(UserError, match="holds a run already"):
        train(make_config(config.parent))
    with pytest.raises(UserError, match=r"cannot be moved aside, and stays as it was: .*not empty"):
        train(make_config(config.parent, *QUICK), overwrite=True)
    assert tree(run) == before


def test_ctrl_c_before_the_first_step_gives_the_place_back(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config.with_name("run")
    before = tree(run)

    def interrupt(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    monkeypatch.setattr("trifocal.train.loop.open_records", interrupt)
    assert main(["train", str(config), "--overwrite", *QUICK]) == 130
    assert f"the run that was in {run} is there as before" in capsys.readouterr().err
    assert tree(run) == before and not (run / FAILED_START).exists()


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
        for name in ("rename", "mkdir", "rmdir", "unlink"):
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
            lock.take(run)
            put_back(run, lock)
            set_aside(run, lock)
            (run / "config.toml").write_text("new")
            (run / "dumps").mkdir()
            (run / "dumps" / "new.txt").write_text("new")
            (run / "weights").mkdir()
            (run / "weights" / "w").write_text("new")
            put_back(run, lock) if fails else let_go(run)

    def make(run: Path) -> Tree:
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
    assert changes > 10
    for first in range(1, changes + 1):
        for second in range(1, changes + 1):
            run = tmp_path / f"{first}_{second}"
            old = make(run)
            with killed_at(first):
                replace(run)
            with RunLock() as lock, killed_at(second) as calls:
                put_back(run, lock)
            with RunLock() as lock:
                put_back(run, lock)
            found = tree(run)
            outcomes.add(found == old)
            if found != old:
                assert not fails
                assert found == {"config.toml": b"new", "weights/w": b"new", "dumps/new.txt": b"new"}
            if calls[0] < second:
                # The recovery was over before.
                break
    assert outcomes == ({True} if fails else {True, False})


def test_a_full_disk_and_a_file_that_cannot_be_moved_leave_it_whole(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config.with_name("run")
    before = tree(run)
    new = make_config(config.parent, *QUICK)
    original_mkdir, original_rename = Path.mkdir, Path.rename

    def no_room(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name.startswith(EARLIER_RUN):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original_mkdir(path, *arguments, **options)

    def busy(path: Path, target: Path) -> Path:
        # As a folder that another file system is mounted on.
        if path.name == "metrics.jsonl":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return original_rename(path, target)

    for name, replacement, says in (("mkdir", no_room, "No space left"), ("rename", busy, "busy: .*metrics.jsonl")):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, replacement)
            with pytest.raises(UserError, match=f"cannot be moved aside, and stays as it was: .*{says}"):
                train(new, overwrite=True)
        assert tree(run) == before and not list(run.glob(f"{EARLIER_RUN}*"))
    with monkeypatch.context() as patch:
        patch.setattr("trifocal.train.run_directory.save_config", lambda *_: no_room(Path(EARLIER_RUN)))
        with pytest.raises(
            UserError, match=r"cannot make run.directory .*No space left.*; the run .* is there as before"
        ):
            train(new, overwrite=True)
    assert tree(run) == before and not list(run.glob(f"{EARLIER_RUN}*"))


@pytest.mark.parametrize("always", [True, False])
def test_torchrun_starts_again_and_never_takes_the_earlier_run_for_its_own(
    config: Path, tmp_path: Path, always: bool
) -> None:
    run = config.with_name("run")
    before = tree(run)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
        str(ROOT / "tests" / "distributed" / "faults.py"), "die_in_first_steps" if always else "die_in_first_step",
        "train", str(config), "--overwrite", *QUICK,
    ]  # fmt: skip
    variables = environment(OMP_NUM_THREADS=1, FAULT_FILE=tmp_path / "fault", GLOO_SOCKET_IFNAME="lo")
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert (tmp_path / "fault").exists()
    assert (ended.returncode == 0) != always, ended.stderr
    if always:
        with RunLock() as lock:
            put_back(run, lock)
        assert tree(run) == before
    else:
        rows = read_metrics(run / "metrics.jsonl")
        assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
        assert "resumed" not in [row.get("name") for row in rows]
        assert not any((run / name).exists() for name in (EARLIER_RUN, FAILED_START))
