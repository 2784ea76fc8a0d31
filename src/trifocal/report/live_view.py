"""The live view of a run in a terminal, only from its files."""

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trifocal.runlog.jsonl import Row, is_number
from trifocal.runlog.progress import duration
from trifocal.runlog.run import Run
from trifocal.runlog.stalls.verdict import Verdict, verdicts
from trifocal.telemetry.statistics import BRANCHES

_COLOURS = {"good": "green", "watch": "yellow", "bad": "bold red"}
OVER = {"finished", "stopped", "failed", "dead"}
"""States of a rank that takes no more steps."""
_ETA_ROWS = 30
_SHOWN_EVENTS = 4


def remaining_seconds(run: Run) -> float | None:
    """Time left at the rate of the last training rows since the run began or was resumed; None if unknown."""
    begins = [index for index, row in enumerate(run.rows) if row.get("name") == "resumed"]
    rows = [row for row in run.rows[begins[-1] if begins else 0 :] if row["kind"] == "train"][-_ETA_ROWS:]
    if run.total_steps is None or len(rows) < 2:
        return None
    steps = rows[-1]["step"] - rows[0]["step"]
    seconds = rows[-1]["unix_time_seconds"] - rows[0]["unix_time_seconds"]
    if steps <= 0 or seconds <= 0:
        return None
    return max(0.0, (run.total_steps - run.last_step) * seconds / steps)


def render(run: Run) -> RenderableType:
    """Draw a run, from `read_run(directory, live=True)`: the processes first, as a low terminal cuts off the end."""
    found = verdicts(run)
    parts: list[RenderableType] = [_progress(run, found), _ranks(run, found), _figures(run)]
    events = run.of_kind("event")[-_SHOWN_EVENTS:]
    if events:
        parts.append(Padding(_events(events), (1, 0, 0, 0)))
    parts += [Text(sentence, style="yellow") for sentence in run.left_out_notes()]
    return Group(*parts)


def _progress(run: Run, found: dict[int, Verdict]) -> RenderableType:
    step, total = run.last_step, run.total_steps
    over = found and all(verdict.state in OVER for verdict in found.values())
    left = None if over else remaining_seconds(run)
    grid = Table.grid(padding=(0, 2), expand=True)
    # A long name takes several lines, and never the place of the step.
    grid.add_column(overflow="fold")
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    bar: RenderableType = ProgressBar(total=total, completed=step) if total else Text("")
    done = f"{step:,}/{total:,}" if total else f"step {step:,}"
    eta = f"ETA {duration(left)}" if left else ""
    grid.add_row(Text(run.name, style="bold"), bar, done, eta)
    return grid


def _figures(run: Run) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    losses = run.series("train", "loss")[1]
    if losses:
        grid.add_row("loss", Text.assemble((f"{losses[-1]:.4f}", "bold"), " nats per token"))
    if divergences := run.series("train", "divergence")[1]:
        grid.add_row("divergence", f"{divergences[-1]:.4f} nats per token from the frozen model")
    evaluations = run.series("evaluation", "validation_loss")[1]
    if evaluations:
        # Of a long log only the end is read, which may lack the best one.
        best = f"  (best {min(evaluations):.4f})" if run.rows[0]["step"] <= 1 else ""
        grid.add_row("validation", f"{evaluations[-1]:.4f}{best}")
    if own := run.of_sources("evaluation", "validation_loss"):
        grid.add_row("", ", ".join(f"{source} {loss:.4f}" for source, loss in own.items()))
    if epochs := run.of_sources("train", "epoch"):
        grid.add_row("epochs", ", ".join(f"{source} {passes:.0f}" for source, passes in epochs.items()))
    row = (run.of_kind("train") or [{}])[-1]
    if is_number(row.get("tokens_per_second")):
        parts = [f"{row['tokens_per_second']:,.0f} tokens/s"]
        if is_number(row.get("executed_mfu")):
            parts.append(f"{row['executed_mfu']:.1%} MFU (executed)")
        grid.add_row("throughput", ", ".join(parts))
    if gates := _gates(run):
        grid.add_row("attention", gates)
    return grid


def _gates(run: Run) -> str:
    """The mean gate of each branch, and the mean recall of the choice."""
    means = run.telemetry_means()
    keys = {**{branch: f"gate_mean_{branch}" for branch in BRANCHES}, "recall": "choice_recall"}
    return "  ".join(f"{name} {means[key]:.2f}" for name, key in keys.items() if key in means)


def _ranks(run: Run, found: dict[int, Verdict]) -> RenderableType:
    if not run.heartbeats:
        return Text("no rank has written a heartbeat yet", style="yellow")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    for name in ("rank", "verdict", "step", "memory"):
        table.add_column(name, no_wrap=True, justify="left" if name == "verdict" else "right")
    table.add_column("reason", ratio=1, overflow="fold")
    # Of many ranks, a low terminal shows the first.
    for rank, verdict in sorted(found.items(), key=lambda item: item[1].mark != "bad"):
        row = run.heartbeats[rank][-1]
        memory = row["memory_allocated_bytes"]
        stacks = run.crash_stacks(rank) if verdict.state == "dead" else None
        table.add_row(
            str(rank),
            Text(verdict.state, style=_COLOURS[verdict.mark]),
            f"{row['step']:,}",
            f"{memory / 2**30:.2f} GiB" if memory is not None else "",
            Text(verdict.reason + ("" if stacks is None else f"; its last stacks are in {stacks}")),
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
