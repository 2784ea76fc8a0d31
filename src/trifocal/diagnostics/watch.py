"""A run in a terminal, from its files alone: on this machine, or on another that sees the same folder."""

import itertools
import time

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trifocal.diagnostics.attention_statistics import BRANCHES
from trifocal.diagnostics.jsonl import Row
from trifocal.diagnostics.progress import duration
from trifocal.diagnostics.run import Run
from trifocal.diagnostics.verdict import Verdict, judge

_COLOURS = {
    "running": "green",
    "finished": "green",
    "slow": "yellow",
    "stalled": "bold red",
    "failed": "bold red",
    "dead": "bold red",
}
_BARS = "▁▂▃▄▅▆▇█"
_ETA_ROWS = 30
_SHOWN_EVENTS = 4


def verdicts(run: Run, now: float | None = None) -> dict[int, Verdict]:
    """The verdict on every rank that has written a heartbeat."""
    return {rank: judge(rows[-1], now) for rank, rows in run.heartbeats.items()}


def remaining_seconds(run: Run) -> float | None:
    """Time left at the pace of the last training rows; None if it cannot be known."""
    rows = run.of_kind("train")[-_ETA_ROWS:]
    if run.total_steps is None or len(rows) < 2:
        return None
    steps = rows[-1]["step"] - rows[0]["step"]
    seconds = rows[-1]["unix_time_seconds"] - rows[0]["unix_time_seconds"]
    if steps <= 0 or seconds <= 0:
        return None
    return max(0.0, (run.total_steps - run.last_step) * seconds / steps)


def sparkline(values: list[float], width: int) -> str:
    """A curve in one line of block characters: means of equal stretches, from the lowest to the highest."""
    if not values:
        return ""
    width = min(width, len(values))
    bounds = [len(values) * column // width for column in range(width + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[0] * width
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


def render(run: Run, *, now: float | None = None, width: int = 80) -> RenderableType:
    """Draw a run.

    Args:
        run: From `read_run(directory, whole_heartbeats=False)`.
        now: Seconds since the epoch; the present by default.
        width: Columns of the terminal.

    Returns:
        What rich can print.
    """
    now = time.time() if now is None else now
    parts: list[RenderableType] = [_progress(run, width), Padding(_figures(run, width), (1, 0))]
    parts.append(_ranks(run, now))
    events = run.of_kind("event")[-_SHOWN_EVENTS:]
    if events:
        parts.append(Padding(_events(events), (1, 0, 0, 0)))
    return Group(*parts)


def _progress(run: Run, width: int) -> RenderableType:
    step, total = run.last_step, run.total_steps
    left = remaining_seconds(run)
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    bar: RenderableType = ProgressBar(total=total, completed=step) if total else Text("")
    done = f"{step:,}/{total:,}" if total else f"step {step:,}"
    eta = f"ETA {duration(left)}" if left else ""
    grid.add_row(Text(run.name, style="bold"), bar, done, eta)
    return grid


def _figures(run: Run, width: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    losses = run.series("train", "loss")[1]
    if losses:
        curve = sparkline(losses, max(10, min(60, width - 54)))
        numbers = f"{losses[-1]:.4f}  (highest {max(losses):.3f}, lowest {min(losses):.3f})"
        grid.add_row("loss", Text.assemble((curve, "cyan"), "  ", numbers))
    evaluations = run.series("evaluation", "validation_loss")[1]
    if evaluations:
        grid.add_row("validation", f"{evaluations[-1]:.4f}  (best {min(evaluations):.4f})")
    row = (run.of_kind("train") or [{}])[-1]
    if row.get("tokens_per_second") is not None:
        parts = [f"{row['tokens_per_second']:,.0f} tokens/s"]
        if row.get("executed_mfu") is not None:
            parts.append(f"{row['executed_mfu']:.1%} MFU (executed)")
        grid.add_row("throughput", ", ".join(parts))
    gates = _gates(run)
    if gates:
        grid.add_row("gates", gates)
    return grid


def _gates(run: Run) -> str:
    rows = run.of_kind("telemetry")
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    if not last:
        return ""
    means = {branch: sum(row[f"gate_mean_{branch}"] for row in last) / len(last) for branch in BRANCHES}
    return "  ".join(f"{branch} {mean:.2f}" for branch, mean in means.items()) + f"  (step {last[0]['step']:,})"


def _ranks(run: Run, now: float) -> RenderableType:
    if not run.heartbeats:
        return Text("no rank has written a heartbeat yet", style="yellow")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    for name in ("rank", "verdict", "step", "memory"):
        table.add_column(name, no_wrap=True, justify="left" if name == "verdict" else "right")
    table.add_column("what it does", ratio=1, overflow="fold")
    for rank, verdict in verdicts(run, now).items():
        row = run.heartbeats[rank][-1]
        memory = row["memory_allocated_bytes"]
        table.add_row(
            str(rank),
            Text(verdict.state, style=_COLOURS[verdict.state]),
            f"{row['step']:,}",
            f"{memory / 2**30:.2f} GiB" if memory is not None else "",
            Text(verdict.reason),
        )
    return table


def _events(events: list[Row]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, justify="right")
    grid.add_column(overflow="fold")
    styles = {"warning": "yellow", "error": "red"}
    for event in events:
        grid.add_row(f"step {event['step']:,}", Text(str(event["message"]), style=styles.get(event["severity"], "")))
    return grid
