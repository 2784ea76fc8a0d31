"""Streams that are lost and come back."""

import errno
import io
import logging
import sys
from pathlib import Path

import pytest

from trifocal.runlog.standard_streams import FaultTolerantStreams


class Full(io.StringIO):
    """A stream on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_told_once_and_whoever_writes_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Full())
    before = sys.stdout, sys.stderr
    with FaultTolerantStreams() as outer, FaultTolerantStreams() as inner:
        print("a line", flush=True)
        print("another", file=sys.stderr)
        logging.getLogger("trifocal").warning("one more")
        news = inner.newly_lost()
        assert len(news) == 2
        assert news[0] == "standard output is lost (No space left on device); training goes on"
        assert inner.newly_lost() == outer.newly_lost() == []
        assert not sys.stdout.isatty()
    assert (sys.stdout, sys.stderr) == before


def test_a_stream_that_is_not_there_takes_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with FaultTolerantStreams() as streams:
        print("a line", flush=True)
        print("another", file=sys.stderr)
        assert len(streams.newly_lost()) == 2
    assert sys.stdout is None


def test_letters_that_a_terminal_lacks_are_written_as_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w", encoding="latin-1") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with FaultTolerantStreams() as streams:
            print("é and ∎")
            assert streams.newly_lost() == []
    assert (tmp_path / "out").read_text(encoding="latin-1") == "é and \\u220e\n"
