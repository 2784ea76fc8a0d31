"""Runs of two processes in which one has a fault."""

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.children import ROOT, environment, free_port, wait_for_end
from tests.distributed.workers import train
from tests.train.tiny import write_config, write_documents
from tests.written_runs import wait_for
from trifocal.errors import UserError
from trifocal.runlog import read_metrics
from trifocal.runlog.jsonl import read_lines
from trifocal.train import load_config, resume
from trifocal.train import train as train_here
from trifocal.train.checkpoint.folders import list_checkpoints
from trifocal.train.checkpoint.manifest import verify_checkpoint
from trifocal.train.config.load import override
from trifocal.train.run_folder import load_run

QUICK = ("--evaluate.interval_steps", "0", "--log.telemetry_interval_steps", "0")


class Case:
    """A tiny run of two processes with a fault."""

    def __init__(self, folder):
        self.folder, self.run = folder, folder / "run"
        self.config = write_config(folder)
        self.fault_file = folder / "fault"
        self.started = []

    def start(self, fault, *flags, mode="ddp", **options):
        """Start it; with `--resume` among the flags, continue it."""
        flags = (*QUICK, "--parallel.mode", mode, *flags)
        config = None if "--resume" in flags else self.config
        workers = train(self.folder, config, *flags, fault=fault, FAULT_FILE=str(self.fault_file), **options)
        self.started.append(workers)
        return workers

    def checkpoints(self):
        """The complete ones, verified."""
        found = list_checkpoints(self.run / "checkpoints")
        for path in found:
            verify_checkpoint(path)
        return [path.name for path in found]

    def resumed_to_the_end(self, *flags):
        """Continue in this process, and finish."""
        assert resume(self.run, config=override(load_run(self.run), flags)).finished
        steps = [row["step"] for row in read_metrics(self.run / "metrics.jsonl", "train")]
        assert steps == [1, 2, 3, 4, 5, 6]


def last_beat(run, rank):
    """The last row of a rank's heartbeat, whose file is there before its first row."""
    path = run / "heartbeat" / f"rank{rank}.jsonl"
    wait_for(lambda: bool(read_lines(path)))
    return dict(read_lines(path)[-1])


@pytest.fixture
def case(tmp_path):
    case = Case(tmp_path)
    yield case
    for workers in case.started:
        workers.kill()


def test_a_signal_to_one_saves_and_ends_all_well(case):
    """Before step 3: step 3 ends, all agree before step 4, and that one is saved."""
    workers = case.start("wait_at_step", "--checkpoint.interval_steps", "0", mode="fsdp")
    workers.wait_for(case.fault_file)
    time.sleep(0.3)
    workers.send(signal.SIGHUP, 1)
    time.sleep(0.3)
    Path(f"{case.fault_file}.go").touch()
    ended = workers.finish()
    assert "stopped at step 4, which is saved" in ended[0].out
    assert "stopped" not in ended[1].out
    assert case.checkpoints() == ["step_00000004"]
    case.resumed_to_the_end()


def test_a_signal_to_one_ends_the_evaluation_of_all(case):
    """A sharded model needs all for each batch."""
    workers = case.start("endless_evaluation", "--evaluate.interval_steps", "3", mode="fsdp")
    workers.wait_for(case.fault_file)
    workers.send(signal.SIGTERM, 1)
    workers.finish()
    assert case.checkpoints()[-1] == "step_00000003"
    assert not read_metrics(case.run / "metrics.jsonl", "evaluation")


