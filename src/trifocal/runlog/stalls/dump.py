"""The files of one process in a dump folder, and `summary.md`, which says in words who is stuck.

docs/runs.md has the files. A part that fails writes the error into its file; nothing here raises but `stall_summary`.
"""

import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from trifocal.errors import UserError
from trifocal.runlog.heartbeat import all_stacks
from trifocal.runlog.jsonl import Row, logger
from trifocal.runlog.progress import duration
from trifocal.runlog.run import read_run
from trifocal.runlog.stalls.collectives import Collective, describe, describe_waiting_ranks, recorded_collectives
from trifocal.runlog.stalls.verdict import judge
from trifocal.runlog.whole_files import write_whole

_one_at_a_time = threading.Lock()


class Answer(NamedTuple):
    """One rank's `rank*.json`."""

    row: Row
    collectives: list[Collective]
    """The last one of each group."""


def write_stacks(folder: Path, rank: int) -> None:
    """Write the Python stacks of all threads."""
    try:
        (folder / f"stacks_rank{rank}.txt").write_text(all_stacks(), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        logger.warning("cannot write the stacks of rank %d: %s", rank, error)


def write_details(folder: Path, rank: int, row: Row) -> None:
    """Write all files but the stacks; those that other ranks wait for come first."""
    with _one_at_a_time:
        collectives: list[Collective] = []
        page = ""
        try:
            collectives = recorded_collectives()
            page = describe(collectives) if collectives else ""
        except Exception as error:
            page = f"cannot be read: {error}\n"
        if page:
            _write(folder / f"collectives_rank{rank}.txt", page)
        last = {(found.library, found.group): found for found in collectives}
        answer = {"row": row, "collectives": [asdict(found) for found in last.values()]}
        _write(folder / f"rank{rank}.json", json.dumps(answer, indent=1) + "\n")


def read_answers(folder: Path) -> dict[int, Answer]:
    """The answers of the ranks so far; one that is not complete yet is read again later."""
    answers = {}
    for path in folder.glob("rank*.json"):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            collectives = [Collective(**fields) for fields in content["collectives"]]
            answers[int(path.stem.removeprefix("rank"))] = Answer(content["row"], collectives)
        except (OSError, ValueError, KeyError):
            continue
    return dict(sorted(answers.items()))


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        logger.warning("cannot write %s: %s", path, error)


def stall_summary(directory: Path, folder: Path, rank: int, what: str, row: Row) -> str:
    """The page `summary.md` of a dump: the stuck ranks, in words, as Markdown. `rank` began it; `what` is its state, as
    words after "Rank N", and `row` its heartbeat row.
    """
    answers = read_answers(folder)
    lines = [
        f"# Rank {rank} {what}",
        "",
        f"At step {row['step']:,}, {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(row['unix_time_seconds']))}, "
        f"process {row['pid']} on {row['host']}, at {row['where'] or 'an unknown place'}.",
    ]
    try:
        run = read_run(directory, live=True)
    except (UserError, OSError) as error:
        return "\n".join([*lines, "", f"The rest of the run cannot be read: {error}", ""])
    last = {other: rows[-1] for other, rows in run.heartbeats.items()} | {rank: row}
    verdicts = {other: judge(beat) for other, beat in sorted(last.items())}
    lines += ["", "## What is stuck where", ""]
    silent = [other for other, beat in last.items() if other not in {rank, *answers} and beat["status"] == "running"]
    if not silent and not any(found.state in ("slow", "stalled", "dead", "failed") for found in verdicts.values()):
        lines += ["Nothing is stuck: every rank is making progress.", ""]
    lines += [
        f"- {text}" for text in describe_waiting_ranks({other: said.collectives for other, said in answers.items()})
    ]
    for other, verdict in verdicts.items():
        beat = answers[other].row if other in answers else row if other == rank else None
        if beat is not None:
            place = f", at {beat['where']}" if beat["where"] else ""
            usual = beat["expected_phase_seconds"]
            often = "" if usual is None else f" (usually {usual:.2g} s)"
            lines.append(f"- Rank {other} was in {beat['phase']} for {duration(beat['phase_seconds'])}{often}{place}.")
        elif other in silent:
            stacks = run.crash_stacks(other)
            died = "" if stacks is None else f" Its last stacks are in {stacks.name}, one folder up."
            lines.append(f"- Rank {other} has not answered: {verdict.reason}.{died}")
    lines += [
        "",
        "## Ranks, by the last rows of their heartbeats",
        "",
        "| rank | verdict | step | why |",
        "|---|---|---|---|",
    ]
    lines += [f"| {other} | {it.state} | {last[other]['step']:,} | {it.reason} |" for other, it in verdicts.items()]
    return "\n".join([*lines, ""])
