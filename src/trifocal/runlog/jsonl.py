"""Append-only JSON lines that survive a crash, a full disk and a reader at any moment."""

import json
import logging
import os
import stat
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import Any, TypeGuard

from trifocal.errors import UserError
from trifocal.paths import parse_json, reading

Row = dict[str, Any]

LONGEST_LINE = 2**20
# Fields that are finite numbers, where a file has them.
_NUMBERS = {"step", "unix_time_seconds"}
_OF_EVENTS = {"name", "severity", "message"}

logger = logging.getLogger("trifocal")


class JsonLinesWriter(AbstractContextManager["JsonLinesWriter"]):
    """Appends one JSON object a line; a failing disk costs rows, never the run.

    Each row is one unbuffered write, so a killed process loses no written row. When a write fails or is cut short (a
    full disk), the torn part is removed, one warning is logged for the whole run, and the next row is tried again. The
    file and its folder are created if missing; opening it removes a torn last line of a crash.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: FileIO | None = None
        self._size = 0
        self._warned = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self.path, "a+")
            end = self._file.seek(0, os.SEEK_END)
            start = self._file.seek(max(0, end - LONGEST_LINE))
            self.truncate(start + self._file.read(LONGEST_LINE).rfind(b"\n") + 1)
        except OSError as error:
            self._warn(error)

    def append(self, row: Mapping[str, Any]) -> bool:
        """Write one row of JSON types (a number that is not finite as NaN or Infinity); whether it is in the file."""
        line = (json.dumps(row, separators=(",", ":")) + "\n").encode()
        if self._file is None:
            return False
        try:
            written = self._file.write(line)
            if written == len(line):
                self._size += written
                return True
            self._warn(OSError(f"only {written} of {len(line)} bytes were written"))
        except OSError as error:
            self._warn(error)
        self.truncate(self._size)
        return False

    def truncate(self, size: int) -> None:
        """Cut the file after its first `size` bytes."""
        try:
            self._size = size
            if self._file is not None:
                self._file.truncate(size)
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        """Close the file; rows appended later are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("cannot write %s (%s); training continues, rows are missing there", self.path, error)

    def __exit__(self, *_: object) -> None:
        self.close()


class Rows(list[Row]):
    """Rows of a file, and the number of complete lines that are none."""

    skipped = 0


def read_lines(
    path: str | os.PathLike[str],
    *,
    last_bytes: int | None = None,
    fields: Set[str] = frozenset(),
    kept: Callable[[Row], bool] = lambda row: True,
) -> Rows:
    """The rows of a JSON-lines file that may still be growing, that are `kept`; with `last_bytes`, only from about this
    much of its end. A torn last line is left out; any other that is no row, or lacks a field or its number, is counted.
    """
    path, rows = Path(path), Rows()
    with reading(path):
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"cannot read {path}: it is no regular file")
        with path.open("rb") as file:
            start = 0 if last_bytes is None else max(0, file.seek(0, os.SEEK_END) - last_bytes)
            file.seek(start)
            if start > 0:
                file.readline()
            while line := file.readline(LONGEST_LINE):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    break
                row = parse_row(line)
                if (
                    row is None
                    or not fields <= row.keys()
                    or not all(is_number(row[name]) for name in fields & _NUMBERS)
                    or (row.get("kind") == "event" and not row.keys() >= _OF_EVENTS)
                ):
                    rows.skipped += 1
                elif kept(row):
                    rows.append(row)
    return rows


def parse_row(line: bytes) -> Row | None:
    """The row of a line; None of a damaged one."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number, not a bool, and small enough for sums of squares to be finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e100
