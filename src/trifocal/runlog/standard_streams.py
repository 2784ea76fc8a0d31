"""Keeps a run alive when standard output or standard error is lost: a broken pipe, a full disk, a closed terminal."""

import os
import sys
from pathlib import Path
from typing import Any, Self, TextIO, cast


class FaultTolerantStreams:
    """While active, a write to a lost `sys.stdout` or `sys.stderr` does not raise.

    Every write is tried, so that output returns when a disk has room again. Contexts nest: an inner one uses the
    streams of the outer one. Output that is lost at the end is dropped; Python would try again, and end with
    status 120.
    """

    def __init__(self) -> None:
        self._before: tuple[TextIO | None, TextIO | None] = (None, None)
        self._streams: list[_FaultTolerantStream] = []

    def newly_lost(self) -> list[str]:
        """A sentence for each newly lost stream."""
        found = [stream for stream in self._streams if stream.error and not stream.told]
        for stream in found:
            stream.told = True
        return [f"{stream.title} is lost ({stream.error}); training goes on" for stream in found]

    def __enter__(self) -> Self:
        self._before = sys.stdout, sys.stderr
        for stream, title in zip(self._before, ("standard output", "standard error"), strict=True):
            known = isinstance(stream, _FaultTolerantStream)
            self._streams.append(cast("Any", stream) if known else _FaultTolerantStream(stream, title))
        sys.stdout, sys.stderr = (cast("TextIO", stream) for stream in self._streams)
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self._before  # type: ignore[assignment]
        for before, stream in zip(self._before, self._streams, strict=True):
            stream.flush()
            if stream is not before:
                stream.discard_lost_output()


class _FaultTolerantStream:
    """A stream with a `write` and a `flush` that note errors instead of raising them."""

    def __init__(self, stream: TextIO | None, title: str) -> None:
        self.title, self.error, self.told = title, "", False
        self._stand_in: TextIO | None = None
        if stream is None or stream.closed:
            self.error = "it is closed"
            stream = self._stand_in = Path(os.devnull).open("w")  # noqa: SIM115
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError) as error:  # ValueError: the file was closed.
            self._note(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._note(error)

    def discard_lost_output(self) -> None:
        """Close a stand-in, and lead a lost stream to nowhere."""
        if self._stand_in is not None:
            self._stand_in.close()
            return
        try:
            self._stream.flush()
        except OSError:
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())

    def _note(self, error: OSError | ValueError) -> None:
        self.error = (error.strerror if isinstance(error, OSError) else None) or str(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_closed_descriptors() -> None:
    """Open /dev/null in place of each standard stream that was closed at the start (`>&-`).

    Otherwise the next open file gets its number, and libraries write their messages into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The system gives the lowest free number: this one.
            os.open(os.devnull, os.O_RDWR)
