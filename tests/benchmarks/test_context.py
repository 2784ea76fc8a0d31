"""`benchmarks/context.py`: a layer in two processes, and the comparison of rows."""

import argparse
import signal
import subprocess
import sys
import time

import pytest

from tests import warm
from tests.children import ROOT, children_of, environment, load_script, wait_until_gone

context = load_script("benchmarks/context.py")


def test_a_layer_is_compared_and_timed(monkeypatch):
    warm.take_the_place_of_subprocess(monkeypatch, "trifocal.testing.processes")
    options = argparse.Namespace(device="cpu", tiny=True, tokens=0, limit=60.0)
    row = context.layer_row(2, options)
    assert row["status"] == "ok" and row["ms"] > 0 and row["without_exchange_ms"] > 0, row
    assert row["peak_gib"] is None


def test_rows_are_multiples_of_one_gpus():
    one = {"part": "layer", "gpus": 1, "status": "ok", "ms": 100.0, "peak_gib": 10.0}
    two = {**one, "gpus": 2, "ms": 50.0, "peak_gib": 6.0, "without_exchange_ms": 48.0}
    failed = {"part": "model", "gpus": 2, "status": "failed after 0 of 8 steps"}
    found = context.compared([one, two, {**failed, "gpus": 1}, failed])
    assert found[0] == one and found[3] == failed
    assert (found[1]["times_one_gpu"], found[1]["memory_of_one_gpu"]) == (2.0, 0.6)
    assert found[1]["exposed_share"] == pytest.approx(0.04)


def test_sigterm_leaves_no_process(tmp_path):
    """A time limit of somebody else's, as `timeout` has it, must not leave a GPU full."""
    command = [sys.executable, str(ROOT / "benchmarks/context.py"), "--device", "cpu", "--tiny", "--parts", "layer"]
    command += ["--gpus", "2", "--output", str(tmp_path)]
    with (tmp_path / "error").open("wb") as error:
        process = warm.popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=error)
    deadline, workers = time.monotonic() + 60, []
    while not workers:
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "error").read_text()
        workers = children_of(process.pid)
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    wait_until_gone(workers)
