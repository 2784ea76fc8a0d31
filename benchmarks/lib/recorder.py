"""Rows as they come in: each one shielded from the others, written at once, with a time limit for all."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

OK = "ok"


class Unavailable(Exception):
    """A row cannot be measured here; the message has the reason."""


class Refused(Exception):
    """A row must not be measured: its results are wrong."""


class Recorder:
    """Collects the rows of a run of measurements.

    A failure is recorded in its row, and the next row follows. Rows that the time limit leaves out are recorded too.
    """

    def __init__(self, seconds: float, say: Callable[[str], None], on_row: Callable[[], None]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self._say, self._on_row = say, on_row
        self._seconds = seconds
        self._begin = time.monotonic()

    def remaining_seconds(self) -> float:
        """Time until the limit; 0 when it has passed."""
        return max(0.0, self._begin + self._seconds - time.monotonic())

    def say(self, text: str) -> None:
        """Show a line with the time since the start."""
        self._say(f"[{time.monotonic() - self._begin:5.0f} s] {text}")

    def measure(self, labels: Mapping[str, Any], figures: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Measure one row, named by its labels, and keep it; `status` is "ok", or the reason of the failure."""
        return self.measure_rows(labels, lambda: [figures()])[0]

    def measure_rows(
        self, labels: Mapping[str, Any], figures: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> list[dict[str, Any]]:
        """Measure rows that one measurement gives together, like `measure`; one row if it fails."""
        if not self.remaining_seconds():
            return [self.keep({**labels, "status": f"not run: the limit of {self._seconds:g} s has passed"})]
        try:
            return [self.keep({**labels, **row, "status": OK}) for row in figures()]
        except Exception as error:
            status = failure(error)
        if torch.cuda.is_initialized():
            # Memory that a failed row leaves in the allocator must not make the next one fail too.
            torch.cuda.empty_cache()
        return [self.keep({**labels, "status": status})]

    def keep(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row that was measured elsewhere."""
        self.rows.append(row)
        self._on_row()
        return row

    @property
    def exit_status(self) -> int:
        """1 if a row failed or was refused; a row that is not available or not run is no failure."""
        return int(any(row["status"].startswith(("failed", "refused")) for row in self.rows))


def failure(error: BaseException) -> str:
    """The status of a row that raised."""
    if isinstance(error, Unavailable | Refused):
        return f"{'not available' if isinstance(error, Unavailable) else 'refused'}: {error}"
    lines = str(error).strip().splitlines()
    return f"failed: {type(error).__name__}" + (f": {lines[0][:300]}" if lines else "")


def child_environment(**variables: str) -> dict[str, str]:
    """The environment of a process that imports this library: the variables of this one, and others."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, **variables}
