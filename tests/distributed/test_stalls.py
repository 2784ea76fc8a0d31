"""Real runs, broken: an endless loop is stalled, a full disk stops nothing."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.children import environment
from tests.distributed.test_faults import QUICK
from tests.distributed.test_faults import case as case
from tests.written_runs import wait_for
from trifocal.errors import UserError
from trifocal.runlog import read_metrics
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.runlog.run import read_run
from trifocal.runlog.stalls.verdict import verdicts

OFTEN = ("--log.heartbeat_seconds", "0.2")


def judged(run):
    """The verdict on each rank by its files; none before there are any."""
    try:
        return verdicts(read_run(run, live=True))
    except UserError:
        return {}


def test_an_endless_loop_in_a_backward_hook_of_one_rank_is_stalled_and_named(case):
    workers = case.start("endless_hook", *OFTEN)
    workers.wait_for(case.fault_file)
    wait_for(lambda: {rank: found.state for rank, found in judged(case.run).items()} == {0: "stalled", 1: "stalled"})
    reason = judged(case.run)[1].reason
    assert "in backward" in reason and "endless (faults.py" in reason
    wait_for(lambda: any(case.run.glob("dumps/stalled_*/summary.md")))
    (summary,) = case.run.glob("dumps/stalled_*/summary.md")
    wait_for(lambda: "rank 1, which has not called it" in summary.read_text())
    text = summary.read_text()
    assert "is stalled in backward" in text.splitlines()[0]
    assert "- Rank 0 waits in gloo's all_reduce number" in text
    assert "- Rank 1 was in backward" in text and "at endless (faults.py" in text
    folder = summary.parent
    assert "endless" in (folder / "stacks_rank1.txt").read_text()
    assert "endless" not in (folder / "stacks_rank0.txt").read_text()
    open_ones = (folder / "collectives_rank0.txt").read_text().partition("The last")[0]
    assert "gloo all_reduce number" in open_ones and "scheduled" in open_ones
    assert "  none" in (folder / "collectives_rank1.txt").read_text().partition("The last")[0]
    # Stalled is not stopped, and neither is asking again.
    workers.send(signal.SIGUSR1, 0)
    wait_for(lambda: any(case.run.glob("dumps/asked_*/summary.md")))
    assert [process.poll() for process in workers.processes] == [None, None]
    assert "stalled" in [row["name"] for row in read_metrics(case.run / "metrics.jsonl", "event")]


@pytest.mark.filterwarnings("ignore")
def test_a_compiler_of_pytorch_is_told_from_a_stall():
    heartbeat, seen = Heartbeat(Path(os.devnull)), []

    def compiler(graph, inputs):
        # In the heartbeat's thread, as in a run.
        seen.append(pool.submit(heartbeat.snapshot).result()["compiling"])
        return graph

    with ThreadPoolExecutor(1) as pool:
        torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(1))
        assert seen == [True] and not pool.submit(heartbeat.snapshot).result()["compiling"]


def can_mount():
    """Whether this user may mount a small disk."""
    if shutil.which("unshare") is None:
        return False
    mount = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(mount, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="no disk can be mounted here")
def test_a_full_disk_under_the_diagnostics_never_stops_training(case):
    """A disk of 4 MB that is full for three steps, one of them stalled: rows, dumps and a checkpoint are missing."""
    faults = Path(__file__).with_name("faults.py")
    # All happens in the namespace that has the disk; its files are copied out at the end.
    disk, left = case.folder / "disk", case.folder / "left"
    disk.mkdir()
    train = [
        sys.executable, str(faults), "full_disk", "train", str(case.config), "--run.directory", str(disk / "run"),
        "--log.heartbeat_seconds", "0.1", "--log.sample_interval_steps", "1", "--log.sample_tokens", "4",
        "--train.steps", "8", *QUICK,
    ]  # fmt: skip
    script = f"mount -t tmpfs -o size=4m none {disk} && {shlex.join(train)} && cp -r {disk}/run {left}"
    variables = environment(OMP_NUM_THREADS=1, RUN=disk, FAULT_FILE=case.fault_file)
    done = subprocess.run(["unshare", "-Urm", "sh", "-c", script], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    assert case.fault_file.exists()
    said = done.stdout + done.stderr
    assert "the checkpoint of step 4 could not be written" in said
    assert "the sample of step" in said and "No space left on device" in said
    assert "is stalled in forward" in said
    assert "cannot write the dump" in said
    steps = [row["step"] for row in read_metrics(left / "metrics.jsonl", "train")]
    assert steps[:2] == [1, 2] and steps[-2:] == [7, 8]
    assert sorted(path.name for path in (left / "checkpoints").iterdir())[-1] == "step_00000008"
