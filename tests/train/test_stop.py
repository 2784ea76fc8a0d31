"""The first signal asks, its echo is the same request, a later one insists."""

import os
import signal

import pytest

from trifocal.train import stop
from trifocal.train.stop import StopSignals


def test_a_signal_twice_at_once_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(stop.os, "_exit", left.append)
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert signals.received is None
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert signals.received == "SIGTERM"
        assert not left
        monkeypatch.setattr(stop, "SAME_REQUEST_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
        assert left == [128 + signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before
