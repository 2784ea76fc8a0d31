"""The page of a dump that says in words what is stuck where."""

import time
from pathlib import Path

from trifocal.diagnostics.collectives import who_waits_for_whom
from trifocal.diagnostics.dump import Answer
from trifocal.diagnostics.jsonl import Row
from trifocal.diagnostics.progress import duration
from trifocal.diagnostics.run import read_run
from trifocal.diagnostics.verdict import judge
from trifocal.errors import UserError

_LAST_ROWS = 3
_HINTS = {
    "data": "The loader gives no batch: look at the source (a network, a disk) and at the loader's thread.",
    "forward": "If it stands in a collective, another rank did not come: compare the ranks' stacks below.",
    "backward": "Look for a hook or a collective at the top of the stacks; with several ranks, compare them.",
    "optimizer": "On a GPU the host waits here for everything queued before: the cause may be an earlier kernel.",
    "checkpoint": "The disk does not take the checkpoint: look at free space and at the file system.",
    "evaluate": "The validation source or a collective does not answer.",
    "telemetry": "A forward pass of one sequence that looks at the attention: compare the ranks' stacks below.",
    "sample": "The model is writing a sample: look whether it is still adding tokens.",
}
_FILES = (
    ("stacks_rank*.txt", "the Python stacks of all threads, the most recent call first"),
    ("native_stacks_rank*.txt", "the same with the frames of C and C++ code"),
    ("collectives_rank*.txt", "the last collectives, and which of them have not ended"),
    ("cuda_memory_rank*.txt", "what fills the GPU's memory"),
)


def stall_summary(directory: Path, folder: Path, rank: int, what: str, row: Row, answers: dict[int, Answer]) -> str:
    """Write the page.

    Args:
        directory: The run.
        folder: The dump, with what is in it so far.
        rank: Who began the dump.
        what: What it says of itself, after "Rank N".
        row: Its heartbeat row.
        answers: What the ranks, this one too, have said since.

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
    if row["phase"] in _HINTS:
        lines.append(f"- Hint: {_HINTS[row['phase']]}")
    try:
        run = read_run(directory, whole_heartbeats=False)
    except (UserError, OSError) as error:
        return "\n".join([*lines, "", f"The rest of the run cannot be read: {error}", ""])
    last = {other: rows[-1] for other, rows in run.heartbeats.items()}
    lines += ["", "## What is stuck where", ""]
    lines += [f"- {text}" for text in who_waits_for_whom({other: said.collectives for other, said in answers.items()})]
    for other in sorted(last.keys() | {rank}):
        beat = answers[other].row if other in answers else row if other == rank else None
        if beat is not None:
            place = f", at {beat['where']}" if beat["where"] else ""
            lines.append(f"- Rank {other} was in {beat['phase']} for {duration(beat['phase_seconds'])}{place}.")
        elif last[other]["status"] == "running":
            lines.append(f"- Rank {other} has not answered: {judge(last[other]).reason}.")
    lines += ["", "## Ranks", "", "| rank | verdict | step | why |", "|---|---|---|---|"]
    for other, beat in last.items():
        verdict = judge(beat)
        lines.append(f"| {other} | {verdict.state} | {beat['step']:,} | {verdict.reason} |")
    lines += ["", "## Files", ""]
    lines += [f"- `{pattern}`: {holds}" for pattern, holds in _FILES if any(folder.glob(pattern))]
    lines += ["", "## Last metrics", ""]
    lines += [f"    {metrics}" for metrics in run.rows[-_LAST_ROWS:]] or ["None yet."]
    return "\n".join([*lines, ""])


def _value(number: float | None) -> str:
    return "unknown" if number is None else f"{number:,.4g}"


def _gib(number: int | None) -> str:
    return "unknown" if number is None else f"{number / 2**30:.2f} GiB"
