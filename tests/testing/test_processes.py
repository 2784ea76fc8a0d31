"""Processes that a check starts end with it, and what it says of those that fail."""

import signal
import subprocess

import pytest

from trifocal.testing.processes import ProcessesFailed, run_processes


def test_none_outlives_the_call(tmp_path, monkeypatch):
    popen, started = subprocess.Popen, []

    def start(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    run_processes(["-c", "import time; time.sleep(30)"], 2, tmp_path, limit_seconds=50, until=lambda: True)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_errors_are_quoted_without_colours(tmp_path, monkeypatch):
    """As Python 3.13 and newer would write them in a service of CI."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(ProcessesFailed, match=r"\nRuntimeError: 0$"):
        run_processes(
            ["-c", "import os; raise RuntimeError(os.environ['PYTHON_COLORS'])"], 1, tmp_path, limit_seconds=50
        )
