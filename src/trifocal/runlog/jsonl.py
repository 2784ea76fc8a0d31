"""Append-only JSON lines that survive a crash, a full disk and a reader at any moment."""

import json
import logging
import os
import stat
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Self, TypeGuard

from trifocal.errors import UserError

Row = dict[str, Any]
Fields = Mapping[str, type | tuple[type, ...]]

MOST_BYTES = 2**30
"""A larger file is not read whole: a run of a million steps writes less."""
_LONGEST_LINE = 2**20

logger = logging.getLogger("trifocal")


class JsonLinesWriter:
    """Appends one JSON object a line; a failing disk costs rows, never the run.

    Each row is one unbuffered write, so a killed process loses no written row. When a write fails or is cut short (a
    full disk), the torn part is removed, one warning is logged for the whole run, and the next row is tried again.
    Opening the file removes a torn last line of a crash.

    Args:
        path: The file; it and its folder are created if missing.
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
            start = self._file.seek(max(0, end - _LONGEST_LINE))
            self.truncate(start + self._file.read(_LONGEST_LINE).rfind(b"\n") + 1)
        except OSError as error:
            self._warn(error)

    def append(self, row: Mapping[str, Any]) -> bool:
        """Write one row.

        Args:
            row: JSON types only. Non-finite numbers become NaN and Infinity, which Python's json reads.

        Returns:
            Whether the row is in the file.

        Raises:
            TypeError: If a value is not a JSON type, such as a tensor.
        """
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
            logger.warning("cannot write %s (%s); training goes on, rows are missing there", self.path, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Rows(list[Row]):
    """Rows of a file, and the number of complete lines that are none."""

    skipped = 0


def read_lines(
    path: str | os.PathLike[str],
    *,
    last_bytes: int | None = None,
    usable: Callable[[Row], bool] = lambda row: True,
) -> Rows:
    """Read the rows of a JSON-lines file that may still be growing.

    Args:
        path: The file.
        last_bytes: Read only the whole lines in about this many bytes at the end; None reads everything.
        usable: Whether a row has the fields that every reader needs.

    Returns:
        The usable rows in order. A torn last line (no newline yet) is left out; any other line is skipped and counted.

    Raises:
        UserError: If the file is missing, no regular file, or larger than MOST_BYTES.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"cannot read {path}: it is no regular file")
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = 0 if last_bytes is None else max(0, size - last_bytes)
            if size - start > MOST_BYTES:
                raise UserError(f"cannot read {path}: expected at most {MOST_BYTES:,} bytes, got {size:,}")
            file.seek(start)
            content = file.read(size - start)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if start > 0:
        content = content[content.find(b"\n") + 1 :]
    rows = Rows()
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and usable(row):
            rows.append(row)
        else:
            rows.skipped += 1
    return rows


def has_fields(row: Row, fields: Fields) -> bool:
    """Whether a row has all fields, each of its type."""
    return all(name in row and isinstance(row[name], kind) for name, kind in fields.items())


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number, not a bool, and small enough for sums of squares to be finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e100
