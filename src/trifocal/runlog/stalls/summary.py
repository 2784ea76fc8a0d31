"""`summary.md` of a dump: the stuck ranks, in words."""

import time
from pathlib import Path

from trifocal.errors import UserError
from trifocal.runlog.jsonl import Row
from trifocal.runlog.progress import duration
from trifocal.runlog.run import Run, read_run
from trifocal.runlog.stalls.collectives import describe_waiting_ranks
from trifocal.runlog.stalls.dump import Answer
from trifocal.runlog.stalls.verdict import judge

_LAST_ROWS = 3
_LAST_FIGURES = ("loss", "gradient_norm", "tokens_per_second", "step_seconds")
_HINTS = {
    "data": "The loader gives no batch: look at the source (a network, a disk) and at the loader's thread.",
    "forward": "If it waits in a collective, another rank has not called it: compare the ranks' stacks below.",
    "backward": "Look for a hook or a collective at the top of the stacks; with several ranks, compare them.",
    "optimizer": "On a GPU the host waits here for all earlier work: the cause may be an earlier kernel.",
    "checkpoint": "The disk does not take the checkpoint: look at free space and at the file system.",
    "evaluate": "The validation source or a collective does not answer.",
    "telemetry": "A forward pass of one sequence for the attention's figures: compare the ranks' stacks below.",
    "sample": "The model is writing a sample: see whether it still adds tokens.",
}
_FILES = (
    ("stacks_rank*.txt", "the Python stacks of all threads, the most recent call first"),
    ("collectives_rank*.txt", "the last collectives; those that have not ended come first"),
    ("cuda_memory_rank*.txt", "PyTorch's summary of the GPU's memory"),
)


def stall_summary(directory: Path, folder: Path, rank: int, what: str, row: Row, answers: dict[int, Answer]) -> str:
    """Write the page.

    Args:
        directory: The run.
        folder: The dump, with its files so far.
        rank: The rank that began the dump.
        what: Its state, as words after "Rank N".
        row: Its heartbeat row.
        answers: The answers of the ranks so far, this one included.

    Returns:
        Markdown.
    """
    lines = [
        f"# Rank {rank} {what}",
        "",
        f"At step {row['step']:,}, {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(row['unix_time_seconds']))}, "
        f"process {row['pid']} on {row['host']}.",
        "",
        f"- Where: {row['where'] or 'unknown'}",
        f"- Last loss: {_value(row['loss'])}, {_value(row['tokens_per_second'])} tokens/s",
        f"- Memory: {_gib(row['memory_allocated_bytes'])} allocated, {_gib(row['memory_reserved_bytes'])} reserved",
    ]
    verdict = judge(row)
    if verdict.state == "stalled" and row["phase"] in _HINTS:
        lines.append(f"- Hint: {_HINTS[row['phase']]}")
    try:
        run = read_run(directory, live=True)
    except (UserError, OSError) as error:
        return "\n".join([*lines, "", f"The rest of the run cannot be read: {error}", ""])
    last = {other: rows[-1] for other, rows in run.heartbeats.items()}
    verdicts = {other: judge(beat) for other, beat in last.items()} | {rank: verdict}
    lines += ["", "## What is stuck where", ""]
    if not any(found.state in ("slow", "stalled", "dead", "failed") for found in verdicts.values()):
        lines.append("Nothing is: every rank goes on." if len(verdicts) > 1 else "Nothing is: the rank goes on.")
        lines.append("")
    lines += [
        f"- {text}" for text in describe_waiting_ranks({other: said.collectives for other, said in answers.items()})
    ]
    for other in sorted(last.keys() | {rank}):
        beat = answers[other].row if other in answers else row if other == rank else None
        if beat is not None:
            place = f", at {beat['where']}" if beat["where"] else ""
            usual = beat["expected_phase_seconds"]
            often = "" if usual is None else f" (usually {usual:.2g} s)"
            lines.append(f"- Rank {other} was in {beat['phase']} for {duration(beat['phase_seconds'])}{often}{place}.")
        elif last[other]["status"] == "running":
            stacks = run.crash_stacks(other)
            died = "" if stacks is None else f" Its last stacks are in {stacks.name}, one folder up."
            lines.append(f"- Rank {other} has not answered: {verdicts[other].reason}.{died}")
    lines += ["", "## Ranks", "", "| rank | verdict | step | why |", "|---|---|---|---|"]
    for other, found in sorted(verdicts.items()):
        step = (row if other == rank else last[other])["step"]
        lines.append(f"| {other} | {found.state} | {step:,} | {found.reason} |")
    lines += ["", "## Files", ""]
    lines += [f"- `{pattern}`: {holds}" for pattern, holds in _FILES if any(folder.glob(pattern))]
    lines += ["", "## Last metrics", "", *_last_metrics(run), ""]
    return "\n".join(lines)


def _last_metrics(run: Run) -> list[str]:
    """The last rows of training as a table, then the last warnings and errors."""
    rows = run.of_kind("train")[-_LAST_ROWS:]
    if not rows:
        return ["None yet."]
    lines = ["| step | " + " | ".join(_LAST_FIGURES).replace("_", " ") + " |", "|---" * (1 + len(_LAST_FIGURES)) + "|"]
    lines += [
        f"| {row['step']:,} | " + " | ".join(_value(row.get(name)) for name in _LAST_FIGURES) + " |" for row in rows
    ]
    events = [event for event in run.of_kind("event") if event["severity"] != "info"][-_LAST_ROWS:]
    lines += ["", *(f"- {event['severity']} at step {event['step']:,}: {event['message']}" for event in events)]
    return lines


def _value(number: float | None) -> str:
    return f"{number:,.4g}" if isinstance(number, int | float) else "unknown"


def _gib(number: int | None) -> str:
    return "unknown" if number is None else f"{number / 2**30:.2f} GiB"
