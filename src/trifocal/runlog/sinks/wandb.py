"""Weights & Biases as a reader of the metric rows (extra `wandb`)."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trifocal.runlog.jsonl import Row
from trifocal.runlog.sinks.rows import alert, missing, scalars

_ID_FILE = "run_id"


class WandbSink:
    """Hands every number of a metric row to W&B as `kind/field` over `step`, and warnings and errors as alerts.

    The connection is made with the first row. Whether W&B goes online, and as whom, is its own affair: `wandb login`,
    WANDB_MODE=offline.

    Args:
        directory: The run; W&B's files go into `wandb` in it, with the id by which a resumed run goes on.
        project: Under which W&B files the run.
        config: The run's configuration.

    Raises:
        UserError: If wandb is not installed; names the extra.
    """

    def __init__(self, directory: Path, *, project: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing("W&B", "wandb") from error
        self._wandb: Any = wandb
        self._directory, self._project, self._config = directory, project, dict(config)
        self._run: Any = None

    def write(self, row: Row) -> None:
        """Take one row."""
        if self._run is None:
            self._run = self._connect()
        found = alert(row)
        if found is not None:
            name, message, severity = found
            level = self._wandb.AlertLevel.ERROR if severity == "error" else self._wandb.AlertLevel.WARN
            self._run.alert(title=name, text=message, level=level)
        values = scalars(row)
        if values:
            # `step` is an axis of its own: W&B's must never go back, and several rows share one step.
            self._run.log({**values, "step": row["step"]})

    def close(self) -> None:
        """Hand over what is left."""
        if self._run is not None:
            self._run.finish()

    def _connect(self) -> Any:
        folder = self._directory / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / _ID_FILE
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        run = self._wandb.init(
            project=self._project,
            name=self._directory.resolve().name,
            id=file.read_text().strip(),
            resume="allow",
            dir=str(self._directory),
            config=self._config,
            # The terminal belongs to the run.
            settings=self._wandb.Settings(console="off", quiet=True),
        )
        run.define_metric("*", step_metric="step")
        return run
