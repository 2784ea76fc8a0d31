"""A dump on GPUs: NCCL's flight recorder."""

import pytest
import torch

from tests.devices import NEEDS_GPU
from tests.distributed.test_faults import QUICK
from tests.distributed.test_stalls import wait_for
from tests.distributed.workers import train
from tests.train.tiny import write_config

pytestmark = list(NEEDS_GPU)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_that_waits_in_nccl_is_named(tmp_path):
    """One of two ranks loops in a backward hook: the other one's all-reduce is open in NCCL's recorder."""
    run, fault_file = tmp_path / "run", tmp_path / "fault"
    flags = (*QUICK, "--run.device", "cuda", "--parallel.mode", "ddp", "--log.heartbeat_seconds", "0.2")
    workers = train(tmp_path, write_config(tmp_path), *flags, fault="endless_hook", FAULT_FILE=str(fault_file))
    try:
        workers.wait_for(fault_file, timeout=120)
        wait_for(lambda: any(run.glob("dumps/stalled_*/summary.md")), 120)
        (summary,) = run.glob("dumps/stalled_*/summary.md")
        wait_for(lambda: "rank 1, which has not called it" in summary.read_text())
        text = summary.read_text()
        assert "Rank 0 waits in nccl's all_reduce number" in text, text
        assert "at endless (faults.py" in text, text
    finally:
        workers.kill()
