"""The report's charts of the figures of `trifocal evaluate`: loss by position, needles, recall."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trifocal.report.charts import Chart, Trace, heat_map, line
from trifocal.runlog.run import Run

Row = dict[str, Any]


def evaluation_charts(runs: list[Run]) -> list[Chart]:
    """Charts of the last evaluation of each run, in the order of the page; empty if no run was evaluated."""
    charts = [
        _position(runs),
        _choice(runs),
        *(_needle(run, index, len(runs)) for index, run in enumerate(runs)),
        _recall(runs),
        _distance(runs),
    ]
    return [chart for chart in charts if chart.traces]


def _rows(run: Run, task: str, *figures: str) -> list[Row]:
    """The rows of a task in the last evaluation that has any, with all these figures."""
    for evaluation in reversed(run.evaluations):
        rows = [row for row in evaluation["rows"] if row["task"] == task and all(name in row for name in figures)]
        if rows:
            return rows
    return []


def _lines(runs: list[Run], task: str, *figures: str) -> Iterator[tuple[list[Row], str, str, str]]:
    """For each run, and each length and source of its rows of a task: these rows; name, colour and dashes of a line."""
    for index, run in enumerate(runs):
        rows = _rows(run, task, *figures)
        kinds = sorted({(row["length"], row.get("source", "")) for row in rows})
        lengths, sources = ({kind[part] for kind in kinds} for part in (0, 1))
        for number, (length, source) in enumerate(kinds):
            words = [run.name] * (len(runs) > 1)
            if len(lengths) > 1 or not words:
                words.append(f"{length:,} tokens")
            if len(sources) > 1:
                words.append(source)
            own = [row for row in rows if (row["length"], row.get("source", "")) == (length, source)]
            yield own, ", ".join(words), *_style(runs, index, number)


def _position(runs: list[Run]) -> Chart:
    traces: list[Trace] = []
    ends: set[int] = set()
    for rows, name, colour, dash in _lines(runs, "position", "first", "end", "loss", "targets"):
        own = sorted(rows, key=lambda row: row["first"])
        places = [row["end"] for row in own]
        trace = _line(places, [row["loss"] for row in own], name, colour, dash)
        ends.update(places)
        trace["text"] = [
            f"{row['first']:,} to {row['end'] - 1:,}: {row['loss']:.4f} ({row['targets']:,} targets)" for row in own
        ]
        traces.append({**trace, "hovertemplate": "%{text}"})
        if all("beside_loss" in row for row in own):
            theirs = f"{name}, {Path(own[0].get('beside', 'beside')).name}"
            traces.append(_line(places, [row["beside_loss"] for row in own], theirs, colour, "dash"))
    layout = {
        "xaxis": {
            "title": {"text": "tokens before, up to"},
            "type": "log",
            "tickvals": sorted(ends)[-1::-2],
            "ticktext": [f"{end:,}" for end in sorted(ends)[-1::-2]],
        },
        "yaxis": {"title": {"text": "nats per token"}},
        "showlegend": True,
    }
    caption = "Validation loss by the number of tokens before. A curve that falls to its end makes use of all of them."
    return Chart("position", "Loss by position", caption, traces, layout, wide=len(runs) > 1, height=340)


def _choice(runs: list[Run]) -> Chart:
    traces: list[Trace] = []
    for rows, name, colour, dash in _lines(runs, "choice", "layer", "recall", "recall_by_chance"):
        layers = [row["layer"] for row in rows]
        traces.append(_line(layers, [row["recall"] for row in rows], name, colour, dash))
        chance = _line(layers, [row["recall_by_chance"] for row in rows], f"{name}, by chance", colour, "dot")
        traces.append(chance | {"opacity": 0.5})
    layout = {"xaxis": {"title": {"text": "layer"}, "dtick": 1}, "yaxis": _SHARE, "showlegend": True}
    caption = "Mass of full attention that the chosen free blocks hold, as a share of the exact choice's."
    return Chart("choice", "Recall of the choice by layer", caption, traces, layout)


def _needle(run: Run, index: int, num_runs: int) -> Chart:
    rows = _rows(run, "needle", "depth", "accuracy")
    # A cell has room for one source: the last that was measured.
    rows = [row for row in rows if row.get("source") == rows[-1].get("source")]
    lengths, depths = sorted({row["length"] for row in rows}), sorted({row["depth"] for row in rows})
    found = {(row["length"], row["depth"]): row["accuracy"] for row in rows}
    values = [[found.get((length, depth)) for length in lengths] for depth in depths]
    trace = heat_map(
        [f"{length:,}" for length in lengths],
        [f"{depth:.0%}" for depth in depths],
        values,
        "%{x} tokens, depth %{y}: %{z:.0%} found<extra></extra>",
    )
    trace |= {"zmax": 1, "xgap": 1}
    trace["colorbar"] |= {"tickvals": [0, 0.5, 1], "tickformat": ".0%"}
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": "tokens"}, "type": "category"},
        "yaxis": {"title": {"text": "depth"}, "type": "category", "autorange": "reversed"},
    }
    caption = "Share of needles that are found, by length and depth of the haystack; the beginning is on top."
    title = f"Needles: {run.name}" if num_runs > 1 else "Needles in haystacks"
    return Chart(f"needle-{index}", title, caption, [trace] if rows else [], layout, height=340)


def _recall(runs: list[Run]) -> Chart:
    traces: list[Trace] = []
    for rows, *style in _lines(runs, "recall", "pairs", "accuracy"):
        own = sorted(rows, key=lambda row: row["pairs"])
        traces.append(_line([row["pairs"] for row in own], [row["accuracy"] for row in own], *style))
    layout = {"xaxis": {"title": {"text": "pairs"}, "rangemode": "tozero"}, "yaxis": _SHARE, "showlegend": True}
    caption = "Share of queries that are answered with the value of their key, by the number of pairs."
    return Chart("recall_pairs", "Associative recall", caption, traces, layout)


def _distance(runs: list[Run]) -> Chart:
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        rows = _rows(run, "recall_distance", "pairs", "first", "end", "accuracy")
        kinds = sorted({(row["length"], row["pairs"]) for row in rows})
        # For several runs, the hardest row only: lines of all would cover one another.
        for number, kind in enumerate(kinds[-1:] if len(runs) > 1 else kinds):
            own = sorted((row for row in rows if (row["length"], row["pairs"]) == kind), key=lambda row: row["first"])
            name = f"{run.name}, {kind[1]:,} pairs" if len(runs) > 1 else f"{kind[1]:,} pairs of {kind[0]:,} tokens"
            places = [f"{row['first']:,}-{row['end'] - 1:,}" for row in own]
            traces.append(_line(places, [row["accuracy"] for row in own], name, *_style(runs, index, number)))
    layout = {
        "xaxis": {"title": {"text": "tokens between query and pair"}, "type": "category"},
        "yaxis": _SHARE,
        "showlegend": True,
    }
    caption = "The same by distance: with only a window it falls behind the end of that."
    return Chart("recall_distance", "Recall by distance", caption, traces, layout)


def _style(runs: list[Run], index: int, number: int) -> tuple[str, str]:
    """Colour and dashes: a colour for each run; of a single run, for each of its lines."""
    if len(runs) == 1:
        return f"@run{number}", "solid"
    return f"@run{index}", ("solid", "dot", "dash", "dashdot")[number % 4]


_SHARE = {"range": [-0.02, 1.02], "tickformat": ".0%"}


def _line(x: list[Any], y: list[float], name: str, colour: str, dash: str) -> Trace:
    return line(x, y, name, colour, dash=dash) | {"mode": "lines+markers", "marker": {"size": 6}}
