"""The file of an evaluation in the folder of its run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trifocal.runlog.run import read_evaluation
from trifocal.runlog.whole_files import write_whole

Row = dict[str, Any]


def merge_rows(before: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The rows of an earlier evaluation of the same model that the new one has not measured again, and the new ones.

    A task is measured for one source and one length at a time, recall for one number of pairs, RULER for one name.
    """

    def measured(row: Row) -> tuple[Any, ...]:
        return row.get("task"), row.get("length"), row.get("pairs"), row.get("source"), row.get("name")

    again = {measured(row) for row in new}
    return [*(row for row in before if measured(row) not in again), *new]


def to_json(head: Row, rows: Sequence[Row]) -> str:
    """An evaluation as the text of its file: the model and the machine, and the figures."""
    return json.dumps({**head, "rows": list(rows)}, indent=1) + "\n"


def write_evaluation(folder: Path, head: Row, rows: Sequence[Row]) -> Path:
    """Write an evaluation into the folder of its run, or add it to an earlier one of the same step: the file."""
    path = folder / "evaluation" / (f"step_{head['step']:08d}.json" if head["step"] is not None else "weights.json")
    earlier = read_evaluation(path)
    path.parent.mkdir(exist_ok=True)
    write_whole(path, to_json(head, merge_rows(earlier["rows"] if earlier is not None else [], rows)))
    return path
