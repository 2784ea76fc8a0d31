"""The report page: words, tables and places for the charts."""

import json
import statistics
import time
from collections.abc import Iterable
from html import escape
from typing import Any

from trifocal.diagnostics.progress import duration
from trifocal.diagnostics.report.assets import SCRIPT, STYLE
from trifocal.diagnostics.report.charts import FULL, Chart
from trifocal.diagnostics.report.summary import Finding
from trifocal.diagnostics.run import Run
from trifocal.diagnostics.verdict import judge

_MARKS = {"good": "good", "watch": "worth a look", "bad": "needs action", "unknown": "cannot tell"}
_MOST_EVENTS = 200


def build_page(
    runs: list[Run], findings: list[list[Finding]], training: list[Chart], attention: list[list[Chart]], plotly: str
) -> str:
    """Put the page together.

    Args:
        runs: The runs.
        findings: For each run.
        training: Charts of all runs together.
        attention: Charts of each run's attention.
        plotly: The source of plotly.js.

    Returns:
        HTML that fetches nothing.
    """
    compared = len(runs) > 1
    title = "Comparison of " + ", ".join(run.name for run in runs) if compared else runs[0].name
    charts = [*training, *(chart for group in attention for chart in group)]
    body = [_header(title, runs)]
    for index, (run, found) in enumerate(zip(runs, findings, strict=True)):
        if compared:
            body.append(f"<h2>{_key(index)}{escape(run.name)}</h2>")
        body.append(_findings(found))
        if not compared:
            body.append(_tiles(run))
    if compared:
        body.append(_section("Side by side", _comparison(runs)))
    if training:
        body.append(_section("Training", _charts(training)))
    for run, group in zip(runs, attention, strict=True):
        if group:
            body.append(_section(_of("Attention", run, compared), _charts(group)))
    for run in runs:
        if run.samples:
            body.append(_section(_of("Samples", run, compared), _samples(run)))
    for run in runs:
        if run.of_kind("event"):
            body.append(_section(_of("Events", run, compared), _events(run)))
    body.append(_section("Ranks", _ranks(runs)))
    body.append(_section("Environment and config", _settings(runs)))
    figures = [{"key": c.key, "traces": c.traces, "layout": c.layout, "height": c.height} for c in charts]
    # A closing tag inside a string would end the script element.
    data = json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)} · Trifocal</title>
<style>{STYLE}</style>
<script>{plotly}</script>
</head>
<body>
<main>
{"".join(body)}
</main>
<script type="application/json" id="charts">{data}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _header(title: str, runs: list[Run]) -> str:
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    devices = sorted({_device(run) for run in runs} - {""})
    commits = sorted({str(run.environment.get("trifocal", {}).get("git_commit") or "")[:10] for run in runs} - {""})
    parts = [*devices, *(f"commit {commit}" for commit in commits), f"report made {made}"]
    return (
        f'<header><div><h1>{escape(title)}</h1><p class="soft">{escape(" · ".join(parts))}</p></div>'
        '<button id="theme" type="button" title="Switch between light and dark">Dark</button></header>'
        '<p id="js-missing" class="card watch">The charts need JavaScript, which seems to be off.</p>'
    )


def _findings(findings: list[Finding]) -> str:
    cards = [
        f'<div class="card finding {finding.mark}"><h3>{escape(finding.question)}'
        f'<span class="mark">{_MARKS[finding.mark]}</span></h3><p>{escape(finding.text)}</p></div>'
        for finding in findings
    ]
    return f'<div class="findings">{"".join(cards)}</div>'


def key_figures(run: Run) -> dict[str, str]:
    """The figures that people ask for first, formatted, with their units; those that the run has."""
    figures: dict[str, str] = {}
    total = run.total_steps
    unfinished = total is not None and run.last_step < total
    figures["steps"] = f"{run.last_step:,}" + (f" of {total:,}" if unfinished else "")
    losses = run.series("train", "loss")[1]
    evaluations = run.series("evaluation", "validation_loss")[1]
    bits = run.series("evaluation", "bits_per_byte")[1]
    rates = run.series("train", "tokens_per_second")[1]
    tokens = run.series("train", "tokens_seen")[1]
    executed = run.series("train", "executed_mfu")[1]
    memory = run.series("train", "memory_allocated_bytes")[1]
    if evaluations:
        figures["validation loss, last"] = f"{evaluations[-1]:.4f}"
        figures["validation loss, best"] = f"{min(evaluations):.4f}"
    elif losses:
        figures["training loss, last"] = f"{losses[-1]:.4f}"
    if bits:
        figures["bits per byte, last"] = f"{bits[-1]:.4f}"
    if rates:
        figures["tokens/s, median"] = f"{statistics.median(rates):,.0f}"
    if executed:
        figures["MFU, executed"] = f"{statistics.median(executed):.1%}"
    if tokens:
        figures["tokens seen"] = _short(tokens[-1])
    seconds = sum(run.phase_seconds().values())
    if seconds:
        figures["time"] = duration(seconds)
    if memory:
        figures["memory, most"] = f"{max(memory) / 2**30:.2f} GiB"
    return figures


