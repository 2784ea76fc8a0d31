"""Comparisons of the rows of an attention run: how many times faster, and from which length on."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from lib.recorder import OK

Row = Mapping[str, Any]
SERIES = ("batch", "heads", "groups", "head_dim", "value_dim", "dtype")
OURS = ("whole", "one branch")
SPARSE = ("end to end", *OURS, "fla parallel_nsa", "sfnsa", "flash-msa")
BASELINES = ("dense cudnn", "dense flash", "dense fa4")
# Figures that are compared over lengths: times of whole calls, and of the device.
CALLS = ("forward_ms", "forward_device_ms", "forward_backward_ms", "forward_backward_device_ms")
MEASURES = (*CALLS, "backward_ms")


def speedups(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Time of each dense row over that of each sparse row of the same shape: above 1 the sparse one is faster."""
    found = []
    for row in rows:
        if row["status"] != OK or row["row"] not in SPARSE:
            continue
        for dense in _of_same_shape(row, rows):
            ratios = {
                f"{measure.removesuffix('_ms')}_ratio": dense[measure] / row[measure]
                for measure in MEASURES
                if dense.get(measure) and row.get(measure)
            }
            labels = {key: row[key] for key in ("shape", "tokens", "row", "choices")}
            found.append({**labels, "over": dense["row"], **ratios})
    return found


def crossovers(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """From which length on the attention of `OURS` is faster than each dense one, for each series of lengths.

    `first_faster_tokens` is the shortest measured length from which it is faster at every longer one,
    `crossover_tokens` the length at which the two lines cross between measured ones (straight on logarithmic axes).
    Both are None where it is not faster at the longest, the latter also where it is faster at the shortest.
    """
    found = []
    for series, members in series_of(rows).items():
        kinds = dict.fromkeys((row["row"], row["choices"]) for row in members if row["row"] in OURS)
        for (name, choices), baseline, measure in product(kinds, BASELINES, CALLS):
            ours = points(members, name, choices, measure)
            theirs = points(members, baseline, "", measure)
            lengths = sorted(ours.keys() & theirs.keys())
            if len(lengths) < 2:
                continue
            first, crossing = _crossing([(t, theirs[t] / ours[t]) for t in lengths])
            found.append(
                {
                    **dict(zip(SERIES, series, strict=True)),
                    "row": name,
                    "choices": choices,
                    "over": baseline,
                    "measure": measure.removesuffix("_ms"),
                    "first_faster_tokens": first,
                    "crossover_tokens": crossing,
                    "longest_tokens": lengths[-1],
                    "ratio_at_longest": theirs[lengths[-1]] / ours[lengths[-1]],
                }
            )
    return found


def series_of(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows that were measured, by all of their shape but the length."""
    series: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["status"] == OK:
            series.setdefault(tuple(row[key] for key in SERIES), []).append(row)
    return series


def points(rows: Iterable[Row], name: str, choices: str, measure: str) -> dict[int, float]:
    """One line: a measure by length."""
    return {
        row["tokens"]: row[measure]
        for row in rows
        if row["row"] == name and row["choices"] == choices and row.get(measure)
    }


def _of_same_shape(row: Row, rows: Iterable[Row]) -> list[Row]:
    keys = (*SERIES, "tokens")
    return [
        other
        for other in rows
        if other["status"] == OK and other["row"] in BASELINES and all(other[key] == row[key] for key in keys)
    ]


def _crossing(ratios: Sequence[tuple[int, float]]) -> tuple[int | None, float | None]:
    """First length of the unbroken run of ratios above 1 that ends the list, and where the line enters it."""
    first = len(ratios)
    while first and ratios[first - 1][1] > 1:
        first -= 1
    if first == len(ratios):
        return None, None
    if first == 0:
        return ratios[0][0], None
    (short, below), (long, above) = ratios[first - 1], ratios[first]
    share = -math.log(below) / (math.log(above) - math.log(below))
    return long, short * (long / short) ** share
