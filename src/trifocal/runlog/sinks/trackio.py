"""The Hugging Face trackio sink (extra `trackio`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trifocal.runlog.jsonl import Row
from trifocal.runlog.sinks.rows import alert, scalars


class TrackioSink:
    """Writes every number of a metric row to trackio as `kind/field`, and warnings and errors as alerts.

    The first row opens the run. trackio keeps it in a local folder or a Space (TRACKIO_DIR, TRACKIO_SPACE_ID);
    `trackio show` shows it.

    Args:
        directory: The run; trackio's run has the name of the folder.
        project: Project of the run in trackio.
        config: The run's configuration.
        resume_step: The step from which the run resumes; None for a new run.
    """

    def __init__(
        self, directory: Path, *, project: str, config: Mapping[str, Any], resume_step: int | None = None
    ) -> None:
        import trackio

        self._trackio: Any = trackio
        self._settings: dict[str, Any] = {
            "project": project,
            "name": directory.resolve().name,
            "config": dict(config),
            "resume": "never" if resume_step is None else "allow",
            "embed": False,
            # The heartbeat has this process's memory; the rest of the machine is not part of the run.
            "auto_log_cpu": False,
        }
        self._run: Any = None

    def write(self, row: Row) -> None:
        """Write one row."""
        if self._run is None:
            self._run = self._trackio.init(**self._settings)
        found = alert(row)
        if found is not None:
            name, message, severity = found
            level = self._trackio.AlertLevel.ERROR if severity == "error" else self._trackio.AlertLevel.WARN
            self._run.alert(title=name, text=message, level=level, step=row["step"])
        values = scalars(row)
        if values:
            self._run.log(values, step=row["step"])

    def close(self) -> None:
        """Send the remaining rows."""
        if self._run is not None:
            self._run.finish()
