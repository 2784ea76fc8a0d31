"""The report's charts of the attention, from the telemetry rows of telemetry/attention_telemetry.py."""

import statistics
from typing import Any

from trifocal.report.charts import FULL, THIRD, Chart, Trace, heat_map, line, share_steps
from trifocal.runlog.jsonl import is_number
from trifocal.runlog.run import Run
from trifocal.telemetry.statistics import IGNORED_GATE

BRANCHES = {"cmp": "compressed", "slc": "selected", "win": "window"}
_GATE_MAP_CAPTIONS = {
    "cmp": "Use of the far past by layer.",
    "slc": "Use of chosen blocks by layer.",
    "win": "Use of the near past by layer.",
}

_STEP = {"title": {"text": "step"}}
_MOST_LAYER_LINES = 32
_LEVEL = 0.01
_COUNTS = "selected_count_shares"


def attention_charts(run: Run) -> list[Chart]:
    """Charts of gates and selection of one run, in the order of the page; empty without telemetry."""
    rows = run.of_kind("telemetry")
    if not rows:
        return []
    charts = [
        _gates(rows),
        *(_gate_map(rows, branch) for branch in BRANCHES),
        _entropy(rows),
        _ignored(rows),
        _recall(rows),
        _recall_map(rows),
        _distances(rows),
        _distances_over_time(rows),
        _counts(rows),
        _selection(rows),
    ]
    charts = [chart for chart in charts if chart.traces]
    share_steps(charts, run.last_step)
    return charts


def _gates(rows: list[dict[str, Any]]) -> Chart:
    traces: list[Trace] = []
    layers = sorted({row["layer"] for row in rows})
    for branch in BRANCHES:
        for layer in layers if 1 < len(layers) <= _MOST_LAYER_LINES else []:
            steps, means = _mean_over_layers([row for row in rows if row["layer"] == layer], f"gate_mean_{branch}")
            thin = {"opacity": 0.35, "showlegend": False, "hoverinfo": "skip"}
            traces.append(line(steps, means, "", f"@{branch}", width=1) | thin)
    for branch, label in BRANCHES.items():
        steps, means = _mean_over_layers(rows, f"gate_mean_{branch}")
        if steps:
            traces.append(line(steps, means, label, f"@{branch}", width=3))
    layout = {"xaxis": _STEP, "yaxis": {"title": {"text": "gate"}, "range": [0, 1]}}
    caption = "Mean over heads and tokens: strong over all layers, thin each layer. A line at 0 is an unused branch."
    if not any(row.get(f"heads_ignoring_{branch}") for row in rows for branch in BRANCHES):
        caption += f" No head ignores a branch: each has a mean gate of {IGNORED_GATE} or more for all three."
    return Chart("gates", "Gates of the three branches", caption, traces, layout, columns=FULL, height=320)


def _gate_map(rows: list[dict[str, Any]], branch: str) -> Chart:
    title = f"{BRANCHES[branch].capitalize()} gate by layer"
    chart = _layer_map(rows, f"gate_mean_{branch}", f"gate_map_{branch}", title, _GATE_MAP_CAPTIONS[branch])
    chart.columns, chart.height = THIRD, 250
    if not any(row["layer"] > 0 and is_number(row.get(f"gate_mean_{branch}")) for row in rows):
        chart.traces = []
    for trace in chart.traces:
        trace |= {"zmax": 1, "colorscale": f"@scale-{branch}"}
        trace["colorbar"] |= {"tickvals": [0, 0.5, 1]}
    return chart


def _entropy(rows: list[dict[str, Any]]) -> Chart:
    layout = {"xaxis": _STEP, "yaxis": {"range": [0, 0.72], "title": {"text": "nats"}}}
    caption = "Mean entropy of a gate as a probability: 0.69 is undecided, 0 is stuck open or closed, without gradient."
    return Chart("entropy", "How decided the gates are", caption, _branch_lines(rows, "gate_entropy_"), layout)


