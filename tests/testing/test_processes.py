"""Processes that a check starts end with it."""

import os
import signal
import subprocess
import threading
import time

import pytest

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
