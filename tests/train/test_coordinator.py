"""When processes agree: a step ahead, so that no step waits for it."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trifocal.data import Batch
from trifocal.distributed import DistributedContext, PeerLost
from trifocal.errors import UserError
from trifocal.runlog import Heartbeat
from trifocal.train import coordinator
from trifocal.train.coordinator import StepCoordinator
from trifocal.train.stop import StopSignals

CPU = torch.device("cpu")


class FakeLoader:
    """Batches of four targets, one of them ignored; the position is how many were read."""

    def __init__(self, events: list[str], fail_at: int = 0) -> None:
        self.events, self.fail_at, self.read = events, fail_at, 0

    def __next__(self) -> Batch:
        self.read += 1
        if self.read == self.fail_at:
            raise UserError("no more")
        self.events.append(f"read {self.read}")
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        targets = torch.tensor([[1, 2, 3, -100]])
        return Batch(tokens, targets, None, (str(self.read),), self.read, 0, int((targets != -100).sum()))

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}


class FakeHeartbeat:
    """Phases that are not measured."""

    def phase(self, name: str) -> Any:
        return torch.no_grad()

    def snapshot(self) -> dict[str, Any]:
        return {"step": 0}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The events in order; the other process always has the same answers as this one."""
    found: list[str] = []

    def async_all_reduce(
        self: DistributedContext, values: Sequence[float], operation: str = "sum"
    ) -> Callable[[], list[float]]:
        if operation == "max":
            # The other process has two packed documents in every micro-batch.
            return lambda: [max(value, 2.0) for value in values]
        found.append("send")

        def answer() -> list[float]:
            found.append("answer")
            return [2 * value for value in values]

        return answer

    def agree(self: DistributedContext, error: Exception | None) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(DistributedContext, "async_all_reduce", async_all_reduce)
    monkeypatch.setattr(DistributedContext, "raise_on_all", agree)
    yield found


def next_step(company: StepCoordinator, loader: FakeLoader, signals: StopSignals, *, last: bool = False) -> Any:
    return company.next_step(loader, 1, signals, FakeHeartbeat(), last=last)  # type: ignore[arg-type]


def test_the_exchange_of_the_next_step_is_under_way_while_a_step_runs(events: list[str]) -> None:
    company, loader, signals = StepCoordinator(DistributedContext(0, 2)), FakeLoader(events), StopSignals()
    for step in (1, 2, 3):
        data = next_step(company, loader, signals, last=step == 3)
        events.append(f"step {step}")
        assert (data.total_targets, data.documents, data.batches[0].sample_index) == (6, [2], step)
        # A checkpoint after this step must not skip the batches that were read ahead.
        assert data.position == {"read": step}
    assert events == [
        "read 1", "send", "answer", "read 2", "send", "step 1",
        "answer", "read 3", "send", "step 2", "answer", "step 3",
    ]  # fmt: skip


def test_a_signal_ends_the_run_after_the_step_that_was_agreed_on(events: list[str]) -> None:
    company, loader, signals = StepCoordinator(DistributedContext(0, 2)), FakeLoader(events), StopSignals()
    assert next_step(company, loader, signals) is not None
    # Step 1 is running, and the exchange for step 2 is on its way.
    signals.received = "SIGTERM"
    assert next_step(company, loader, signals).position == {"read": 2}
    assert next_step(company, loader, signals) is None


@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_before_the_first_step_waits_for_it(events: list[str], size: int) -> None:
    """A run that is stopped has a step to save."""
    company, loader, signals = StepCoordinator(DistributedContext(0, size)), FakeLoader(events), StopSignals()
    signals.received = "SIGTERM"
    assert next_step(company, loader, signals) is not None
    assert next_step(company, loader, signals) is None


def test_data_that_fail_are_reported_before_their_own_step(events: list[str]) -> None:
    company, loader, signals = StepCoordinator(DistributedContext(0, 2)), FakeLoader(events, fail_at=2), StopSignals()
    assert next_step(company, loader, signals).position == {"read": 1}
    with pytest.raises(UserError, match="no more"):
        next_step(company, loader, signals)


def test_a_library_goes_on_for_sentences_and_the_line_has_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NobodyIsLost(contextlib.nullcontext[None]):
        def __init__(self, *_: object, **__: object) -> None:
            super().__init__()

        def explain(self) -> None: ...

        def notes(self) -> dict[int, Any]:
            return {}

        def table(self) -> str:
            return "rank 1: forward for 1 s at step 7"

    monkeypatch.setattr(coordinator, "PeerMonitor", NobodyIsLost)
    company, heartbeat = StepCoordinator(DistributedContext(0, 2)), Heartbeat(Path(os.devnull))
    sentences: list[str] = []
    with (
        pytest.raises(PeerLost) as lost,
        company.watched(heartbeat, tmp_path, 1.0, lambda name, sentence, severity: sentences.append(sentence)),
    ):
        raise RuntimeError(
            "[gloo/pair.cc:537] Connection reset by peer. This is typically caused by a remote worker hanging. GLHF! 🏖️"
        )
    assert (
        sentences
        == [str(lost.value)]
        == [
            "an exchange with the other processes failed: [gloo/pair.cc:537] Connection reset by peer; the others: "
            "rank 1: forward for 1 s at step 7"
        ]
    )
