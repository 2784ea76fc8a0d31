"""The files of one process in a dump folder: stacks at once, then the parts that take longer.

docs/runs.md has the files. A part that fails writes the error into its file; nothing here raises.
"""

import faulthandler
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trifocal.runlog.jsonl import Row, logger
from trifocal.runlog.stalls.collectives import Collective, describe, last_of_each_group, recorded_collectives
from trifocal.runlog.whole_files import write_whole

_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Answer:
    """One rank's `rank*.json`."""

    row: Row
    collectives: list[Collective]
    """The last one of each group."""


def write_stacks(folder: Path, rank: int) -> None:
    """Write the stacks of all threads, by faulthandler, which waits for no lock."""
    try:
        with (folder / f"stacks_rank{rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
    except OSError as error:
        logger.warning("cannot write the stacks of rank %d: %s", rank, error)


def write_details(folder: Path, rank: int, row: Row, device: torch.device) -> None:
    """Write all files but the stacks; those that other ranks wait for come first.

    Args:
        folder: The dump.
        rank: Rank of this process.
        row: Its heartbeat row.
        device: Its device.
    """
    with _one_at_a_time:
        collectives: list[Collective] = []
        page = ""
        try:
            collectives = recorded_collectives()
            page = describe(collectives) if collectives else ""
        except Exception as error:
            page = f"cannot be read: {error}\n"
        if page:
            _write(folder / f"collectives_rank{rank}.txt", lambda: page)
        answer = {"row": row, "collectives": [found.row() for found in last_of_each_group(collectives)]}
        _write(folder / f"rank{rank}.json", lambda: json.dumps(answer, indent=1) + "\n")
        if device.type == "cuda":
            # Last: the allocator's lock may be held by a thread that hangs in the driver.
            _write(folder / f"cuda_memory_rank{rank}.txt", lambda: torch.cuda.memory_summary(device))


def read_answers(folder: Path) -> dict[int, Answer]:
    """The answers of the ranks so far."""
    answers = {}
    for path in folder.glob("rank*.json"):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            collectives = [Collective(**fields) for fields in content["collectives"]]
            answers[int(path.stem.removeprefix("rank"))] = Answer(content["row"], collectives)
        except (OSError, ValueError, KeyError):
            # Not complete yet; it is read again later.
            continue
    return dict(sorted(answers.items()))


def _write(path: Path, make: Callable[[], str]) -> None:
    try:
        try:
            text = make()
        except Exception as error:
            text = f"failed: {type(error).__name__}: {error}\n"
        write_whole(path, text)
    except OSError as error:
        logger.warning("cannot write %s: %s", path, error)