def test_a_signal_to_one_ends_the_wait_of_another_for_its_data(case):
    flags = ("--data.prefetch_batches", "1", "--log.heartbeat_seconds", "0.2", "--train.steps", "60")
    workers = case.start("stalled_data", *flags)
    workers.wait_for(case.run / "heartbeat" / "rank1.jsonl")
    wait_for(lambda: (beat := last_beat(case.run, 1))["phase"] == "data" and beat["step"] and beat["phase_seconds"] > 1)
    workers.send(signal.SIGTERM, 0)
    workers.finish()
    steps = [row["step"] for row in read_metrics(case.run / "metrics.jsonl", "train")]
    assert case.checkpoints()[-1] == f"step_{steps[-1]:08}"


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_signal_before_the_first_step_of_a_start_loses_nothing(case, ranks):
    """A new run is as if it had never begun; a resumed one keeps its checkpoint. No rank waits for another."""
    compiling = ("--train.compile", "true")
    new = ranks == (0, 1)
    if not new:
        assert train_here(load_config(case.config, (*QUICK, "--train.steps", "2"))).finished
    flags = ("--resume", str(case.run), "--train.steps", "6", *compiling)
    workers = case.start("pause_in_compilation", *(compiling if new else flags))
    workers.wait_for(case.fault_file)
    time.sleep(0.3)
    begin = time.monotonic()
    workers.send(signal.SIGTERM, *ranks)
    ended = workers.join()
    assert time.monotonic() - begin < 20
    assert [end.status for end in ended] == ([143, 143] if new else [1, 143]), ended
    assert "SIGTERM: stops before its first step" in ended[1].error
    if new:
        assert not case.run.exists()
    else:
        assert "rank 1 " in ended[0].error and "SIGTERM came before the first step" in ended[0].error, ended[0].error
        assert case.checkpoints() == ["step_00000002"]
        case.resumed_to_the_end("--train.steps", "6")


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_nan_in_one_rank_stops_all_and_is_named(case, mode):
    ended = case.start("nan", mode=mode).join()
    assert [end.status for end in ended] == [1, 1], ended
    for end in ended:
        assert "step 3: from rank 1: gradient norm nan is not finite" in end.error, end.error
        assert "first parameter with a non-finite gradient: blocks.0.mlp.up_proj.weight" in end.error
    assert case.checkpoints() == ["step_00000002"]
    assert read_metrics(case.run / "metrics.jsonl", "event")[-1]["name"] == "non_finite"


def test_data_that_fail_in_one_rank_stop_all_with_the_error(case):
    ended = case.start("data").join()
    assert [end.status for end in ended] == [2, 2], ended
    assert "rank 1: text:" in ended[0].error and "cannot be read: [Errno 5]" in ended[0].error, ended[0].error
    assert "cannot be read: [Errno 5]" in ended[1].error
    assert max(end.seconds for end in ended) < 60
    assert case.checkpoints()


def test_a_checkpoint_that_one_rank_cannot_write_is_loud_and_stops_no_run(case):
    ended = case.start("full", "--checkpoint.asynchronous", "true", mode="fsdp").finish()
    says = "[Errno 28] rank 1: [Errno 28] No space left on device"
    assert f"ERROR: the checkpoint of step 4 could not be written: {says}" in ended[0].out, ended[0].out
    assert case.checkpoints() == ["step_00000002", "step_00000006"]
    assert sorted(path.name for path in (case.run / "checkpoints").iterdir()) == case.checkpoints()


def test_another_config_is_refused(case):
    ended = case.start("", rank_flags={1: ("--train.steps", "7")}).join()
    assert [end.status for end in ended] == [2, 2], ended
    for end in ended:
        assert "the processes were started differently: " in end.error
        assert "train.steps is 6 in rank 0 and 7 in rank 1" in end.error
    assert not case.run.exists()
    assert train_here(load_config(case.config, QUICK)).finished


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--data.source", "text:text"), r"differently: text:text: the files .* is '\w+' in rank 0"),
        (("--run.directory", "run"), "run.directory run is not the same folder in rank 1 as in rank 0"),
    ],
)
def test_a_disk_that_the_ranks_do_not_share_is_refused(case, flags, says):
    """Rows would be of other texts, and each rank would have a part of the checkpoint."""
    for rank in (0, 1):
        write_documents(case.folder / f"disk{rank}" / "text", 24 - rank)
    ended = case.start("another_disk", *flags).join()
    assert [end.status for end in ended] == [2, 2], ended
    assert all(re.search(says, end.error) for end in ended), ended
    assert not case.run.exists() and not (case.folder / "disk0" / "run").exists()


def test_a_killed_rank_stops_the_others_and_is_named(case):
    workers = case.start("hang", mode="fsdp")
    workers.wait_for(case.fault_file)
    begin = time.monotonic()
    workers.send(signal.SIGKILL, 1)
    (end,) = workers.join(30, ranks=[0])
    assert time.monotonic() - begin < 30
    assert end.status == 1
    assert f"rank 1 (process {workers.processes[1].pid}) is gone, last seen in" in end.error, end.error
    assert "rank 0 stops too" in end.error
    # What ends with a message is no dead process.
    assert last_beat(case.run, 0)["status"] == "failed"
    assert case.checkpoints()[-1] == "step_00000002"
    case.resumed_to_the_end()


