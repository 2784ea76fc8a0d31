"""The Weights & Biases sink (extra `wandb`)."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trifocal.runlog.jsonl import Row
from trifocal.runlog.sinks.rows import alert, scalars

_ID_FILE = "run_id"


class WandbSink:
    """Writes every number of a metric row to W&B as `kind/field` over `step`, and warnings and errors as alerts.

    The first row makes the connection, with the settings of W&B itself (`wandb login`, WANDB_MODE=offline).

    Args:
        directory: The run; its `wandb` folder has W&B's files, and the id for resuming.
        project: Project of the run in W&B.
        config: The run's configuration.
    """

    def __init__(self, directory: Path, *, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._wandb: Any = wandb
        self._directory, self._project, self._config = directory, project, dict(config)
        self._run: Any = None

    def write(self, row: Row) -> None:
        """Write one row."""
        if self._run is None:
            self._run = self._connect()
        found = alert(row)
        if found is not None:
            name, message, severity = found
            level = self._wandb.AlertLevel.ERROR if severity == "error" else self._wandb.AlertLevel.WARN
            self._run.alert(title=name, text=message, level=level)
        values = scalars(row)
        if values:
            # `step` is an axis of its own: W&B's own step must never decrease, and several rows share one step.
            self._run.log({**values, "step": row["step"]})

    def close(self) -> None:
        """Send the remaining rows."""
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
