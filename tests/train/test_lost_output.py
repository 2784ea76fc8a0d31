"""A run outlives its standard output and its terminal."""

import os
import pty
import shlex
import subprocess
import sys
import time
from pathlib import Path

from tests import warm
from tests.children import environment, wait_for_end
from tests.train.tiny import write_config
from trifocal.runlog import read_metrics
from trifocal.train.checkpoint.folders import list_checkpoints
from trifocal.train.checkpoint.manifest import verify_checkpoint

QUICK = ("--evaluate.interval_steps", "0", "--log.telemetry_interval_steps", "0")


def command(folder, *flags):
    return [sys.executable, "-m", "trifocal", "train", str(write_config(folder)), *QUICK, *flags]


def steps(run):
    return [row["step"] for row in read_metrics(run / "metrics.jsonl", "train")]


def assert_whole(run):
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert (run / "weights" / "model.safetensors").is_file()


def test_closed_output_costs_no_step(tmp_path):
    """A real process, as a shell starts it: Python itself sees what is closed."""
    done = subprocess.run(
        ["bash", "-c", f"{shlex.join(command(tmp_path))} >&- 2>&-"],
        capture_output=True, text=True, env=environment(OMP_NUM_THREADS=1), timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert_whole(tmp_path / "run")


def test_full_output_costs_no_step(tmp_path):
    """Nor is anything left for Python to write at its end."""
    code = """
import sys
from trifocal.cli import main
# Python would open them so, unless PYTHONUNBUFFERED is set.
sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))
status = main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
sys.exit(status)
"""
    with Path("/dev/full").open("wb") as full:
        arguments = [sys.executable, "-c", code, *command(tmp_path)[3:]]
        process = warm.popen(arguments, stdout=full, stderr=full, env=environment(OMP_NUM_THREADS=1))
    assert wait_for_end(process, 120) == 0
    assert_whole(tmp_path / "run")


def test_a_closed_terminal_stops_and_saves(tmp_path):
    """With the live bar on the terminal, which goes away: SIGHUP, and an error at each write from then on."""
    run, script = tmp_path / "run", tmp_path / "script"
    script.write_text(f"exec {shlex.join(command(tmp_path, '--train.steps', '100000'))}\n")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("bash", ["bash", str(script)], environment(OMP_NUM_THREADS=1))
    deadline = time.monotonic() + 240
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
