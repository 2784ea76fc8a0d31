"""The HTML of the report page."""

import re
import time
from html import escape
from pathlib import Path
from typing import get_args
from urllib.parse import quote

from trifocal.errors import UserError, one_line
from trifocal.report.attention_charts import attention_charts
from trifocal.report.charts import Chart, training_charts
from trifocal.report.evaluation_charts import evaluation_charts
from trifocal.report.picture import json_in_page, picture_card, pictures_of
from trifocal.report.summary import Finding, summarise
from trifocal.report.tables import comparison, events_table, key_figures, of_run, ranks_table, settings
from trifocal.runlog.run import Run
from trifocal.runlog.stalls.verdict import State, verdicts

_MARKS = {"good": "good", "watch": "worth a look", "bad": "needs action", "unknown": "cannot tell"}


def build_page(runs: list[Run], plotly: str) -> str:
    """Build the page, HTML that needs no network, with the source of plotly.js; UserError if a picture is damaged."""
    training, evaluation = training_charts(runs), evaluation_charts(runs)
    attention = [attention_charts(run) for run in runs]
    for index, group in enumerate(attention):
        for chart in group:
            chart.key = f"{chart.key}-{index}"
    compared = len(runs) > 1
    title = "Comparison of " + ", ".join(run.name for run in runs) if compared else runs[0].name
    charts = [*training, *evaluation, *(chart for group in attention for chart in group)]
    body = []
    for index, run in enumerate(runs):
        if compared:
            body.append(f'<h2><span class="key" data-colour="run{index}"></span>{escape(run.name)}</h2>')
        body.append(_findings(summarise(run)))
        if not compared:
            body.append(_tiles(run))
    if compared:
        body.append(_section("Side by side", comparison(runs)))
    if training:
        body.append(_section("Training", _charts(training)))
    if evaluation:
        body.append(_section("Evaluation", _charts(evaluation)))
    for run, group in zip(runs, attention, strict=True):
        picture = _picture(run)
        if group or picture:
            body.append(_section(of_run("Attention", run, compared), picture + _charts(group)))
    for run in runs:
        if run.samples:
            body.append(_section(of_run("Samples", run, compared), _samples(run)))
    for run in runs:
        if run.of_kind("event"):
            body.append(_section(of_run("Events", run, compared), events_table(run)))
    body.append(_section("Ranks", ranks_table(runs)))
    body.append(_section("Environment and config", settings(runs)))
    figures = [{"key": c.key, "traces": c.traces, "layout": c.layout, "height": c.height} for c in charts]
    data = json_in_page(figures)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)} · Trifocal</title>
<style>{_inlined("page.css", "picture.css")}</style>
<script>{plotly}</script>
</head>
<body>
<main>
{_header(title, runs)}{_navigation("".join(body))}{"".join(body)}
</main>
<script type="application/json" id="charts">{data}</script>
<script>{_inlined("picture.js", "page.js")}</script>
</body>
</html>
"""


def _inlined(*names: str) -> str:
    """Styles or scripts of this folder."""
    return "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in names)


def _header(title: str, runs: list[Run]) -> str:
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    devices = sorted({_device(run) for run in runs} - {""})
    commits = sorted({str(run.environment.get("trifocal", {}).get("git_commit") or "")[:10] for run in runs} - {""})
    parts = [*devices, *(f"commit {commit}" for commit in commits), f"report made {made}"]
    if len(runs) == 1:
        parts = [*_model(runs[0]), *parts]
    return (
        f'<header><div><h1>{escape(title)}{_state(runs)}</h1><p class="soft">{escape(" · ".join(parts))}</p></div>'
        '<button id="theme" type="button" title="Switch between light and dark">Dark</button></header>'
        '<p id="js-missing" class="card watch">The charts need JavaScript, which seems to be off.</p>'
    )


def _state(runs: list[Run]) -> str:
    """The worst state of a single run's processes; empty for several runs."""
    found = verdicts(runs[0]).values() if len(runs) == 1 else ()
    worst = min(found, key=lambda verdict: get_args(State).index(verdict.state), default=None)
    return f' <span class="mark {worst.mark}">{worst.state}</span>' if worst else ""


def _model(run: Run) -> list[str]:
    """The model and its batches in a few words, from the config."""
    model, words = run.config.get("model", {}), []
    num_layers, dim = run.setting("model", "num_layers"), run.setting("model", "dim")
    if num_layers and dim:
        of_layers = model.get("layer_types")
        names = map(str, of_layers if isinstance(of_layers, list) and of_layers else [model.get("attention", "nsa")])
        kind = " and ".join(sorted({"sparse" if name == "nsa" else name for name in names}))
        layers = "1 layer" if num_layers == 1 else f"{num_layers} layers"
        words.append(f"{kind} attention, {layers} of width {dim}")
    rows, length = run.setting("train", "global_batch_size"), run.setting("train", "sequence_length")
    if rows and length:
        words.append(f"{rows:,} x {length:,} tokens a step")
    return words


def _findings(findings: list[Finding]) -> str:
    cards = [
        f'<div class="card finding {finding.mark}"><h3>{escape(finding.question)}'
        f'<span class="mark">{_MARKS[finding.mark]}</span></h3><p>{escape(finding.text)}</p></div>'
        for finding in findings
    ]
    return f'<div class="findings">{"".join(cards)}</div>'


def _tiles(run: Run) -> str:
    tiles = [
        f'<div class="card tile"><b>{escape(value)}</b><span class="soft">{escape(name)}</span></div>'
        for name, value in key_figures(run).items()
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _charts(charts: list[Chart]) -> str:
    cards = [
        f'<div class="card chart{" wide" if chart.wide else ""}"><h3>{escape(chart.title)}</h3>'
        f'<p class="soft">{escape(chart.caption)}</p>'
        f'<div id="chart-{chart.key}" style="height:{chart.height}px"></div></div>'
        for chart in charts
    ]
    return f'<div class="charts">{"".join(cards)}</div>'


def _picture(run: Run) -> str:
    pictures = pictures_of(run)
    try:
        return picture_card(pictures) if pictures else ""
    except Exception as error:  # Any, as the parts of a file that trifocal has not written need not fit.
        raise UserError(
            f"cannot show the pictures in {run.directory}/attention ({one_line(error)}); remove them"
        ) from error


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


def _section(title: str, content: str) -> str:
    # Names of runs may differ only in what is no letter, or have letters of any alphabet.
    anchor = quote("-".join(title.lower().split()), safe=":")
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{content}</section>'


def _navigation(body: str) -> str:
    """Links to the sections of the page."""
    sections = re.findall(r'<section id="([^"]*)"><h2>(.*?)</h2>', body)
    return "<nav>" + "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title in sections) + "</nav>"


def _device(run: Run) -> str:
    gpus = run.environment.get("gpus") or []
    if gpus:
        return f"{len(gpus)} x {gpus[0]['name']}" if len(gpus) > 1 else str(gpus[0]["name"])
    cpu = run.environment.get("cpu", {})
    return f"{cpu.get('name')}, {cpu.get('usable_cores')} cores" if cpu else ""
