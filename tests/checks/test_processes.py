"""The checks of several processes: healthy ones pass, each fault fails."""

import subprocess
from types import SimpleNamespace

import pytest
import torch
from tests import warm

from trifocal.checks import process_checks as processes
from trifocal.checks.process_worker import Case

CPU = torch.device("cpu")
FAULTS = "tests.checks.process_faults:"
# Enough to find a fault; tests/distributed takes all of them.
DDP = (Case("ddp", accumulation=2), Case("ddp", checkpointing=True))
SHARDED = (Case("fsdp", accumulation=2), Case("fsdp", checkpointing=True))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the cases above, in processes that need not import everything first."""
    quick = SimpleNamespace(Popen=warm.popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("trifocal.testing.processes.subprocess", quick)
    monkeypatch.setattr(processes, "DDP_CASES", DDP)
    monkeypatch.setattr(processes, "SHARDED_CASES", SHARDED)
    monkeypatch.setattr(processes, "STEP_CASES", (Case("ddp", steps=2),))


@pytest.mark.usefixtures("few")
def test_healthy() -> None:
    for check in (processes.ddp_gradients, processes.sharded_gradients, processes.equal_parameters):
        found = check(CPU)
        assert found.passed, found
        assert "2 processes on the CPU over gloo" in found.details[0]


@pytest.mark.usefixtures("few")
def test_ddp_gradients_find_late_bound_checkpointing() -> None:
    found = processes.ddp_gradients(CPU, prepare=FAULTS + "late_bound_checkpointing")
    assert found.figure > 0.1
    assert "checkpointing" in found.details[0]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("fault", ["no_exchange", "not_averaged"])
def test_ddp_gradients_find_a_wrong_exchange(fault: str) -> None:
    assert processes.ddp_gradients(CPU, prepare=FAULTS + fault).figure > 0.1


@pytest.mark.usefixtures("few")
def test_sharded_gradients_find_a_lost_micro_batch() -> None:
    found = processes.sharded_gradients(CPU, prepare=FAULTS + "last_micro_batch_alone")
    assert found.figure > 0.1
    assert "accumulation 2" in found.details[0]


@pytest.mark.usefixtures("few")
def test_equal_parameters_find_another_learning_rate() -> None:
    found = processes.equal_parameters(CPU, prepare=FAULTS + "own_learning_rate")
    assert found.figure > 10


@pytest.mark.usefixtures("few")
def test_a_process_that_fails_is_an_error_with_its_text() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)process 1 ended with status 1: .*MemoryError: no more"):
        processes.equal_parameters(CPU, prepare=FAULTS + "death")
