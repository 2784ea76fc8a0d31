"""Shared by the sinks: their interface, names of a row's numbers, and alerts."""

from typing import Protocol

from trifocal.runlog.jsonl import Row

_NOT_SCALARS = {"kind", "step", "unix_time_seconds", "layer"}


class Sink(Protocol):
    """Another consumer of the metric rows. It may raise: then it gets no more rows, and training continues."""

    def write(self, row: Row) -> None:
        """Write one row."""

    def close(self) -> None:
        """Flush and close."""


def scalars(row: Row) -> dict[str, float]:
    """Every number of a row as `kind/field`, or `kind/layer/field`; empty for events."""
    if row["kind"] == "event":
        return {}
    layer = f"layer{row['layer']:02}/" if "layer" in row else ""
    return {
        f"{row['kind']}/{layer}{name}": value
        for name, value in row.items()
        if name not in _NOT_SCALARS and isinstance(value, int | float)
    }


def alert(row: Row) -> tuple[str, str, str] | None:
    """Name, sentence and severity of a warning or an error; None for other rows."""
    if row["kind"] != "event" or row["severity"] == "info":
        return None
    return row["name"], f"step {row['step']}: {row['message']}", row["severity"]
