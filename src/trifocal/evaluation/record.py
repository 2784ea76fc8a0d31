"""The file of an evaluation in the folder of its run."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trifocal.runlog.run import read_evaluation
from trifocal.runlog.whole_files import write_whole

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The evaluated model, and the machine.

    Attributes:
        step: Optimizer steps of the model; None where unknown.
        attention: Kinds of attention in the model, with commas.
        parameters: Number of parameters.
        source: `data.source` of the text or task.
        trained_length: Tokens of a training sequence; None where unknown.
        precision: Precision of the matrix products.
        device: The GPU or CPU.
        version: Version of Trifocal.
    """

    step: int | None
    attention: str
    parameters: int
    source: str
    trained_length: int | None
    precision: str
    device: str
    version: str


def merge_rows(before: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The rows of an earlier evaluation of the same model that the new one has not measured again, and the new ones.

    A task is measured for one source and one length at a time, recall for one number of pairs.
    """

    def measured(row: Row) -> tuple[Any, ...]:
        return row.get("task"), row.get("length"), row.get("pairs"), row.get("source")

    again = {measured(row) for row in new}
    return [*(row for row in before if measured(row) not in again), *new]


def to_json(head: Evaluated, rows: Sequence[Row]) -> str:
    """An evaluation as the text of its file."""
    return json.dumps({**asdict(head), "rows": list(rows)}, indent=1) + "\n"


def write_evaluation(folder: Path, head: Evaluated, rows: Sequence[Row]) -> Path:
    """Write an evaluation into the folder of its run, or add it to an earlier one of the same step.

    Returns:
        The file, in `evaluation/`.

    Raises:
        OSError: If it cannot be written.
    """
    path = folder / "evaluation" / (f"step_{head.step:08d}.json" if head.step is not None else "weights.json")
    earlier = read_evaluation(path)
    path.parent.mkdir(exist_ok=True)
    write_whole(path, to_json(head, merge_rows(earlier["rows"] if earlier is not None else [], rows)))
    return path
