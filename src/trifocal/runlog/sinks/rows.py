"""What the sinks have in common: the names under which they show a row's numbers, and how they are missing."""

from trifocal.errors import UserError
from trifocal.runlog.jsonl import Row

_NOT_SCALARS = {"kind", "step", "unix_time_seconds", "layer"}


def scalars(row: Row) -> dict[str, float]:
    """Every number of a row as `kind/field`, with the layer between them where there is one; events have none."""
    if row["kind"] == "event":
        return {}
    layer = f"layer{row['layer']:02}/" if "layer" in row else ""
    return {
        f"{row['kind']}/{layer}{name}": value
        for name, value in row.items()
        if name not in _NOT_SCALARS and isinstance(value, int | float)
    }


def alert(row: Row) -> tuple[str, str, str] | None:
    """Name, sentence and severity of an event that a person should see; None for every other row."""
    if row["kind"] != "event" or row["severity"] == "info":
        return None
    return row["name"], f"step {row['step']}: {row['message']}", row["severity"]


def missing(name: str, extra: str) -> UserError:
    """The error of a sink whose package is not there."""
    return UserError(f"log.sinks asks for {name}, which is not installed: pip install 'trifocal[{extra}]'")