def _tiles(run: Run) -> str:
    tiles = [
        f'<div class="card tile"><b>{escape(value)}</b><span class="soft">{escape(name)}</span></div>'
        for name, value in key_figures(run).items()
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _comparison(runs: list[Run]) -> str:
    figures = [key_figures(run) for run in runs]
    names = list(dict.fromkeys(name for figure in figures for name in figure))
    rows = [[name, *(figure.get(name, "-") for figure in figures)] for name in names]
    table = _table(["", *(run.name for run in runs)], rows, number_columns=True)
    settings = [flat(run.config) for run in runs]
    keys = sorted({key for setting in settings for key in setting} - {"run.directory"})
    different = [key for key in keys if len({setting.get(key, "-") for setting in settings}) > 1]
    if not different:
        return f'<div class="card scroll">{table}</div><p class="soft">The configs are the same.</p>'
    rows = [[key, *(setting.get(key, "-") for setting in settings)] for key in different]
    differences = _table(["config that differs", *(run.name for run in runs)], rows)
    return f'<div class="card scroll">{table}</div><div class="card scroll" style="margin-top:14px">{differences}</div>'


def _charts(charts: list[Chart]) -> str:
    # Two charts stand side by side; one that would stand alone in its row takes all of it.
    columns, used = [chart.columns for chart in charts], 0
    for index, own in enumerate(columns):
        following = columns[index + 1] if index + 1 < len(columns) else FULL
        if used == 0 and own + following > FULL:
            columns[index] = FULL
        used = (used + columns[index]) % FULL
    cards = [
        f'<div class="card chart columns{width}"><h3>{escape(chart.title)}</h3>'
        f'<p class="soft">{escape(chart.caption)}</p>'
        f'<div id="chart-{chart.key}" style="height:{chart.height}px"></div></div>'
        for chart, width in zip(charts, columns, strict=True)
    ]
    return f'<div class="charts">{"".join(cards)}</div>'


def _samples(run: Run) -> str:
    last = len(run.samples) - 1
    texts = "".join(
        f'<pre data-step="{step:,}"{"" if index == last else " hidden"}>{escape(text)}</pre>'
        for index, (step, text) in enumerate(run.samples)
    )
    hidden = " hidden" if last == 0 else ""
    slider = f'<input type="range" min="0" max="{last}" value="{last}" aria-label="Which sample"{hidden}>'
    return (
        f'<div class="card sample-box"><div class="samples">{slider}<output class="soft"></output></div>{texts}</div>'
    )


def _events(run: Run) -> str:
    events = run.of_kind("event")
    rows = []
    for event in events[-_MOST_EVENTS:]:
        mark = {"error": "bad", "warning": "watch"}.get(event.get("severity", ""), "unknown")
        badge = f'<span class="mark {mark}">{escape(str(event.get("severity", "info")))}</span>'
        rows.append(
            f'<tr><td class="number">{event["step"]:,}</td><td>{badge}</td>'
            f'<td>{escape(str(event["name"]))}</td><td class="text">{escape(str(event["message"]))}</td></tr>'
        )
    more = f'<p class="soft">The last {_MOST_EVENTS} of {len(events):,}.</p>' if len(events) > _MOST_EVENTS else ""
    head = "<tr><th>step</th><th></th><th>event</th><th>what happened</th></tr>"
    return f'<div class="card scroll"><table>{head}{"".join(rows)}</table>{more}</div>'


def _ranks(runs: list[Run]) -> str:
    rows = []
    for run in runs:
        for rank, beats in run.heartbeats.items():
            verdict = judge(beats[-1])
            rows.append([run.name, str(rank), str(beats[-1]["host"]), verdict.state, verdict.reason])
    if not rows:
        return '<p class="card soft">No heartbeat was written.</p>'
    return f'<div class="card scroll">{_table(["run", "rank", "host", "state", "why"], rows)}</div>'


def _settings(runs: list[Run]) -> str:
    parts = []
    for run in runs:
        for title, text in (
            ("Environment", json.dumps(run.environment, indent=2) if run.environment else ""),
            ("Config", run.config_text),
        ):
            if text:
                label = _of(title, run, len(runs) > 1)
                parts.append(f"<details><summary>{escape(label)}</summary><pre>{escape(text)}</pre></details>")
    return f'<div class="card">{"".join(parts)}</div>' if parts else '<p class="card soft">Neither was saved.</p>'


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested config as dotted names and values in TOML's spelling."""
    result: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = json.dumps(value, default=str)
    return result


def _table(head: Iterable[str], rows: list[list[str]], *, number_columns: bool = False) -> str:
    kind = "number" if number_columns else "text"
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for first, *others in rows:
        cells = "".join(f'<td class="{kind}">{escape(cell)}</td>' for cell in others)
        lines.append(f"<tr><td>{escape(first)}</td>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _of(title: str, run: Run, compared: bool) -> str:
    return f"{title}: {run.name}" if compared else title


def _key(index: int) -> str:
    return f'<span class="key" data-colour="run{index}"></span>'


def _device(run: Run) -> str:
    gpus = run.environment.get("gpus") or []
    if gpus:
        return f"{len(gpus)} x {gpus[0]['name']}" if len(gpus) > 1 else str(gpus[0]["name"])
    cpu = run.environment.get("cpu", {})
    return f"{cpu.get('name')}, {cpu.get('usable_cores')} cores" if cpu else ""


def _short(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"
