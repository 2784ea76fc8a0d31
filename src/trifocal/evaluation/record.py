"""The file of an evaluation in the folder of its run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trifocal.runlog.run import read_evaluation
from trifocal.runlog.whole_files import write_whole

Row = dict[str, Any]


def to_json(head: Row, rows: Sequence[Row]) -> str:
    """An evaluation as the text of its file: the model and the machine, and the figures."""
    return json.dumps({**head, "rows": list(rows)}, indent=1) + "\n"


def write_evaluation(folder: Path, head: Row, rows: Sequence[Row]) -> Path:
    """Write an evaluation into its run's folder; rows of an earlier one of the same step stay unless measured again."""
    path = folder / "evaluation" / (f"step_{head['step']:08d}.json" if head["step"] is not None else "weights.json")

    def measured(row: Row) -> tuple[Any, ...]:
        return tuple(map(row.get, ("task", "length", "pairs", "source", "name")))

    earlier, again = read_evaluation(path), {measured(row) for row in rows}
    kept = [row for row in earlier["rows"] if measured(row) not in again] if earlier is not None else []
    path.parent.mkdir(exist_ok=True)
    write_whole(path, to_json(head, [*kept, *rows]))
    return path
