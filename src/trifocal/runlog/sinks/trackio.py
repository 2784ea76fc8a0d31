"""Hugging Face trackio as a reader of the metric rows (extra `trackio`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trifocal.runlog.jsonl import Row
from trifocal.runlog.sinks.rows import alert, missing, scalars


class TrackioSink:
    """Hands every number of a metric row to trackio as `kind/field`, and warnings and errors as alerts.

    The run is opened with the first row. Where trackio keeps it is its own affair: a local folder, or a Space
    (TRACKIO_DIR, TRACKIO_SPACE_ID); `trackio show` shows it.

    Args:
        directory: The run, which gives it its name.
        project: Under which trackio files the run.
        config: The run's configuration.
        resume_step: The step that the run goes on from; None for a new one.

    Raises:
        UserError: If trackio is not installed; names the extra.
    """

    def __init__(
        self, directory: Path, *, project: str, config: Mapping[str, Any], resume_step: int | None = None
    ) -> None:
        try:
            import trackio
        except ImportError as error:
            raise missing("trackio", "trackio") from error
        self._trackio: Any = trackio
        self._settings: dict[str, Any] = {
            "project": project,
            "name": directory.resolve().name,
            "config": dict(config),
            "resume": "never" if resume_step is None else "allow",
            "embed": False,
            # The heartbeat has this process's memory; what else goes on in the machine is not of the run.
            "auto_log_cpu": False,
        }
        self._run: Any = None

    def write(self, row: Row) -> None:
        """Take one row."""
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
        """Hand over what is left."""
        if self._run is not None:
            self._run.finish()
