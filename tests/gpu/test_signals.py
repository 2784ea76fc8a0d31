"""A signal to the process group of a run that compiles, at moments from its start to its third step.

Each run ends within 15 s: with the checkpoint of its last step, or before its first one; no compiler is left behind.
"""

import os
import signal
import sys
import time

import pytest
import torch

from tests import warm
from tests.children import environment, wait_for_end
from tests.train.tiny import write_config
from trifocal.runlog import read_metrics
from trifocal.train.checkpoint.folders import checkpoint_step, list_checkpoints
from trifocal.train.checkpoint.manifest import verify_checkpoint

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if GPU else []

# What the run has written, and seconds after it.
MOMENTS = [
    ("", 0.5),
    ("env.json", 0.0),
    ("compiling", 0.0),
    ("compiling", 2.0),
    ('"step":1,', 0.0),
    ('"step":2,', 0.0),
]
NUMBERS = [signal.SIGINT, signal.SIGTERM]
# A CPU compiles with gcc, in children of the process itself, and for a minute.
ALL = [(moment, number) for moment in MOMENTS for number in NUMBERS]
CASES = ALL if GPU else [(("compiling", 2.0), signal.SIGINT)]


def has_written(run, what):
    """Whether the run has a file of this name, or a row of metrics with this text."""
    metrics = run / "metrics.jsonl"
    return not what or (run / what).exists() or (metrics.exists() and what in metrics.read_text())


def group_exists(group):
    """Whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("moment", "number"), CASES)
def test_a_signal_to_the_group_ends_a_run_that_compiles(tmp_path, moment, number):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "trifocal", "train", str(write_config(tmp_path)), "--train.compile", "true"]
    command += ["--run.device", "cuda" if GPU else "cpu", "--train.steps", "1000", "--checkpoint.interval_steps", "0"]
    caches = {"TORCHINDUCTOR_CACHE_DIR": tmp_path / "inductor", "TRITON_CACHE_DIR": tmp_path / "triton"}
    with (tmp_path / "error").open("wb") as error:
        process = warm.popen(command, stdout=error, stderr=error, env=environment(**caches), start_new_session=True)
    try:
        deadline = time.monotonic() + 150
        while not has_written(run, moment[0]):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "error").read_text()
            time.sleep(0.02)
        time.sleep(moment[1])
        begin = time.monotonic()
        os.killpg(process.pid, number)
        status = wait_for_end(process, 15)
        while group_exists(process.pid) and time.monotonic() < begin + 60:
            time.sleep(0.1)
        assert not group_exists(process.pid), "a compiler is left"
    finally:
        if group_exists(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    error = (tmp_path / "error").read_text()
    checkpoints = list_checkpoints(run / "checkpoints")
    if status == 0:
        (newest,) = checkpoints
        verify_checkpoint(newest)
        assert read_metrics(run / "metrics.jsonl", "train")[-1]["step"] == checkpoint_step(newest) > 0
    else:
        # Before Python has begun to listen, the signal itself ends the process.
        assert status in (128 + number, -number), error
        assert not checkpoints and moment[0] != '"step":2,', error
