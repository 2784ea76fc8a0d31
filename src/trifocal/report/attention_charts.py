"""The report's charts of the attention, from the telemetry rows of telemetry/attention_telemetry.py."""

import statistics
from typing import Any

from trifocal.report.charts import Chart, Trace, heat_map, line, share_steps
from trifocal.runlog.jsonl import is_number
from trifocal.runlog.run import Run

BRANCHES = {"cmp": "compressed", "slc": "selected", "win": "window"}
_STEP = {"title": {"text": "step"}}
_MAX_LAYER_LINES = 32


def attention_charts(run: Run) -> list[Chart]:
    """Charts of gates and selection of one run, in the order of the page; empty without telemetry."""
    rows = run.of_kind("telemetry")
    if not rows:
        return []
    charts = [
        _gates(rows),
        _entropy(rows),
        _recall(rows),
        _recall_by_distance(run.last_telemetry()),
        _distances(run.last_telemetry()),
        _selection(rows),
    ]
    charts = [chart for chart in charts if chart.traces]
    share_steps(charts, run.last_step)
    return charts


def _gates(rows: list[dict[str, Any]]) -> Chart:
    traces: list[Trace] = []
    for branch in BRANCHES:
        traces += _layer_lines(rows, f"gate_mean_{branch}", f"@{branch}")
    traces += _branch_lines(rows, "gate_mean_", 3)
    layout = {"xaxis": _STEP, "yaxis": {"title": {"text": "gate"}, "range": [0, 1]}}
    caption = "Mean over heads and tokens: strong over all layers, thin each layer. A line at 0 is an unused branch."
    return Chart("gates", "Gates of the three branches", caption, traces, layout, wide=True, height=320)


def _entropy(rows: list[dict[str, Any]]) -> Chart:
    layout = {"xaxis": _STEP, "yaxis": {"range": [0, 0.72], "title": {"text": "nats"}}}
    caption = "Mean entropy of a gate as a probability: 0.69 is undecided, 0 is stuck open or closed, without gradient."
    return Chart("entropy", "How decided the gates are", caption, _branch_lines(rows, "gate_entropy_", 2), layout)


def _recall(rows: list[dict[str, Any]]) -> Chart:
    traces = [
        *_layer_lines(rows, "choice_recall", "@slc"),
        *_mean_line(rows, "choice_recall", "choice", "@slc", width=3),
        *_mean_line(rows, "recall_by_chance", "random blocks", "@soft", width=3, dash="dot"),
    ]
    caption = "Mass of full attention that the free blocks hold, as a share of the most that n blocks could hold."
    layout = {"xaxis": _STEP, "yaxis": {"range": [0, 1.02], "tickformat": ".0%"}}
    return Chart("recall", "Choice recall", caption, traces, layout)


def _recall_by_distance(last: list[dict[str, Any]]) -> Chart:
    traces: list[Trace] = []
    for name, label, colour in (
        ("exact_mass_by_distance", "exact choice", "@dense"),
        ("held_mass_by_distance", "choice", "@slc"),
    ):
        shares = [shares for row in last if (shares := _shares(row, name))]
        if shares:
            means = [statistics.fmean(each) for each in zip(*shares, strict=False)]
            traces.append(line(distance_labels(len(means)), means, label, colour) | {"mode": "lines+markers"})
    layout = {
        "xaxis": {"title": {"text": "blocks back"}, "type": "category"},
        "yaxis": {"rangemode": "tozero", "tickformat": ".0%"},
    }
    caption = f"Where that mass lies, at step {last[0]['step']:,}, mean over layers: the gap is what the choice misses."
    return Chart("recall_distance", "Choice recall by distance", caption, traces, layout)


def _distances(rows: list[dict[str, Any]]) -> Chart:
    last = [row for row in rows if _shares(row, "selected_distance_shares")]
    bins = max((len(row["selected_distance_shares"]) for row in last), default=0)
    trace = heat_map(
        distance_labels(bins),
        [row["layer"] for row in last],
        [row["selected_distance_shares"] for row in last],
        "layer %{y}, %{x} blocks back: %{z:.1%}<extra></extra>",
    )
    trace["colorbar"] |= {"tickformat": ".0%"}
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": "blocks back"}, "type": "category"},
        "yaxis": {"title": {"text": "layer"}, "dtick": max(1, len(last) // 6)},
    }
    caption = f"Share of the selected blocks at each distance from the query, at step {rows[0]['step']:,}."
    return Chart("distances", "How far selection looks", caption, [trace] if last else [], layout)


def _selection(rows: list[dict[str, Any]]) -> Chart:
    names = {
        "neighbour_overlap": "of a query's blocks, selected by its neighbour too",
        "free_local_share": "of free choices, inside the window anyway",
        "selected_forced_share": "of the selected blocks, always selected",
        "fewer_than_n_share": "of queries, with fewer blocks than they may select",
    }
    traces = [
        trace
        for index, (name, label) in enumerate(names.items())
        for trace in _mean_line(rows, name, label, f"@run{index}")
    ]
    layout = {"xaxis": _STEP, "yaxis": {"range": [-0.02, 1.02], "tickformat": ".0%"}}
    return Chart("selection", "Selected blocks", "Mean over layers.", traces, layout)


def _shares(row: dict[str, Any], name: str) -> list[float]:
    shares = row.get(name)
    return shares if isinstance(shares, list) and all(map(is_number, shares)) else []


def distance_labels(bins: int) -> list[str]:
    """Names of the telemetry's distance bins: 0, 1, 2-3, 4-7, …"""
    labels = ["0", "1"]
    for power in range(1, bins - 1):
        labels.append(f"{2**power}-{2 ** (power + 1) - 1}")
    return labels[:bins]


def _layer_lines(rows: list[dict[str, Any]], name: str, colour: str) -> list[Trace]:
    """A thin line for each of several layers, which hover names."""
    traces: list[Trace] = []
    layers = sorted({row["layer"] for row in rows})
    for layer in layers if 1 < len(layers) <= _MAX_LAYER_LINES else []:
        thin = {"opacity": 0.35, "showlegend": False, "hovertemplate": f"layer {layer}: %{{y:.2f}}<extra></extra>"}
        of_layer = [row for row in rows if row["layer"] == layer]
        traces += [trace | thin for trace in _mean_line(of_layer, name, "", colour, width=1)]
    return traces


def _branch_lines(rows: list[dict[str, Any]], prefix: str, width: float) -> list[Trace]:
    return [
        trace
        for branch, label in BRANCHES.items()
        for trace in _mean_line(rows, prefix + branch, label, f"@{branch}", width=width)
    ]


def _mean_line(rows: list[dict[str, Any]], name: str, label: str, colour: str, **look: Any) -> list[Trace]:
    """A line of the mean of a figure over layers; none without values."""
    by_step: dict[int, list[float]] = {}
    for row in rows:
        if is_number(row.get(name)):
            by_step.setdefault(row["step"], []).append(row[name])
    steps = sorted(by_step)
    means = [round(statistics.fmean(by_step[step]), 5) for step in steps]
    return [line(steps, means, label, colour, **look)] if steps else []
