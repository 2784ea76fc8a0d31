"""Several GPUs over NCCL: gradients, whole runs, and a rank that is lost. Needs two, some tests need four."""

import os
import signal
import time

import pytest
import torch

from tests.distributed.workers import train
from tests.train.tiny import assert_same_tensors, read_checkpoint, write_config
from trifocal.checks.training_checks import parallel_gradients
from trifocal.runlog import read_metrics
from trifocal.train.checkpoint.folders import list_checkpoints
from trifocal.train.checkpoint.manifest import verify_checkpoint

COUNT = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices"),
]

GPU = torch.device("cuda")
BF16 = ("--train.precision", "bf16", "--train.activation_checkpointing", "all")
CONTEXT = ("--parallel.context", "2")
# With rows that processes share, a window reads its neighbour's last keys.
MIX = ("--model.layer_types", "window,selected", "--model.chooser", "index")
GRAPHS = (*BF16, "--train.cuda_graphs", "true")
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(COUNT)))).split(",")


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    """Workers that test at the same time have their own GPUs, as far as there are enough."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 2 * (worker % (COUNT // 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(VISIBLE[first : first + 2]))


def test_checks_pass_over_nccl():
    found = parallel_gradients(GPU)
    assert found.passed, found
    assert "2 GPUs over NCCL" in found.details[0]


def losses(run):
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl", "train")]


def start(folder, mode, size, *flags):
    """The processes of a run in both of its halves, and its folder."""
    folder.mkdir(exist_ok=True)
    config = write_config(folder, f"{mode}{size}")
    flags = ("--run.device", "cuda", "--parallel.mode", mode, *flags)
    return train(folder, config, *flags, size=size), folder / f"{mode}{size}"


def finished(workers, run):
    """Its folder when it has ended, without a warning."""
    ended = workers.join(120)
    assert all(end.status == 0 for end in ended), ended[0].error + ended[-1].error
    assert all("warning" not in end.error.lower() for end in ended), ended[0].error
    return run


def finish(*arguments):
    """A run from its start to its end."""
    return finished(*start(*arguments))


@pytest.mark.parametrize("flags", [(), MIX, BF16, (*GRAPHS, *MIX)])
def test_losses_are_those_of_one_gpu(tmp_path, flags):
    """Rounding of fp32, or of bf16, passed on by six steps of AdamW at 1e-2. All train at the same time."""
    runs = [start(tmp_path / "one", "none", 1, *flags)]
    try:
        for mode, shared in (("ddp", ()), ("fsdp", ()), ("ddp", CONTEXT), ("fsdp", CONTEXT)):
            runs.append(start(tmp_path / f"{mode}{len(shared)}", mode, 2, *flags, *shared))
        one, *others = (losses(finished(*run)) for run in runs)
    finally:
        for workers, _ in runs:
            workers.kill()
    assert len(others) == 4
    for found in others:
        assert found == pytest.approx(one, rel=0.02 if "bf16" in flags else 1e-3)


def results(run):
    """Losses, and all tensors of the last checkpoint."""
    return losses(run), read_checkpoint(run / "checkpoints" / "step_00000006")


def continues_bit_for_bit(run, expected, mode, size, *flags):
    """A resumed run has the losses and the weights of an uninterrupted one."""
    train(run.parent, None, "--resume", str(run), "--parallel.mode", mode, *flags, size=size).finish()
    (values, weights), (again, weights_again) = expected, results(run)
    assert values == again
    assert_same_tensors(weights, weights_again)


EXACT = (*BF16, "--run.deterministic", "true")


@pytest.mark.parametrize(("mode", "size"), [("ddp", 2), ("fsdp", 2), ("ddp", 4), ("fsdp", 4), ("hsdp", 4)])
def test_the_same_number_continues_bit_for_bit(tmp_path, monkeypatch, mode, size):
    """Sums of more than two depend on their order. Two micro-batches a step, and DDP is told of a static graph."""
    if size > COUNT:
        pytest.skip("needs four CUDA devices")
    if size == 4:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(VISIBLE[:4]))
    flags = ("--train.global_batch_size", str(2 * size), "--train.micro_batch_size", "1")
    # Two copies, each in two processes.
    flags += ("--parallel.shards", "2") if mode == "hsdp" else ("--parallel.static_graph", "true")
    run = finish(tmp_path, mode, size, *EXACT, *flags)
    continues_bit_for_bit(run, results(run), mode, size, "--checkpoint", "step_00000004")


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_nan_in_one_rank_is_named(tmp_path, mode):
    config = write_config(tmp_path)
    flags = ("--run.device", "cuda", "--parallel.mode", mode, "--evaluate.interval_steps", "0")
    ended = train(tmp_path, config, *flags, fault="nan", FAULT_FILE=str(tmp_path / "fault")).join(120)
    assert [end.status for end in ended] == [1, 1], ended
    assert all("step 3: from rank 1: gradient norm nan" in end.error for end in ended), ended[0].error


def test_a_killed_rank_stops_all_others_and_the_run_continues_bit_for_bit(tmp_path, monkeypatch):
    """On all GPUs. The others wait in a kernel of NCCL's, where no exception reaches them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(VISIBLE))
    # Two micro-batches a step.
    flags = (*EXACT, "--train.global_batch_size", str(2 * COUNT), "--train.micro_batch_size", "1")
    whole = start(tmp_path / "whole", "fsdp", COUNT, *flags)
    config = write_config(tmp_path)
    flags = ("--run.device", "cuda", "--parallel.mode", "fsdp", *flags)
    workers = train(tmp_path, config, *flags, size=COUNT, fault="hang", FAULT_FILE=str(tmp_path / "fault"))
    try:
        workers.wait_for(tmp_path / "fault", 120)
        begin = time.monotonic()
        workers.send(signal.SIGKILL, 1)
        ended = workers.join(30, ranks=[rank for rank in range(COUNT) if rank != 1])
        assert time.monotonic() - begin < 30
        for end in ended:
            assert end.status == 1
            assert f"rank 1 (process {workers.processes[1].pid}) is gone" in end.error, end.error
        expected = results(finished(*whole))
    finally:
        workers.kill()
        whole[0].kill()
    checkpoints = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in checkpoints] == ["step_00000002"]
    verify_checkpoint(checkpoints[0])
    continues_bit_for_bit(tmp_path / "run", expected, "fsdp", COUNT)
