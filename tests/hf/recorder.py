"""A recorder for a CPU: CUDA graphs need a GPU."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trifocal.hf import TrifocalForCausalLM
from trifocal.hf.recorded_training import RecordedTraining


class Recorder:
    """A replay does the same work again and overwrites the tensors of the first result, as a graph would."""

    def __init__(self, device: torch.device) -> None:
        self.recorded = 0

    def warm_up(self, work: Callable[[], Any]) -> Any:
        return work()

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.recorded += 1
        loss, found = work()

        def replay() -> None:
            new_loss, new = work()
            loss.copy_(new_loss)
            for own, given in zip(found, new, strict=True):
                if own is not None:
                    own.copy_(given)

        # Nothing is done while a graph is recorded.
        loss.fill_(float("nan"))
        return replay, (loss, found)


def not_compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Another function that does the same: what is recorded does not depend on who made its code."""
    return functools.partial(function)


def record_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile nothing, and record on a CPU."""
    monkeypatch.setattr(torch, "compile", not_compiled)
    monkeypatch.setattr("trifocal.hf.recorded_training.GraphRecorder", Recorder)
    monkeypatch.setattr(RecordedTraining, "takes", staticmethod(lambda device: True))


def recorder_of(model: TrifocalForCausalLM) -> RecordedTraining:
    assert model._training_loss is not None and model._training_loss._recorded is not None
    return model._training_loss._recorded
