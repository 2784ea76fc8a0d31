"""The report's tables: key figures, comparison, events, ranks, environment and config."""

import json
import math
import statistics
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from trifocal.runlog.progress import duration
from trifocal.runlog.run import Run
from trifocal.runlog.stalls.verdict import verdicts
from trifocal.train.config.load import repeating

_MAX_EVENTS = 200


def key_figures(run: Run) -> dict[str, str]:
    """The main figures of a run, formatted, with their units."""
    figures: dict[str, str] = {}
    total = run.total_steps
    unfinished = total is not None and run.last_step < total
    figures["steps"] = f"{run.last_step:,}" + (f" / {total:,}" if unfinished else "")

    def add(label: str, kind: str, name: str, figure: Callable[[list[float]], str]) -> bool:
        if values := run.series(kind, name)[1]:
            figures[label] = figure(values)
        return bool(values)

    if add("validation loss, last", "evaluation", "validation_loss", lambda losses: f"{losses[-1]:.4f}"):
        add("validation loss, best", "evaluation", "validation_loss", lambda losses: f"{min(losses):.4f}")
    else:
        add("training loss, last", "train", "loss", lambda losses: f"{losses[-1]:.4f}")
    for source, loss in run.of_sources("evaluation", "validation_loss").items():
        figures[f"validation loss, {source}"] = f"{loss:.4f}"
    add("bits per byte, last", "evaluation", "bits_per_byte", lambda bits: f"{bits[-1]:.4f}")
    losses = [row for evaluation in run.evaluations for row in evaluation["rows"] if row["task"] == "loss"]
    # Without the rows of a model beside that is broken: a figure that is not finite is left out.
    compared = [row for row in losses if {"agreement", "divergence", "loss", "beside_loss"} <= row.keys()]
    of_sources = {row.get("source", ""): row for row in compared}
    for source, row in of_sources.items():
        of_source = f", {source}" if len(of_sources) > 1 else ""
        figures[f"loss, beside {Path(row['beside']).name}{of_source}"] = f"{row['loss']:.4f}, {row['beside_loss']:.4f}"
        figures[f"divergence from it{of_source}"] = f"{row['divergence']:.4f}"
        figures[f"same likeliest token{of_source}"] = f"{row['agreement']:.2%}"
    for row in [row for evaluation in run.evaluations for row in evaluation["rows"] if row["task"] == "grade"][-1:]:
        figures[f"{row.get('name')}, bits per byte"] = f"{row.get('bits_per_byte', math.nan):.4f}"
    add("tokens/s, median", "train", "tokens_per_second", lambda rates: f"{statistics.median(rates):,.0f}")
    add("MFU, executed", "train", "executed_mfu", lambda shares: f"{statistics.median(shares):.1%}")
    add("MFU, dense equivalent", "train", "dense_equivalent_mfu", lambda shares: f"{statistics.median(shares):.1%}")
    add("tokens seen", "train", "tokens_seen", lambda tokens: _short(tokens[-1]))
    if epochs := run.of_sources("train", "epoch"):
        figures["epochs"] = ", ".join(f"{source} {passes:.0f}" for source, passes in epochs.items())
    if seconds := sum(run.phase_seconds().values()):
        figures["time"] = duration(seconds)
    add("memory, most", "train", "memory_peak_bytes", lambda memory: f"{max(memory) / 2**30:.2f} GiB")
    return figures


def comparison(runs: list[Run]) -> str:
    """Key figures side by side, and the config keys in which the runs differ."""
    figures = [key_figures(run) for run in runs]
    names = list(dict.fromkeys(name for figure in figures for name in figure))
    rows = [[name, *(figure.get(name, "-") for figure in figures)] for name in names]
    side_by_side = table(["", *(run.name for run in runs)], rows, number_columns=True)
    settings = [flat(run.config) for run in runs]
    for setting in settings:
        # Where layers have types, these count.
        if setting.get("model.layer_types", "[]") != "[]":
            setting.pop("model.attention", None)
    keys = sorted({key for setting in settings for key in setting} - {"run.directory"})
    different = [key for key in keys if len({setting.get(key, "-") for setting in settings}) > 1]
    if not different:
        return f'<div class="card scroll">{side_by_side}</div><p class="soft">The configs are the same.</p>'
    rows = [[key, *(setting.get(key, "-") for setting in settings)] for key in different]
    differences = table(["config that differs", *(run.name for run in runs)], rows)
    return f'<div class="card scroll">{side_by_side}</div><div class="card scroll second">{differences}</div>'


def events_table(run: Run) -> str:
    """The events, with the time since the run's first row."""
    events = run.of_kind("event")
    began = run.rows[0]["unix_time_seconds"]
    rows = []
    for event in events[-_MAX_EVENTS:]:
        severity = str(event.get("severity", "info"))
        mark = {"error": "bad", "warning": "watch"}.get(severity, "unknown")
        rows.append(
            f'<tr><td class="number">{event["step"]:,}</td>'
            f'<td class="number">{duration(max(0.0, event["unix_time_seconds"] - began))}</td>'
            f'<td><span class="mark {mark}">{escape(severity)}</span></td>'
            f'<td class="text"><b>{escape(str(event["name"]))}</b> {escape(str(event["message"]))}</td></tr>'
        )
    head = "<tr><th>step</th><th>time</th><th></th><th>event</th></tr>"
    return f'<div class="card scroll"><table class="tight">{head}{"".join(rows)}</table></div>'


def ranks_table(runs: list[Run]) -> str:
    """The state of every process."""
    rows = []
    for run in runs:
        for rank, verdict in verdicts(run).items():
            names = [run.name] * (len(runs) > 1)
            rows.append([*names, str(rank), verdict.state, str(run.heartbeats[rank][-1]["host"]), verdict.reason])
    if not rows:
        return '<p class="card soft">No heartbeat was written.</p>'
    head = [*["run"] * (len(runs) > 1), "rank", "state", "host", "why"]
    return f'<div class="card scroll">{table(head, rows)}</div>'


def settings(runs: list[Run]) -> str:
    """Environment and config, folded."""
    parts = []
    for run in runs:
        for title, text in (
            ("Environment", json.dumps(run.environment, indent=2) if run.environment else ""),
            ("Config", run.config_text),
        ):
            if text:
                label = of_run(title, run, len(runs) > 1)
                parts.append(f"<details><summary>{escape(label)}</summary><pre>{escape(text)}</pre></details>")
    return f'<div class="card">{"".join(parts)}</div>' if parts else '<p class="card soft">Neither was saved.</p>'


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested config as dotted names and values in TOML's spelling."""
    result: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{name}.")
        else:
            shown = [*repeating(tuple(value))] if name == "layer_types" and isinstance(value, list) else value
            result[prefix + name] = json.dumps(shown, default=str) + (", repeated" if shown != value else "")
    return result


def table(head: Iterable[str], rows: list[list[str]], *, number_columns: bool = False) -> str:
    """An HTML table; the first column names the row."""
    kind = "number" if number_columns else "text"
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for first, *others in rows:
        cells = "".join(f'<td class="{kind}">{escape(cell)}</td>' for cell in others)
        lines.append(f"<tr><td>{escape(first)}</td>{cells}</tr>")
    tight = "" if number_columns else ' class="tight"'
    return f"<table{tight}>{''.join(lines)}</table>"


def of_run(title: str, run: Run, compared: bool) -> str:
    """A title, with the name of the run if there are several."""
    return f"{title}: {run.name}" if compared else title


def _short(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"
