"""Stacks when the process dies, and in one line."""

import gc
import io
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from rich.console import Console

from tests import warm
from tests.children import environment, wait_for_end
from tests.train.tiny import write_config
from trifocal.report.live_view import render
from trifocal.report.summary import summarise
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.runlog.run import read_run
from trifocal.runlog.stalls.watchdog import Watchdog


@pytest.fixture
def no_garbage_collector():
    """Circles of references stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_look_holds_no_tensor_of_the_frames_that_it_saw(no_garbage_collector, tmp_path):
    heartbeat = Heartbeat(tmp_path / "heartbeat", interval_seconds=0.01)
    rows = []
    seen = threading.Event()

    def observe(row):
        rows.append(row)
        seen.set()

    def backward():
        tile = torch.ones(1000)
        for _ in range(3):
            seen.clear()
            assert seen.wait(10)
        heartbeat.snapshot()
        return weakref.ref(tile)

    with heartbeat, Watchdog(heartbeat, tmp_path), heartbeat.phase("backward"):
        heartbeat.observers.append(observe)
        tile = backward()
        assert any("backward (test_stacks.py:" in str(row) for row in rows), "it was seen"
        seen.clear()
        assert seen.wait(10)
        assert tile() is None


FATAL_STEP = """
import os, sys
from trifocal.cli import main
from trifocal.train.step.step import TrainStep

run_step = TrainStep.run

def die_in_step_3(self, step, *args, **kwargs):
    if step == 3:
        os.abort()
    return run_step(self, step, *args, **kwargs)

TrainStep.run = die_in_step_3
sys.exit(main(["train", sys.argv[1]]))
"""


def test_a_fatal_signal_leaves_the_stacks_of_the_run(tmp_path):
    """An abort of NCCL or a fault in a driver ends a process so."""
    command = [sys.executable, "-c", FATAL_STEP, str(write_config(tmp_path))]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = warm.popen(command, env=environment(OMP_NUM_THREADS=1), **quiet)
    assert wait_for_end(process, 120) == -signal.SIGABRT
    stacks = (tmp_path / "run" / "dumps" / "stacks_rank0.txt").read_text()
    assert "Fatal Python error: Aborted" in stacks and "die_in_step_3" in stacks
    run = read_run(tmp_path / "run")
    beats = run.heartbeats[0]
    beats[-1]["unix_time_seconds"] -= 1000.0
    assert str(run.crash_stacks(0)) in summarise(run)[3].text
    console = Console(file=io.StringIO(), width=300)
    console.print(render(run))
    assert str(run.crash_stacks(0)) in console.file.getvalue()
