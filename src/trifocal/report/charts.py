"""The report's charts of training, as plotly.js figures.

Colours are names (`@run0`, `@cmp`, …); the page replaces them by the colours of its light or dark theme.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trifocal.runlog.heartbeat import PHASES
from trifocal.runlog.run import Run

Trace = dict[str, Any]

_NAMED_SHARE = 0.18
"""A phase with at least this share of the time has its name in the bar."""
_MAX_DOTS = 60
_LONG_CURVE = 300
# Settings of the data that held-out rows do not follow from.
_OF_TRAINING = {"weights", "weights_after", "change_step", "seed", "streams", "prefetch_batches"}
_OF_TRAINING |= {"shuffle_documents", "shuffle_sequences"}
MAX_POINTS = 1500
"""Points of one curve; longer ones keep the lowest and the highest of every stretch."""


@dataclass
class Chart:
    """A figure with the words around it."""

    key: str
    title: str
    caption: str
    traces: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    wide: bool = False
    """Whether it fills a row of the page; others share one, as far as there is room."""
    height: int = 300


def training_charts(runs: list[Run]) -> list[Chart]:
    """The charts of training, in the order of the page, as far as the runs have figures."""
    utilisation = {"executed_mfu": "executed", "dense_equivalent_mfu": "dense equivalent"}
    of_peak = (
        "Share of the GPU's dense bf16 peak. Executed: FLOPs of this model. Dense equivalent: FLOPs of the same step "
        "with dense attention."
    )
    waits = {
        "step_seconds": "step",
        "data_wait_seconds_p95": "waiting for data, p95",
        "data_wait_seconds_p50": "waiting for data, median",
    }
    memory = {"memory_allocated_bytes": "allocated", "memory_reserved_bytes": "reserved"}
    allocator = "On a GPU the allocator's figures, on a CPU the process's resident memory. It should be level."
    rate, tokens = {"learning_rate": ""}, {"tokens_per_second": ""}
    followed = "Of the next token's distribution, in training: what a run learns that follows a frozen model."
    nats = "nats per token"
    charts = [
        _loss(runs),
        _above_first(runs),
        _curves(runs, "divergence", "Divergence from the frozen model", followed, {"divergence": ""}, nats),
        _curves(runs, "learning_rate", "Learning rate", "Warm-up, then the schedule.", rate, "", form="~g"),
        _gradient_norm(runs),
        _curves(runs, "throughput", "Throughput", "All ranks together, only in training steps.", tokens, "tokens/s"),
        _curves(runs, "utilisation", "Model FLOPs utilisation", of_peak, utilisation, "", form=".0%"),
        _curves(runs, "step_time", "Time of a step", "And its part spent waiting for data.", waits, "seconds"),
        _phases(runs),
        _curves(runs, "memory", "Memory", allocator, memory, "GiB", scale=2**-30),
    ]
    charts = [chart for chart in charts if chart.traces]
    share_steps(charts, max(run.last_step for run in runs))
    return charts


def share_steps(charts: list[Chart], last_step: int) -> None:
    """Give every chart over steps the same axis, from 0 to the last step."""
    for chart in charts:
        axis = chart.layout.get("xaxis", {})
        if axis.get("title") == {"text": "step"}:
            chart.layout["xaxis"] = {**axis, "range": [0, max(1, last_step) * 1.02]}


def _loss(runs: list[Run]) -> Chart:
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        colour = f"@run{index}"
        steps, losses = run.series("train", "loss")
        if steps:
            raw = line(*thin(steps, losses), f"{run.name}, each logged step", colour, width=1)
            raw |= {"opacity": 0.3, "showlegend": False, "hoverinfo": "skip"}
            label = "training" if len(runs) == 1 else f"{run.name}, training"
            traces += [raw, line(*thin(steps, smoothed(losses)), f"{label} (smoothed)", colour)]
        steps, losses = run.series("evaluation", "validation_loss")
        if steps:
            label = "validation" if len(runs) == 1 else f"{run.name}, validation"
            few = len(steps) <= _MAX_DOTS
            dot = {"size": 7 if few else 4, "color": "@surface", "line": {"color": colour, "width": 2 if few else 1}}
            dotted = line(steps, losses, label, colour, width=1.5, dash="dot")
            traces.append({**dotted, "mode": "lines+markers", "marker": dot})
        # In one run each source has a colour.
        for number, source in enumerate(run.of_sources("evaluation", "validation_loss") if len(runs) == 1 else ()):
            points = run.series("evaluation", f"validation_loss/{source}")
            traces.append(line(*points, f"validation, {source}", f"@run{number + 1}", width=1, dash="dot"))
    caption = "Cross-entropy in nats per token; lower is better. Faint: as logged; strong: smoothed; dots: validation."
    return Chart("loss", "Loss", caption, traces, _axes("nats per token"), wide=True, height=380)


def _above_first(runs: list[Run]) -> Chart:
    """The validation loss of each run above that of the first at the same step, if the settings of their data agree."""
    first, *others = runs
    base = dict(zip(*first.series("evaluation", "validation_loss"), strict=True))
    traces = []
    for index, run in enumerate(others, 1):
        points = zip(*run.series("evaluation", "validation_loss"), strict=True)
        above = {step: loss - base[step] for step, loss in points if step in base}
        if above and _validation_rows(run) == _validation_rows(first):
            traces.append(line([*above], [*above.values()], run.name, f"@run{index}"))
    same = "of runs whose settings give the same held-out data, if no file of it has changed in between"
    caption = f"At the same step, {same}; below 0 is better than {first.name}."
    layout = _axes("nats per token") | {"showlegend": True}
    return Chart("above_first", f"Validation loss above that of {first.name}", caption, traces, layout, wide=True)


def _validation_rows(run: Run) -> list[Any]:
    """The settings that the rows of the validation loss follow from."""
    model, train, evaluate = (run.config.get(name, {}) for name in ("model", "train", "evaluate"))
    data = {key: value for key, value in run.config.get("data", {}).items() if key not in _OF_TRAINING}
    return [data, model.get("vocab_size"), train.get("sequence_length"), evaluate.get("sequences")]


def _gradient_norm(runs: list[Run]) -> Chart:
    traces = _with_trend(_of_each(runs, "gradient_norm"))
    layout = _axes("norm") | {"showlegend": len(runs) > 1}
    values = [value for trace in traces for value in trace["y"]]
    if values and min(values) > 0:
        dtick = "D2" if max(values) < 300 * min(values) else 1
        layout["yaxis"] |= {"type": "log", "tickformat": "~g", "dtick": dtick}
    return Chart("gradient_norm", "Gradient norm", "Before clipping. Spikes are a warning.", traces, layout)


def _phases(runs: list[Run]) -> Chart:
    bars = [
        (
            ", ".join([run.name] * (len(runs) > 1) + [f"rank {rank}"] * (len(run.heartbeats) > 1)),
            run.phase_seconds(rank),
        )
        for run in runs
        for rank in run.heartbeats
    ]
    traces: list[Trace] = []
    for phase in PHASES:
        if any(phases.get(phase, 0.0) > 0 for _, phases in bars):
            seconds = [phases.get(phase, 0.0) for _, phases in bars]
            shares = [phases.get(phase, 0.0) / max(sum(phases.values()), 1e-9) for _, phases in bars]
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": phase,
                    "y": [label for label, _ in bars],
                    "x": [_significant(value) for value in seconds],
                    "customdata": [round(share, 4) for share in shares],
                    "text": [f"{phase} {share:.0%}" if share >= _NAMED_SHARE else "" for share in shares],
                    "textposition": "inside",
                    "insidetextanchor": "middle",
                    "textangle": 0,
                    "hovertemplate": f"{phase}: %{{x:,.1f}} s (%{{customdata:.1%}})<extra>%{{y}}</extra>",
                    "marker": {"color": f"@{phase}"},
                }
            )
    layout = {
        "barmode": "stack",
        "hovermode": "closest",
        "xaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"},
        # Names of runs may be numbers or dates.
        "yaxis": {"type": "category", "autorange": "reversed", "showticklabels": len(bars) > 1},
    }
    caption = (
        "Time of a process by phase, from its heartbeat. Host time: a GPU's work counts where the host waits for it."
    )
    return Chart("phases", "Time by phase", caption, traces, layout, height=max(240, 150 + 44 * len(bars)))


def _curves(
    runs: list[Run],
    key: str,
    title: str,
    caption: str,
    names: dict[str, str],
    unit: str,
    *,
    scale: float = 1.0,
    form: str = "",
) -> Chart:
    """Metrics, with their labels, over steps: a colour for each with one run, a dash pattern for each with several."""
    traces: list[Trace] = []
    for number, ((name, label), dash) in enumerate(zip(names.items(), ("solid", "dot", "dash"), strict=False)):
        for trace in _of_each(runs, name, scale=scale):
            if len(runs) == 1:
                trace["name"] = label
                trace["line"]["color"] = f"@run{number}"
            elif label:
                trace["name"] += f", {label}"
                trace["line"]["dash"] = dash
            traces += _with_trend([trace])
    layout = _axes(unit) | {"showlegend": len(runs) > 1 or len(names) > 1}
    layout["yaxis"] |= {"rangemode": "tozero", "tickformat": form}
    return Chart(key, title, caption, traces, layout)


def _of_each(runs: list[Run], name: str, *, scale: float = 1.0) -> list[Trace]:
    traces = []
    for index, run in enumerate(runs):
        steps, values = run.series("train", name)
        if steps:
            traces.append(line(steps, [value * scale for value in values], run.name, f"@run{index}"))
    return traces


def _with_trend(traces: list[Trace]) -> list[Trace]:
    """Long curves become faint, with a smoothed one in front, both thinned; short ones stay."""
    result: list[Trace] = []
    for trace in traces:
        values = trace["y"]
        if len(values) <= _LONG_CURVE:
            result.append(trace)
            continue
        faint = {"opacity": 0.3, "showlegend": False, "hoverinfo": "skip", "line": {**trace["line"], "width": 1}}
        # Smoothed before it is thinned: what stays of a long curve are its extremes, whose mean is another.
        for look, points in ((faint, values), ({}, [_significant(value) for value in smoothed(values)])):
            x, y = thin(trace["x"], points)
            result.append({**trace, **look, "x": x, "y": y})
    return result


def line(x: list[Any], y: list[float], name: str, colour: str, *, width: float = 2, dash: str = "") -> Trace:
    """A line, or a dot where there is one point; the values have six significant digits."""
    look: dict[str, Any] = {"color": colour, "width": width} | ({"dash": dash} if dash else {})
    values = [_significant(value) for value in y]
    mode = {"mode": "lines"} if len(x) > 1 else {"mode": "markers", "marker": {"color": colour, "size": 6}}
    return {"type": "scatter", **mode, "x": x, "y": values, "name": name, "line": look}


def heat_map(x: list[Any], y: list[Any], z: list[list[Any]], hover: str) -> Trace:
    """A heat map in one colour scale; None is an empty cell."""
    return {
        "type": "heatmap",
        "x": x,
        "y": y,
        "z": z,
        "zmin": 0,
        "zmax": max((value for row in z for value in row if value is not None), default=1.0),
        "ygap": 1,
        "colorscale": "@sequential",
        "colorbar": {"thickness": 8, "outlinewidth": 0, "nticks": 4},
        "hovertemplate": hover,
    }


def _axes(unit: str) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": unit}}}


def smoothed(values: list[float]) -> list[float]:
    """Moving mean centred on each point, without lag, over about a thirtieth of the curve; over fewer points near both
    ends.

    A curve of 20 to 240 points is smoothed over three to seven of them, a shorter one not at all.
    """
    count = len(values)
    index, sums = np.arange(count), np.cumsum([0.0, *values])
    reach = np.minimum(np.minimum(index, index[::-1]), max(min(3, count // 20), count // 60))
    means: list[float] = ((sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)).tolist()
    return means


def thin(steps: list[int], values: list[float], most: int = MAX_POINTS) -> tuple[list[int], list[float]]:
    """Shorten a curve to about `most` points without losing its spikes: the lowest and the highest point of every
    stretch stay, and both ends.
    """
    if len(values) <= most:
        return steps, values
    stretch = math.ceil(2 * len(values) / most)
    keep = {0, len(values) - 1}
    for start in range(0, len(values), stretch):
        indices = range(start, min(start + stretch, len(values)))
        keep |= {min(indices, key=values.__getitem__), max(indices, key=values.__getitem__)}
    order = sorted(keep)
    return [steps[index] for index in order], [values[index] for index in order]


def _significant(value: float) -> float:
    """A value with six significant digits: enough for a chart, in half the bytes."""
    return float(f"{value:.6g}")
