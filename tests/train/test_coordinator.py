"""When processes agree: a step ahead, so that no step waits for it; real ones are in tests/distributed."""

import pytest
import torch

from trifocal.data import Batch
from trifocal.distributed.processes import DistributedContext
from trifocal.train.coordinator import StepCoordinator
from trifocal.train.stop import StopSignals


class FakeLoader:
    """Batches of four targets, one of them ignored; the position is how many were read."""

    def __init__(self, events):
        self.events, self.read = events, 0

    def __next__(self):
        self.read += 1
        self.events.append(f"read {self.read}")
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        targets = torch.tensor([[1, 2, 3, -100]])
        return Batch(tokens, targets, None, (str(self.read),), self.read, (0,), int((targets != -100).sum()))

    def state_dict(self):
        return {"read": self.read}


class FakeHeartbeat:
    """Phases that are not measured."""

    def phase(self, name):
        return torch.no_grad()

    def snapshot(self):
        return {"step": 0}


@pytest.fixture
def events(monkeypatch):
    """The events in order; the other process always has the same answers as this one."""
    found = []

    def async_all_reduce(self, values, operation="sum"):
        if operation == "max":
            # The other process has two packed documents in every micro-batch.
            return lambda: [max(value, 2.0) for value in values]
        found.append("send")

        def answer():
            found.append("answer")
            return [2 * value for value in values]

        return answer

    def agree(self, error):
        if error is not None:
            raise error

    monkeypatch.setattr(DistributedContext, "async_all_reduce", async_all_reduce)
    monkeypatch.setattr(DistributedContext, "raise_on_all", agree)
    yield found


def next_step(company, loader, *, last=False):
    return company.next_step(loader, 1, FakeHeartbeat(), last=last)


def make_company(size=2):
    """The coordinator of one of two processes, and its signals."""
    signals = StopSignals()
    return StepCoordinator(DistributedContext(0, size), signals), signals


def test_the_exchange_of_the_next_step_is_under_way_while_a_step_runs(events):
    (company, _), loader = make_company(), FakeLoader(events)
    for step in (1, 2, 3):
        data = next_step(company, loader, last=step == 3)
        events.append(f"step {step}")
        assert (data.total_targets, data.documents, data.batches[0].sample_index) == (6, [2], step)
        # A checkpoint after this step must not skip the batches that were read ahead.
        assert data.position == {"read": step}
    assert events == [
        "read 1", "send", "answer", "read 2", "send", "step 1",
        "answer", "read 3", "send", "step 2", "answer", "step 3",
    ]  # fmt: skip


def test_a_signal_ends_the_run_after_the_step_that_was_agreed_on(events):
    (company, signals), loader = make_company(), FakeLoader(events)
    assert next_step(company, loader) is not None
    # Step 1 is running, and the exchange for step 2 is on its way.
    signals.received = "SIGTERM"
    assert next_step(company, loader).position == {"read": 2}
    assert next_step(company, loader) is None
    # One before the first step waits for it: a run that is stopped has a step to save.
    for size in (1, 2):
        (company, signals), loader = make_company(size), FakeLoader(events)
        signals.received = "SIGTERM"
        assert next_step(company, loader) is not None and next_step(company, loader) is None


@pytest.mark.parametrize("size", [1, 2])
def test_data_that_no_step_takes_fail_no_run(size, events):
    """Batches are read before the processes agree to stop."""
    (company, signals), loader = make_company(size), FakeLoader(events)
    assert next_step(company, loader) is not None
    # The next read fails.
    signals.received, loader.events = "SIGTERM", None
    if size == 2:
        assert next_step(company, loader).position == {"read": 2}
    assert next_step(company, loader) is None
