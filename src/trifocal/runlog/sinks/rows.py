"""Shared by the sinks: names of a row's numbers, and alerts."""

from trifocal.runlog.jsonl import Row

_NOT_SCALARS = {"kind", "step", "unix_time_seconds", "layer"}


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