def _ignored(rows: list[dict[str, Any]]) -> Chart:
    traces = _branch_lines(rows, "heads_ignoring_")
    if not any(value for trace in traces for value in trace["y"]):
        traces = []
    yaxis = {"rangemode": "tozero", "tickformat": ".0%", "title": {"text": "heads"}}
    caption = f"Share of heads with a mean gate of the branch below {IGNORED_GATE}."
    return Chart("ignored", "Heads that ignore a branch", caption, traces, {"xaxis": _STEP, "yaxis": yaxis})


def _recall(rows: list[dict[str, Any]]) -> Chart:
    names = {
        "dense_recall": ("of its best blocks, selected", "@slc", "solid"),
        "dense_mass_covered": ("of its attention, inside the selected", "@dense", "solid"),
        "recall_by_chance": ("random blocks", "@soft", "dot"),
    }
    traces: list[Trace] = []
    for name, (label, colour, dash) in names.items():
        steps, values = _mean_over_layers(rows, name)
        if steps:
            traces.append(line(steps, values, label, colour, dash=dash))
    caption = "The blocks and the probability of full attention over the same keys that selection covers."
    layout = {"xaxis": _STEP, "yaxis": {"range": [0, 1.02], "tickformat": ".0%"}}
    return Chart("recall", "Selection against full attention", caption, traces, layout)


def _recall_map(rows: list[dict[str, Any]]) -> Chart:
    caption = "Share of full attention's best blocks that were selected; layers that select badly are pale."
    chart = _layer_map(rows, "dense_recall", "recall_map", "Recall by layer", caption)
    several = len({row["layer"] for row in rows}) > 1
    if not several or not any(is_number(row.get("dense_recall")) for row in rows):
        chart.traces = []
    for trace in chart.traces:
        hover = "step %{x}, layer %{y}: %{z:.0%}<extra></extra>"
        trace |= {"colorscale": "@scale-slc", "zmax": 1, "hovertemplate": hover}
        trace["colorbar"] |= {"tickformat": ".0%"}
    return chart


def _distances(rows: list[dict[str, Any]]) -> Chart:
    last_step = max(row["step"] for row in rows)
    last = [row for row in rows if row["step"] == last_step and _shares(row, "selected_distance_shares")]
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
    caption = f"Share of the selected blocks at each distance from the query, at step {last_step:,}."
    return Chart("distances", "How far selection looks", caption, [trace] if last else [], layout)


def _distances_over_time(rows: list[dict[str, Any]]) -> Chart:
    by_step: dict[int, list[list[float]]] = {}
    for row in rows:
        if shares := _shares(row, "selected_distance_shares"):
            by_step.setdefault(row["step"], []).append(shares)
    steps = sorted(by_step)
    bins = max((len(shares) for group in by_step.values() for shares in group), default=0)
    values = [
        [round(statistics.fmean(sum(shares[index : index + 1]) for shares in by_step[step]), 5) for step in steps]
        for index in range(bins)
    ]
    trace = heat_map(steps, distance_labels(bins), values, "step %{x}, %{y} blocks back: %{z:.1%}<extra></extra>")
    trace["colorbar"] |= {"tickformat": ".0%"}
    yaxis = {"title": {"text": "blocks back"}, "type": "category"}
    layout = {"hovermode": "closest", "xaxis": _STEP, "yaxis": yaxis}
    caption = "The same over the run, mean over layers."
    return Chart("distances_time", "Distance over time", caption, [trace] if len(steps) > 1 else [], layout)