def test_a_killed_rank_0_is_named_though_it_kept_the_store(case):
    workers = case.start("wait_at_step")
    workers.wait_for(case.fault_file)
    time.sleep(1.5)
    workers.send(signal.SIGKILL, 0)
    Path(f"{case.fault_file}.go").touch()
    (end,) = workers.join(30, ranks=[1])
    assert end.status == 1
    assert f"rank 0 (process {workers.processes[0].pid}) is gone" in end.error, end.error
    case.resumed_to_the_end()


def test_a_frozen_rank_is_named_and_the_others_stop(case):
    workers = case.start("hang_with_a_short_pause", "--parallel.silence_seconds", "3")
    workers.wait_for(case.fault_file)
    time.sleep(1.5)
    workers.send(signal.SIGSTOP, 1)
    (end,) = workers.join(30, ranks=[0])
    assert end.status == 1
    silent = re.search(r"has been silent for (\d+) s", end.error)
    # Three and the watch's interval, on a machine that may be busy.
    assert silent is not None and 3 <= int(silent[1]) < 15, end.error
    assert "last seen in" in end.error and "at step 2" in end.error
    # From its last note to the others.
    assert "loop (faults.py:" in end.error
    assert last_beat(case.run, 0)["status"] == "failed"
    event = read_metrics(case.run / "metrics.jsonl", "event")[-1]
    assert (event["name"], event["severity"]) == ("rank_lost", "error") and "rank 1 (process " in event["message"]


def test_an_endless_loop_ends_in_bounded_time_with_the_rank_named(case):
    """The other rank is alive all the while: the exchange times out, and names the phase of that rank."""
    limits = ("--parallel.timeout_seconds", "4", "--parallel.silence_seconds", "2")
    workers = case.start("hang_with_a_short_pause", *limits)
    ended = workers.join(60)
    assert [end.status for end in ended] == [1, 1], ended
    assert "rank 1: other for" in ended[0].error and "at step 2, loop (faults.py:" in ended[0].error, ended[0].error
    assert "rank 0 has failed: PeerLost" in ended[1].error, ended[1].error
    assert "rank_lost" in [row["name"] for row in read_metrics(case.run / "metrics.jsonl", "event")]


def test_torchrun_on_two_machines_starts_again_from_the_last_checkpoint(case):
    """Two torchruns meet as on two machines. The one whose process was killed counts a restart, the other none."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2",
        "--rdzv-id=test", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1",
        str(ROOT / "tests" / "distributed" / "faults.py"), "die_once", "train", str(case.config), *QUICK,
        "--parallel.mode", "fsdp",
    ]  # fmt: skip
    variables = environment(OMP_NUM_THREADS=1, FAULT_FILE=case.fault_file)
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context((case.folder / f"machine{number}").open("wb")) for number in range(2)]
        machines = [warm.popen(command, stdout=file, stderr=subprocess.STDOUT, env=variables) for file in outputs]
        # torchrun ends its workers when it gets this.
        for machine in machines:
            stack.callback(machine.send_signal, signal.SIGTERM)
        statuses = [wait_for_end(machine, 200) for machine in machines]
    said = "\n".join(Path(file.name).read_text() for file in outputs)
    assert statuses == [0, 0], said
    assert case.fault_file.exists()
    assert "is gone" in said
    assert "finished 6 steps" in said
    rows = read_metrics(case.run / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if row.get("name") == "resumed"] == [4]


def test_a_run_that_the_launcher_starts_again_continues(case, monkeypatch):
    """From its newest checkpoint, or from the beginning; a run of another command is refused as in a first start."""
    config = load_config(case.config, (*QUICK, "--train.steps", "2"))
    assert train_here(config).finished
    with pytest.raises(UserError, match="holds a run already"):
        train_here(config)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UserError, match="holds a run already"):
        train_here(override(config, {"optimizer.learning_rate": 0.5}))
    # torchrun repeats the whole command.
    assert train_here(config, overwrite=True).finished
    assert "resumed" in [row.get("name") for row in read_metrics(case.run / "metrics.jsonl")]
    assert not list(case.folder.glob("run.old-*"))
    shutil.rmtree(case.run / "checkpoints")
    assert train_here(config).finished
    assert "resumed" not in [row.get("name") for row in read_metrics(case.run / "metrics.jsonl")]
    assert list(case.folder.glob("run.old-*"))
