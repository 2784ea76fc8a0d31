"""The report's charts of the attention, from the telemetry rows of diagnostics/telemetry.py."""

from typing import Any

from trifocal.diagnostics.report.charts import FULL, THIRD, Chart, Trace
from trifocal.diagnostics.run import Run

BRANCHES = {"cmp": "compressed", "slc": "selected", "win": "window"}
_GATE_MAP_CAPTIONS = {
    "cmp": "Which layers look at the far past.",
    "slc": "Which layers look at chosen blocks.",
    "win": "Which layers look at the near past.",
}


def attention_charts(run: Run) -> list[Chart]:
    """Gates and selection of one run, as far as it has telemetry.

    Args:
        run: The run.

    Returns:
        The charts, in the order of the page.
    """
    rows = run.of_kind("telemetry")
    if not rows:
        return []
    charts = [
        _gates(rows),
        *(_gate_map(rows, branch) for branch in BRANCHES if any(row["layer"] > 0 for row in rows)),
        _shut_heads(rows),
        _distances(rows),
        _selection(rows),
    ]
    return [chart for chart in charts if chart.traces]


def _gates(rows: list[dict[str, Any]]) -> Chart:
    traces: list[Trace] = []
    for branch, label in BRANCHES.items():
        steps, means = _mean_over_layers(rows, f"gate_mean_{branch}")
        _, spreads = _mean_over_layers(rows, f"gate_spread_{branch}")
        if not steps:
            continue
        edge = {"type": "scatter", "mode": "lines", "x": steps, "showlegend": False, "hoverinfo": "skip"}
        low = [round(max(0.0, mean - spread), 4) for mean, spread in zip(means, spreads, strict=True)]
        high = [round(min(1.0, mean + spread), 4) for mean, spread in zip(means, spreads, strict=True)]
        traces += [
            {**edge, "y": low, "line": {"width": 0}},
            {**edge, "y": high, "line": {"width": 0}, "fill": "tonexty", "fillcolor": f"@{branch}-faint"},
            {
                "type": "scatter",
                "mode": "lines",
                "x": steps,
                "y": means,
                "name": label,
                "line": {"color": f"@{branch}", "width": 2.5},
            },
        ]
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": "gate"}, "range": [0, 1]}}
    caption = (
        "Mean over layers, heads and tokens; the band is one standard deviation. A line at 0 is a lens nobody uses."
    )
    return Chart("gates", "Gates of the three lenses", caption, traces, layout, columns=FULL, height=340)


def _gate_map(rows: list[dict[str, Any]], branch: str) -> Chart:
    steps, layers, values = _map(rows, f"gate_mean_{branch}")
    trace: Trace = {
        "type": "heatmap",
        "x": steps,
        "y": layers,
        "z": values,
        "zmin": 0,
        "zmax": 1,
        "colorscale": "@sequential",
        "colorbar": {"thickness": 8, "outlinewidth": 0, "nticks": 3},
        "hovertemplate": "step %{x}, layer %{y}: %{z:.3f}<extra></extra>",
    }
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": "step"}, "nticks": 4},
        "yaxis": {"title": {"text": "layer"}, "dtick": max(1, len(layers) // 6)},
    }
    title = f"{BRANCHES[branch].capitalize()} gate by layer"
    return Chart(f"gate_map_{branch}", title, _GATE_MAP_CAPTIONS[branch], [trace], layout, columns=THIRD, height=270)


def _shut_heads(rows: list[dict[str, Any]]) -> Chart:
    traces = _branch_lines(rows, "heads_ignoring_")
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"range": [0, 1], "tickformat": ".0%", "title": {"text": "heads"}},
    }
    caption = "Share of heads whose mean gate of a branch is below 0.05."
    return Chart("shut_heads", "Heads that ignore a lens", caption, traces, layout)


def _distances(rows: list[dict[str, Any]]) -> Chart:
    last_step = max(row["step"] for row in rows)
    last = [row for row in rows if row["step"] == last_step and row.get("selected_distance_shares")]
    bins = max((len(row["selected_distance_shares"]) for row in last), default=0)
    traces: list[Trace] = []
    if last:
        traces.append(
            {
                "type": "heatmap",
                "x": distance_labels(bins),
                "y": [row["layer"] for row in last],
                "z": [row["selected_distance_shares"] for row in last],
                "zmin": 0,
                "colorscale": "@sequential",
                "colorbar": {"thickness": 10, "outlinewidth": 0, "tickformat": ".0%"},
                "hovertemplate": "layer %{y}, %{x} blocks back: %{z:.1%}<extra></extra>",
            }
        )
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": "blocks back"}, "type": "category"},
        "yaxis": {"title": {"text": "layer"}, "dtick": max(1, len(last) // 6)},
    }
    caption = f"Share of the selected blocks at each distance from the query, at step {last_step:,}."
    return Chart("distances", "How far selection looks", caption, traces, layout)


def _selection(rows: list[dict[str, Any]]) -> Chart:
    names = {
        "importance_covered": "importance covered",
        "neighbour_overlap": "overlap of neighbours' choices",
        "selected_forced_share": "forced blocks",
        "fewer_than_n_share": "queries with fewer than n",
    }
    traces: list[Trace] = []
    for index, (name, label) in enumerate(names.items()):
        steps, values = _mean_over_layers(rows, name)
        if steps:
            line = {"color": f"@run{index}", "width": 2}
            traces.append({"type": "scatter", "mode": "lines", "x": steps, "y": values, "name": label, "line": line})
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"range": [0, 1.02], "tickformat": ".0%"}}
    caption = "Mean over layers. Importance covered: how much of what the compressed lens finds important was selected."
    return Chart("selection", "Selected blocks", caption, traces, layout)


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
            line = {"color": f"@{branch}", "width": 2}
            traces.append({"type": "scatter", "mode": "lines", "x": steps, "y": values, "name": label, "line": line})
    return traces


def _mean_over_layers(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    by_step: dict[int, list[float]] = {}
    for row in rows:
        if row.get(name) is not None:
            by_step.setdefault(row["step"], []).append(row[name])
    steps = sorted(by_step)
    return steps, [round(sum(by_step[step]) / len(by_step[step]), 5) for step in steps]


def _map(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[int], list[list[float | None]]]:
    values = {(row["layer"], row["step"]): row.get(name) for row in rows}
    steps = sorted({row["step"] for row in rows})
    layers = sorted({row["layer"] for row in rows})
    return steps, layers, [[values.get((layer, step)) for step in steps] for layer in layers]
