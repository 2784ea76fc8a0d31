"""The run's metrics: `metrics.jsonl`.

Every row is a JSON object with `kind`, `step` (optimizer steps done) and `unix_time_seconds`. docs/diagnostics.md has
the fields. A number that is not finite is written as NaN or Infinity, which Python's json reads. A value that does not
exist on this machine (MFU on a CPU) is null or left out.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from trifocal.errors import one_line
from trifocal.runlog.jsonl import JsonLinesWriter, Row, logger, parse_row, read_lines
from trifocal.runlog.sinks import Sink

METRICS_FIELDS = frozenset({"kind", "step", "unix_time_seconds"})


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Writes the metric rows of one run, and gives them to its sinks, until one raises; no path, no file. A resume
    removes later rows, so that no step appears twice, and adds a `resumed` event.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, *, resume_step: int | None = None, sinks: Iterable[Sink] = ()
    ) -> None:
        # Reentrant: a sink that fails in writing a row is reported by an event row.
        self._lock = threading.RLock()
        self._file = None if path is None else JsonLinesWriter(path)
        self._step = 0
        self._sinks = list(sinks)
        if resume_step is not None:
            rows_dropped = self._drop_after(resume_step)
            message = f"resumed from step {resume_step}, {rows_dropped} later rows dropped"
            self.event(resume_step, "resumed", message, rows_dropped=rows_dropped)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a row of a kind, such as `train`, from any thread; its fields are of JSON types, no tensors."""
        row: Row = {"kind": kind, "step": step, "unix_time_seconds": round(time.time(), 3), **values}
        if self._file is None:
            return
        with self._lock:
            self._step = step
            self._file.append(row)
            for sink in [*self._sinks]:
                self._call(sink, partial(sink.write, row))

    def event(self, step: int, name: str, message: str, *, severity: str = "info", **values: Any) -> None:
        """Append an event row: a fixed name, a sentence for the user, `info`, `warning` or `error`, and more fields."""
        self.write("event", step, name=name, severity=severity, message=message, **values)

    def close(self) -> None:
        """Close the sinks and the file."""
        with self._lock:
            for sink in [*self._sinks]:
                self._call(sink, sink.close)
            if self._file is not None:
                self._file.close()

    def _call(self, sink: Sink, action: Callable[[], None]) -> None:
        """Call a sink; if it raises, leave it out from here on."""
        try:
            action()
        except Exception as error:
            self._sinks.remove(sink)
            sentence = (
                f"{type(sink).__name__} fails ({type(error).__name__}: {one_line(error)}) and is left out "
                "from here on; training continues"
            )
            logger.warning("%s", sentence)
            self.event(self._step, "sink_failed", sentence, severity="warning")

    def _drop_after(self, step: int) -> int:
        if self._file is None or not self._file.path.is_file():
            return 0
        size, dropped = 0, 0
        with self._file.path.open("rb") as file:
            for line in file:
                row = None if dropped else parse_row(line)
                past = row is not None and isinstance(row.get("step"), int) and row["step"] > step
                if dropped or past:
                    dropped += 1
                else:
                    size += len(line)
        self._file.truncate(size)
        return dropped

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str], kind: str | None = None) -> list[Row]:
    """Read the metric rows of a finished or running run.

    Args:
        path: The `metrics.jsonl`.
        kind: Only rows of this kind; None for all.

    Returns:
        The rows in the order written, without damaged ones.

    Raises:
        UserError: If the file is missing or no regular file.
    """
    kept = (lambda row: True) if kind is None else (lambda row: row["kind"] == kind)
    return read_lines(path, fields=METRICS_FIELDS, kept=kept)
