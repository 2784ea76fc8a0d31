"""The files for clusters do what they say: the Slurm job runs here, with stand-ins for Slurm's commands."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.children import ROOT, environment, wait_for_end
from tests.train.tiny import write_config
from trifocal.cli import main
from trifocal.runlog import read_metrics
from trifocal.train.checkpoint.folders import list_checkpoints

CLUSTER = ROOT / "docs" / "cluster"
COMMANDS = {
    "scontrol": '[[ $1 == show ]] && echo localhost || echo "$@" >>"$STANDINS/requeued"',
    # Signals go to the steps of a job, not to its script.
    "scancel": 'kill "-${1#--signal=}" $(cat "$STANDINS/step")',
    "srun": 'while [[ $1 == --* ]]; do shift; done; echo $$ >"$STANDINS/step"; exec "$@"',
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
}


@pytest.fixture
def slurm(tmp_path):
    """The environment of a job on one machine with one process."""
    standins = tmp_path / "standins"
    standins.mkdir()
    for name, body in COMMANDS.items():
        (standins / name).write_text(f"#!/bin/bash\n{body}\n")
        (standins / name).chmod(0o755)
    return environment(
        PATH=f"{standins}{os.pathsep}{os.environ['PATH']}", STANDINS=standins, OMP_NUM_THREADS=1,
        SLURM_JOB_ID=os.getpid(), SLURM_JOB_NODELIST="here", SLURM_NNODES=1, SLURM_GPUS_ON_NODE=1,
    )  # fmt: skip


def test_the_slurm_job_saves_when_its_time_is_up_and_goes_on_when_it_runs_again(tmp_path, slurm):
    run, requeued = tmp_path / "run", tmp_path / "standins" / "requeued"
    flags = ["--train.steps", "60", "--evaluate.interval_steps", "0", "--log.telemetry_interval_steps", "0"]
    flags += ["--checkpoint.interval_steps", "0"]
    job = ["bash", str(CLUSTER / "train.sbatch"), str(write_config(tmp_path)), str(run), *flags]
    first = subprocess.Popen(job, env=slurm, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 90
        while not (run / "metrics.jsonl").exists() or len(read_metrics(run / "metrics.jsonl", "train")) < 2:
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        wait_for_end(first, 60)
        error = first.communicate()[1]
    finally:
        first.terminate()
    assert "SIGTERM: saving at the end of this step" in error
    # torchrun ends with a status of its own for the signal, unless a thread of it outlives its interpreter.
    aborted = "terminate called without an active exception" in error
    assert first.returncode == (128 + signal.SIGABRT if aborted else 1), error
    assert requeued.read_text().split() == ["requeue", slurm["SLURM_JOB_ID"]]
    (saved,) = list_checkpoints(run / "checkpoints")
    # The second time, torchrun only shows what it would start.
    (tmp_path / "standins" / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    done = subprocess.run(job, env=slurm, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(requeued.read_text().splitlines()) == 1
    command = done.stdout.split("\n-m\ntrifocal\n")[1].split()
    assert command == ["train", "--resume", str(run)] and main(command) == 0
    assert read_metrics(run / "metrics.jsonl", "train")[-1]["step"] == 60
    (resumed,) = [row for row in read_metrics(run / "metrics.jsonl") if row.get("name") == "resumed"]
    assert saved.name == f"step_{resumed['step']:08}"


def test_the_job_for_skypilot_is_yaml_with_commands_that_bash_reads():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((CLUSTER / "train.sky.yaml").read_text())
    assert job["num_nodes"] == 2
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", job[part]], check=True)
    slurm_file = (CLUSTER / "train.sbatch").read_text()
    # The same start of the processes in both.
    for flag in ("--max-restarts=3", "--rdzv-backend=c10d", "-m trifocal train", "--overwrite"):
        assert flag in job["run"] and flag in slurm_file
