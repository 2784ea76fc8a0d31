"""Tables and figures of docs/quality.md from the newest results of benchmarks/quality.py."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from palette import COMPRESSED, DENSE, PAST, SELECTED, WINDOW

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PAGE = Path(__file__).parents[1] / "quality.md"
COLOURS = {
    "sparse": WINDOW, "dense": DENSE, "window": COMPRESSED, "hybrid": "#16a085", "random": SELECTED,
    "learned": "#2980b9", "exact": "#1b1b1b", "learned-exact": "#5d6d7e",
    "index": "#6c3483", "index-mean": "#d35400", "index-s256": "#a569bd",
    "index-l1": "#d2b4de", "selected-index": "#117a65", "mix": "#e74c3c", "mix-dense": "#e59866",
    "shared": "#8e44ad", "shared-random": "#e67e22",
}  # fmt: skip
PARTS = ("production", "production_8192", "seeds", "long", "recall", "needle")
_REGION = "<!-- {0} -->\n{1}<!-- end of {0} -->"
_CAPTIONS = {
    "production": "validation loss of the production model over the run, and above the dense one by step",
    "production_8192": "validation loss on 8,192 tokens over the run, and by position above the dense one",
    "seeds": "validation loss of a small model and its baselines over the run, and by position above the dense one",
    "long": "validation loss on 32,768 tokens over the run, and by position above the dense one",
    "recall": "share of values recalled by the distance of their key, for each attention",
    "needle": "share of needles found by length and depth of the haystack, for each attention",
}


def newest(part: str) -> Path:
    """The newest result file of a part."""
    # Device and date have no underscores: the rows of 8,192 are not those of `production`.
    name = f"quality_{part}"
    found = [path for path in RESULTS.glob(f"{name}_*.json") if path.stem.count("_") == name.count("_") + 2]
    return max(found, key=lambda path: path.stem.rpartition("_")[2])


def figures() -> dict[str, Callable[[], Figure]]:
    """The figures of the parts, by file name."""
    makers = {"recall": _draw_recall, "needle": _draw_needles}
    return {
        f"quality_{part}.svg": partial(makers.get(part, _draw_losses), json.loads(newest(part).read_text()))
        for part in PARTS
    }


def page(text: str) -> str:
    """The page with the tables of the newest results between its marks."""
    for part in PARTS:
        region = re.compile(_REGION.format(part, ".*?"), re.DOTALL)
        content = _REGION.format(part, _content(part, newest(part)))
        text, count = region.subn(lambda _, content=content: content, text)  # type: ignore[misc]
        assert count == 1, f"docs/quality.md lacks the marks of {part}"
    return text


def _content(part: str, path: Path) -> str:
    result = json.loads(path.read_text())
    lines = [f"![{_CAPTIONS[part]}](figures/quality_{part}.svg)", ""]
    makers = {"recall": _recall_table, "needle": _needle_table}
    lines += makers.get(part, _loss_table)(result)
    where = f"{result['device']}, torch {result['torch']}, {result['date'][:10]}, commit `{result['commit']}`"
    link = f"[benchmarks/results/{path.stem}.md](../benchmarks/results/{path.stem}.md)"
    lines += ["", f"{where}: {link}, with the command and every seed."]
    return "\n".join(lines) + "\n"


def _loss_table(result: dict[str, Any]) -> list[str]:
    speeds: dict[str, list[float]] = {}
    for row in result["rows"]:
        if row["tokens_per_second"]:
            speeds.setdefault(row["variant"], []).append(row["tokens_per_second"])
    one_at_a_time = all(row["trainings_at_a_time"] == 1 for row in result["rows"])
    steps, tokens = min(row["steps"] for row in result["rows"]), max(row["tokens"] for row in result["rows"])
    short = {row["variant"]: row for row in result.get("means_on_short_rows", [])}
    head = ["attention", "seeds", *(["above dense, short rows"] if short else [])]
    head += ["loss, nats/byte", "above dense"] + ["tokens/s"] * one_at_a_time
    lines = [f"After {steps:,} steps, {tokens / 1e6:,.1f} M bytes each:", "", *_head(head)]
    for row in result["means"]:
        cells = [row["variant"], str(row["seeds"]), *([_above_dense(short[row["variant"]])] if short else [])]
        cells += [_with_error(row["mean_loss"], row["standard_deviation"]), _above_dense(row)]
        if one_at_a_time:
            cells.append(f"{np.median(speeds[row['variant']]):,.0f}" if row["variant"] in speeds else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _recall_table(result: dict[str, Any]) -> list[str]:
    pairs = sorted({row["pairs"] for row in result["recall"]})
    lines = _head(["attention", *(f"{number:,} pairs" for number in pairs)])
    for variant in dict.fromkeys(row["variant"] for row in result["recall"]):
        cells = []
        for number in pairs:
            own = [row["accuracy"] for row in result["recall"] if (row["variant"], row["pairs"]) == (variant, number)]
            cells.append(f"{np.mean(own):.1%}" if own else "")
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return lines


def _needle_table(result: dict[str, Any]) -> list[str]:
    """Mean over the depths, and the worst of them, by length."""
    rows = result["needles_found_by_depth"]
    lengths = sorted({row["length"] for row in rows})
    lines = _head(["attention", "needles", *(f"{length:,} tokens" for length in lengths)])
    found: dict[tuple[str, int], dict[int, str]] = {}
    for row in rows:
        depths = [row[name] for name in row if name.endswith("%") and row[name] is not None]
        cell = f"{np.mean(depths):.1%}" if depths else ""
        if depths and min(depths) < np.mean(depths):
            cell += f", worst depth {min(depths):.1%}"
        found.setdefault((row["variant"], row["needles"]), {})[row["length"]] = cell
    for (variant, needles), cells in found.items():
        lines.append(f"| {variant} | {needles} | {' | '.join(cells.get(length, '') for length in lengths)} |")
    return lines


def _head(names: list[str]) -> list[str]:
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]


def _above_dense(row: dict[str, Any]) -> str:
    return "" if row["variant"] == "dense" else _with_error(row["above_dense"], row["standard_error_of_that"])


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else "")


def _draw_losses(result: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(7.2, 3.2), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    for variant in _variants(result["rows"]):
        curves = [row["curve"] for row in result["rows"] if row["variant"] == variant and row["curve"]]
        for number, curve in enumerate(curves):
            label = variant if number == 0 else None
            left.plot(*zip(*curve, strict=True), color=COLOURS[variant], linewidth=1.2, alpha=0.8, label=label)
    left.set(xlabel="step", ylabel="nats per byte", title="validation loss")
    _draw_above_dense(right, result)
    right.axhline(0, color=DENSE, linewidth=1)
    return _finished(figure, left, right)


def _draw_above_dense(axes: Axes, result: dict[str, Any]) -> None:
    """Loss above the dense model's: by position, or where that was not measured, by step."""
    # Older results have one row for all seeds.
    table = result["loss_by_position"]
    dense = {row.get("seed"): row for row in table if row["variant"] == "dense"}
    if not dense:
        for row in result["above_dense_by_step"]:
            names = [name for name in row if name.startswith("step ")][1:]
            steps = [int(name[5:].replace(",", "")) for name in names]
            axes.plot(steps, [row[name] for name in names], color=COLOURS[row["variant"]], label=row["variant"])
        axes.set(xlabel="step", ylabel="nats above dense", title="each seed")
        return
    places = [name for name in next(iter(dense.values())) if re.match(r"\d", name)]
    for variant in _variants(table):
        own = [row for row in table if row["variant"] == variant and row.get("seed") in dense]
        if variant != "dense" and own:
            apart = np.mean([[row[name] - dense[row.get("seed")][name] for name in places] for row in own], axis=0)
            axes.plot(range(len(places)), apart, color=COLOURS[variant], marker="o", markersize=3, label=variant)
    axes.set_xticks(range(len(places)), [name.rpartition("-")[0] for name in places], rotation=60)
    axes.set(xlabel="position, from", ylabel="nats above dense", title="by position")


