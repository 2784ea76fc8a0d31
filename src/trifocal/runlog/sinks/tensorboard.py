"""The TensorBoard sink (extra `tensorboard`)."""

import os
from typing import Any

from trifocal.runlog.jsonl import Row
from trifocal.runlog.sinks.rows import scalars


class TensorBoardSink:
    """Writes every number of a metric row to TensorBoard as `kind/field`, and every event as text.

    Args:
        directory: Folder of TensorBoard's event files.
        resume_step: The step from which the run resumes; TensorBoard hides later steps.
    """

    def __init__(self, directory: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(str(directory), purge_step=purge_step)

    def write(self, row: Row) -> None:
        """Write one row."""
        step, when = row["step"], row["unix_time_seconds"]
        if row["kind"] == "event":
            self._writer.add_text(f"event/{row['name']}", row["message"], step, walltime=when)
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, step, walltime=when)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
