"""Other consumers of the metric rows: TensorBoard and Weights & Biases, which buffer rows themselves."""

import importlib.util
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trifocal.errors import UserError
from trifocal.runlog.jsonl import Row

SINKS = ("tensorboard", "wandb")
_NOT_SCALARS = {"kind", "step", "unix_time_seconds", "layer"}


def check_sinks(names: Iterable[str]) -> None:
    """Refuse sinks without an installed package: a UserError that names it, and its extra."""
    for name in names:
        # The package and the extra have the sink's name.
        if importlib.util.find_spec(name) is None:
            raise UserError(f"log.sinks asks for {name}, which is not installed: pip install 'trifocal[{name}]'")


def _scalars(row: Row) -> dict[str, float]:
    """Every number of a row as `kind/field`, or `kind/layer/field`; empty for events."""
    layer = f"layer{row['layer']:02}/" if "layer" in row else ""
    return {
        f"{row['kind']}/{layer}{name}": value
        for name, value in row.items()
        if row["kind"] != "event" and name not in _NOT_SCALARS and isinstance(value, int | float)
    }


class TensorBoardSink:
    """Writes every number of a row to TensorBoard as `kind/field`, every event as text; steps past `resume_step`, of an
    earlier start, are hidden there.
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
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, step, walltime=when)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbSink:
    """Writes every number of a row to W&B as `kind/field` over `step`; the first connects. The run's `wandb` folder has
    W&B's files, and the id for resuming.
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
        if values := _scalars(row):
            # `step` is a separate axis: W&B's own step must never decrease, and several rows share one step.
            self._run.log({**values, "step": row["step"]})

    def close(self) -> None:
        """Send the remaining rows."""
        if self._run is not None:
            self._run.finish()

    def _connect(self) -> Any:
        file = self._directory / "wandb" / "run_id"
        file.parent.mkdir(parents=True, exist_ok=True)
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


Sink = TensorBoardSink | WandbSink
"""It may raise: then it gets no more rows, and training continues."""


def make_sinks(
    names: Sequence[str], directory: Path, *, project: str, config: Mapping[str, Any], resume_step: int | None = None
) -> list[Sink]:
    """Make the sinks of a run, names from SINKS; nothing is sent yet. `project` is that in W&B."""
    makers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoardSink(directory / "tensorboard", resume_step=resume_step),
        "wandb": lambda: WandbSink(directory, project=project, config=config),
    }
    return [makers[name]() for name in names]
