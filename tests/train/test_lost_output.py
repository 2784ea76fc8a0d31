"""A run outlives its standard output and its terminal: real processes, as a shell starts them."""

import os
import pty
import shlex
import subprocess
import sys
import time

import pytest

from tests.children import environment
from tests.train.tiny import write_config
from trifocal.runlog import read_metrics
from trifocal.train.checkpoint.folders import list_checkpoints
from trifocal.train.checkpoint.manifest import verify_checkpoint

QUICK = ("--evaluate.interval_steps", "0", "--log.telemetry_interval_steps", "0")


def command(folder, *flags):
    return shlex.join([sys.executable, "-m", "trifocal", "train", str(write_config(folder)), *QUICK, *flags])


def shell(script, **variables):
    """Run a script of bash; its processes end with the test."""
    variables = {"OMP_NUM_THREADS": 1, **variables}
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment(**variables), timeout=120
    )


def steps(run):
    return [row["step"] for row in read_metrics(run / "metrics.jsonl", "train")]


@pytest.mark.parametrize("script", ["{train} > /dev/full 2> /dev/full", "{train} >&- 2>&-"], ids=["full", "closed"])
def test_lost_output_costs_no_step(tmp_path, script):
    run = tmp_path / "run"
    done = shell(script.format(train=command(tmp_path)))
    assert (done.returncode, done.stderr) == (0, "")
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert (run / "weights" / "model.safetensors").is_file()


def test_a_closed_terminal_stops_and_saves(tmp_path):
    """With the live bar on the terminal, which goes away: SIGHUP, and an error at each write from then on."""
    run, script = tmp_path / "run", tmp_path / "script"
    script.write_text(f"exec {command(tmp_path, '--train.steps', '100000')}\n")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("bash", ["bash", str(script)], environment(OMP_NUM_THREADS=1))
    deadline = time.monotonic() + 90
    shown = b""
    # Before the first step's end, a signal would find nothing to save.
    while b"tokens/s" not in shown or len(steps(run)) < 2:
        assert time.monotonic() < deadline, shown
        shown += os.read(terminal, 65536)
    os.close(terminal)
    status = None
    while status is None and time.monotonic() < deadline:
        found, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if found else None
        time.sleep(0.05)
    if status is None:
        os.kill(pid, 9)
    assert status == 0
    newest = list_checkpoints(run / "checkpoints")[-1]
    assert verify_checkpoint(newest)["step"] == steps(run)[-1] < 100000