def draw_time() -> Figure:
    """Validation loss of the longest trainings in rows of 8,192 over the minutes of a GPU, at their tokens/s on one."""
    results = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("longer_h200_*.json"))]
    rows = [row for result in results for row in result["rows"] if row["row"] == 8192]
    # The highest of each: the others had something beside them.
    alone = sorted((row for row in rows if row["gpus"] == 1), key=lambda row: row["tokens_per_second"])
    rates = {row["attention"]: row["tokens_per_second"] for row in alone}
    # The first page does not know the names of the benchmarks.
    words = {"mix-dense": "dense mix", "selected-index": "one branch"}
    figure = Figure(figsize=(5.2, 3.0), layout="constrained", facecolor="white")
    axes = figure.subplots()
    # The best of each: some were trained with two rotary bases.
    longest = sorted((row for row in rows if row["steps"] == 16000), key=lambda row: -row["curve"][-1][1])
    for name, row in {row["attention"]: row for row in longest}.items():
        steps, losses = zip(*row["curve"], strict=True)
        minutes = np.array(steps) * row["tokens"] / row["steps"] / rates[name] / 60
        axes.plot(minutes, losses, color=COLOURS[name], label=words.get(name, name))
    axes.set(xlabel="minutes of one H200", ylabel="nats per byte", title="validation loss", ylim=(0.37, 0.65))
    return _finished(figure, axes)


def _draw_recall(result: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(5.2, 3.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    rows = result["recall_by_distance"]
    most = max(row["pairs"] for row in rows)
    for row in rows:
        if row["pairs"] == most:
            places = [name for name in row if re.match(r"\d", name)]
            values = [row[name] for name in places]
            axes.plot(places, values, color=COLOURS[row["variant"]], marker="o", label=row["variant"])
    axes.set(xlabel="tokens between query and pair", ylabel="found", title=f"{most} pairs", ylim=(-0.03, 1.03))
    axes.tick_params(axis="x", rotation=30)
    return _finished(figure, axes)


def _draw_needles(result: dict[str, Any]) -> Figure:
    rows = result["needles_found_by_depth"]
    # One needle, if that was measured.
    rows = [row for row in rows if row["needles"] == min(row["needles"] for row in rows)]
    variants = _variants(rows)
    depths = [name for name in rows[0] if name.endswith("%")]
    figure = Figure(figsize=(1.9 * len(variants) + 0.8, 2.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(variants), sharey=True, squeeze=False)[0]
    for axes, variant in zip(panels, variants, strict=True):
        own = sorted((row for row in rows if row["variant"] == variant), key=lambda row: row["length"])
        values = np.array([[row[name] for row in own] for name in depths], dtype=float)
        image = axes.imshow(values, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        axes.set_xticks(range(len(own)), [f"{row['length'] // 1024}k" for row in own])
        axes.set_yticks(range(len(depths)), depths)
        axes.set(xlabel="tokens", title=variant)
    panels[0].set_ylabel("depth")
    figure.colorbar(image, ax=panels, label="found", shrink=0.8)
    return figure


def _variants(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["variant"] for row in rows))


def _finished(figure: Figure, *panels: Axes) -> Figure:
    for axes in panels:
        axes.grid(color=PAST)
        axes.set_axisbelow(True)
    panels[0].legend(frameon=False)
    return figure
