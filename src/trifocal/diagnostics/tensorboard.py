"""TensorBoard as one more reader of the metric rows (extra `tensorboard`)."""

import os
from typing import Any

from trifocal.diagnostics.jsonl import Row
from trifocal.errors import UserError

_NOT_SCALARS = {"kind", "step", "unix_time_seconds", "layer"}


class TensorBoardSink:
    """Hands every number of a metric row to TensorBoard as `kind/field`, and every event as text.

    Args:
        directory: Where TensorBoard's event files go.
        resume_step: The step that the run goes on from; what TensorBoard has of later steps is hidden.

    Raises:
        UserError: If TensorBoard is not installed; names the extra.
    """

    def __init__(self, directory: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("TensorBoard is not installed: pip install 'trifocal[tensorboard]'") from error
        purge_step = None if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(str(directory), purge_step=purge_step)

    def write(self, row: Row) -> None:
        """Take one row."""
        kind, step = row["kind"], row["step"]
        if kind == "event":
            self._writer.add_text(f"event/{row['name']}", row["message"], step, walltime=row["unix_time_seconds"])
            return
        layer = f"layer{row['layer']:02}/" if "layer" in row else ""
        for name, value in row.items():
            if name not in _NOT_SCALARS and isinstance(value, int | float):
                self._writer.add_scalar(f"{kind}/{layer}{name}", value, step, walltime=row["unix_time_seconds"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
