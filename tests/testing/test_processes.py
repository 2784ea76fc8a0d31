"""Processes that a check starts end with it."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests import warm
from tests.children import environment, wait_for_end
from trifocal.testing.processes import ProcessesFailed, run_processes


def test_a_signal_while_processes_start_leaves_none(tmp_path, monkeypatch):
    popen, started = subprocess.Popen, []
    begin = threading.Thread.start

    def slowly(thread):
        # On a busy machine, a thread does much before the one that started it goes on.
        begin(thread)
        time.sleep(0.5)

    def start(*args, **options):
        started.append(popen(*args, **options))
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(threading.Thread, "start", slowly)
    with pytest.raises(KeyboardInterrupt):
        run_processes(["-c", "import time; time.sleep(60)"], 2, tmp_path, limit_seconds=50)
    left = [process for process in started if process.poll() is None]
    for process in left:
        process.kill()
        process.wait()
    assert len(started) == 2 and not left


def test_errors_are_quoted_without_colours(tmp_path, monkeypatch):
    """As Python 3.13 and newer would write them in a service of CI."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(ProcessesFailed, match=r"\nRuntimeError: 0$"):
        run_processes(
            ["-c", "import os; raise RuntimeError(os.environ['PYTHON_COLORS'])"], 1, tmp_path, limit_seconds=50
        )


def test_a_process_that_does_not_end_leaves_its_stacks_and_its_child_s(tmp_path):
    """The tests' own wait, whose message is all that a failure in CI leaves."""
    code = (
        "import subprocess, sys, threading, pathlib\n"
        "def hang(): threading.Event().wait()\n"
        "child = 'def hang(): import time; print(flush=True); time.sleep(600)\\nhang()'\n"
        "process = subprocess.Popen([sys.executable, '-c', child], stdout=subprocess.PIPE)\n"
        "process.stdout.readline(), pathlib.Path(sys.argv[1]).touch(), hang()"
    )
    with (tmp_path / "error").open("wb") as error:
        command = [sys.executable, "-c", code, str(tmp_path / "there")]
        process = warm.popen(command, stdout=error, stderr=error, env=environment())
    while not (tmp_path / "there").exists():
        assert process.poll() is None
        time.sleep(0.02)
    with pytest.raises(AssertionError, match=r"did not end in 0\.1 s") as caught:
        wait_for_end(process, 0.1)
    stacks = str(caught.value)
    assert stacks.count("in hang") == 2 and stacks.count("Fatal Python error: Aborted") == 2, stacks
    assert wait_for_end(process, 10) == -signal.SIGABRT
