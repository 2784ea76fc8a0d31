"""Time over length, with the crossover marked, from a result file of `trifocal bench attention`."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from trifocal.bench.comparison import BASELINES, SERIES, crossovers, points, series_of
from trifocal.errors import UserError

MISSING = "no plot: matplotlib is not installed; pip install 'trifocal[docs]', then trifocal bench plot"
_PANELS = {"forward_ms": "forward", "forward_backward_ms": "forward and backward"}
_LINES = {"whole": "NSA", "fla parallel_nsa": "fla-core parallel_nsa (does less)"}


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_results(result: Path) -> Path | None:
    """Draw the times of a result file beside it, as PNG.

    Args:
        result: The JSON.

    Returns:
        The picture; None where no shape was measured at two lengths or more.

    Raises:
        UserError: If the file is not such a result, or matplotlib is missing.
    """
    if not can_plot():
        raise UserError(f"{MISSING} {result}")
    rows = _read(result)
    several = {key: members for key, members in series_of(rows).items() if len({row["tokens"] for row in members}) > 1}
    if not several:
        return None
    from matplotlib.figure import Figure

    measures = [measure for measure in _PANELS if any(row.get(measure) for row in rows)]
    figure = Figure(figsize=(6.4 * len(measures), 4.6 * len(several)), layout="constrained")
    axes = figure.subplots(len(several), len(measures), squeeze=False)
    for line, (series, members) in enumerate(several.items()):
        for column, measure in enumerate(measures):
            _draw(axes[line, column], dict(zip(SERIES, series, strict=True)), members, measure)
    picture = result.with_suffix(".png")
    figure.savefig(picture, dpi=150)
    return picture


def _read(result: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
        needed = {*SERIES, "tokens", "row", "choices", "status"}
        if not all(needed <= row.keys() for row in rows):
            raise KeyError
    except OSError as error:
        raise UserError(f"cannot read {result}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{result} is not a result of trifocal bench attention") from error
    return list(rows)


def _draw(axes: Any, series: dict[str, Any], rows: list[Any], measure: str) -> None:
    drawn = dict.fromkeys((row["row"], row["choices"]) for row in rows)
    for name, choices in drawn:
        if name not in _LINES and name not in BASELINES:
            continue
        line = sorted(points(rows, name, choices, measure).items())
        if line:
            label = _LINES.get(name, name) + (f", {choices} blocks" if choices else "")
            axes.plot(*zip(*line, strict=True), marker="o", linestyle="-" if name == "whole" else "--", label=label)
    for crossing in crossovers(rows):
        if f"{crossing['measure']}_ms" == measure and crossing["crossover_tokens"]:
            tokens = crossing["crossover_tokens"]
            axes.axvline(tokens, color="0.6", linewidth=1, linestyle=":")
            axes.annotate(
                f"{tokens:,.0f}: {crossing['over']}",
                (tokens, 0.02),
                xycoords=("data", "axes fraction"),
                rotation=90,
                fontsize=7,
                ha="right",
                va="bottom",
            )
    lengths = sorted({row["tokens"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in lengths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("ms")
    dims = f"{series['head_dim']}" + (f"/{series['value_dim']}" if series["value_dim"] != series["head_dim"] else "")
    axes.set_title(
        f"{_PANELS[measure]}: {series['heads']}/{series['groups']} heads of {dims}, batch {series['batch']}", fontsize=9
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