def _counts(rows: list[dict[str, Any]]) -> Chart:
    last_step = max(row["step"] for row in rows)
    last = [(row["layer"], shares) for row in rows if row["step"] == last_step and (shares := _shares(row, _COUNTS))]
    most = max((len(shares) for _, shares in last), default=0)
    trace = heat_map(
        list(range(most)),
        [layer for layer, _ in last],
        [shares for _, shares in last],
        "layer %{y}, %{x} blocks: %{z:.1%} of the queries<extra></extra>",
    )
    trace["colorbar"] |= {"tickformat": ".0%"}
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": "selected blocks"}},
        "yaxis": {"title": {"text": "layer"}, "dtick": max(1, len(last) // 6)},
    }
    caption = (
        f"Share of the queries that select so many blocks, at step {last_step:,}. Early queries have fewer to choose."
    )
    full = all(shares[-1] > 1 - _LEVEL for _, shares in last)
    return Chart("counts", "How many blocks a query selects", caption, [] if full else [trace], layout)


def _selection(rows: list[dict[str, Any]]) -> Chart:
    names = {
        "importance_covered": "of the compressed branch's importance, selected",
        "neighbour_overlap": "of a query's blocks, selected by its neighbour too",
        "free_local_share": "of free choices, inside the window anyway",
        "selected_forced_share": "of the selected blocks, always selected",
        "fewer_than_n_share": "of queries, with fewer blocks than they may select",
    }
    traces: list[Trace] = []
    level = []
    for index, (name, label) in enumerate(names.items()):
        steps, values = _mean_over_layers(rows, name)
        if steps and index > 0 and max(values) - min(values) < _LEVEL:
            # Flat lines hide the others; they become words in the caption.
            level.append(f"{values[-1]:.0%} {label}")
        elif steps:
            trace = line(steps, values, label, f"@run{index}")
            traces.append(trace | {"mode": "lines+markers", "marker": {"size": 5}})
    layout = {"xaxis": _STEP, "yaxis": {"range": [-0.02, 1.02], "tickformat": ".0%"}}
    caption = "Mean over layers." + (f" Constant: {'; '.join(level)}." if level else "")
    return Chart("selection", "Selected blocks", caption, traces, layout)


def _shares(row: dict[str, Any], name: str) -> list[float]:
    shares = row.get(name)
    return shares if isinstance(shares, list) and all(map(is_number, shares)) else []


def distance_labels(bins: int) -> list[str]:
    """Names of the telemetry's distance bins: 0, 1, 2-3, 4-7, …"""
    labels = ["0", "1"]
    for power in range(1, bins - 1):
        labels.append(f"{2**power}-{2 ** (power + 1) - 1}")
    return labels[:bins]


def _branch_lines(rows: list[dict[str, Any]], prefix: str) -> list[Trace]:
    traces: list[Trace] = []
    for branch, label in BRANCHES.items():
        steps, values = _mean_over_layers(rows, prefix + branch)
        if steps:
            traces.append(line(steps, values, label, f"@{branch}"))
    return traces


def _layer_map(rows: list[dict[str, Any]], name: str, key: str, title: str, caption: str) -> Chart:
    """A heat map of one figure: layers over steps."""
    values = {(row["layer"], row["step"]): row[name] for row in rows if is_number(row.get(name))}
    steps, layers = sorted({row["step"] for row in rows}), sorted({row["layer"] for row in rows})
    z = [[values.get((layer, step)) for step in steps] for layer in layers]
    trace = heat_map(steps, layers, z, "step %{x}, layer %{y}: %{z:.3f}<extra></extra>")
    layout = {
        "hovermode": "closest",
        "xaxis": {**_STEP, "nticks": 5},
        "yaxis": {"title": {"text": "layer"}, "dtick": max(1, len(layers) // 6)},
    }
    return Chart(key, title, caption, [trace], layout)


def _mean_over_layers(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    by_step: dict[int, list[float]] = {}
    for row in rows:
        if is_number(row.get(name)):
            by_step.setdefault(row["step"], []).append(row[name])
    steps = sorted(by_step)
    return steps, [round(sum(by_step[step]) / len(by_step[step]), 5) for step in steps]
