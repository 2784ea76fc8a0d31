"""The tables of `quality.py`: means over seeds, and evaluations with a column for each place."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

Row = dict[str, Any]


def means(rows: Sequence[Row], figure: str = "validation_loss") -> list[Row]:
    """The loss of each variant over seeds, and its difference from the dense one with the same seed and data."""
    dense = {row["seed"]: row[figure] for row in rows if row["variant"] == "dense"}
    found = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = {row["seed"]: row[figure] for row in rows if row["variant"] == variant}
        losses = [loss for loss in own.values() if loss is not None]
        pairs = [(own[seed], dense.get(seed)) for seed in own]
        apart = [loss - other for loss, other in pairs if loss is not None and other is not None]
        found.append(
            {
                "variant": variant,
                "seeds": len(losses),
                "mean_loss": mean(losses) if losses else None,
                "standard_deviation": stdev(losses) if len(losses) > 1 else None,
                "above_dense": mean(apart) if apart else None,
                "standard_error_of_that": stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None,
            }
        )
    return found


def above_dense_by_step(rows: Sequence[Row]) -> list[Row]:
    """How far each variant is above the dense one with the same seed and data, at each step that both evaluated."""
    dense = {row["seed"]: dict(row["curve"]) for row in rows if row["variant"] == "dense"}
    table: list[Row] = []
    for row in rows:
        if row["variant"] != "dense" and row["seed"] in dense:
            apart = {f"step {step:,}": loss - dense[row["seed"]][step]
                     for step, loss in row["curve"] if step in dense[row["seed"]]}  # fmt: skip
            table.append({"variant": row["variant"], "seed": row["seed"]} | apart)
    return table


def pivot(rows: Sequence[Row], task: str, figure: str, along: str, *, seeds: bool = False) -> list[Row]:
    """A table of an evaluation: a row for each variant (and seed, where asked for), a column for each place.

    `along` names the field with the column: `first` for a range up to `end`, `depth` or `layer`.
    """
    own = [row for row in rows if row["task"] == task and figure in row]

    def column(row: Row) -> str:
        if along == "layer":
            return f"layer {row['layer']}"
        return f"{row['depth']:.0%}" if along == "depth" else f"{row['first']:,}-{row['end'] - 1:,}"

    names = ("variant", *(("seed", "steps") if seeds else ()), "length", "needles", "pairs")

    def head(row: Row) -> Row:
        return {name: row[name] for name in names if row.get(name) is not None}

    columns = dict.fromkeys(column(row) for row in sorted(own, key=lambda row: row[along]))
    table = []
    for key in dict.fromkeys(tuple(head(row).items()) for row in own):
        group = [row for row in own if tuple(head(row).items()) == key]
        cells = {name: [row[figure] for row in group if column(row) == name] for name in columns}
        table.append(dict(key) | {name: mean(values) if values else None for name, values in cells.items()})
    return table
