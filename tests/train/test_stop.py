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


def test_a_closed_terminal_asks_unless_nohup_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for handler, expected in ((signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, None)):
        before = signal.signal(signal.SIGHUP, handler)
        try:
            with StopSignals() as signals:
                os.kill(os.getpid(), signal.SIGHUP)
                assert signals.received == expected
            assert signal.getsignal(signal.SIGHUP) == handler
        finally:
            signal.signal(signal.SIGHUP, before)


def test_a_request_counts_though_nobody_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(stop.os, "write", gone)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGTERM"
