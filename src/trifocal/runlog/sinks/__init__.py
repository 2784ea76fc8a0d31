"""Other consumers of the metric rows: TensorBoard, Weights & Biases, Hugging Face trackio."""

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trifocal.runlog.sinks.rows import missing
from trifocal.runlog.sinks.tensorboard import TensorBoardSink
from trifocal.runlog.sinks.thread import Sink, SinkThread
from trifocal.runlog.sinks.trackio import TrackioSink
from trifocal.runlog.sinks.wandb import WandbSink

SINKS = ("tensorboard", "wandb", "trackio")


def check_sinks(names: Iterable[str]) -> None:
    """Refuse sinks without an installed package, before the run begins.

    Raises:
        UserError: If a package is missing; names it, and its extra.
    """
    for name in names:
        # The package and the extra have the sink's name.
        if importlib.util.find_spec(name) is None:
            raise missing(name, name)


def make_sinks(
    names: Iterable[str],
    directory: Path,
    *,
    project: str,
    config: Mapping[str, Any],
    resume_step: int | None = None,
) -> list[Sink]:
    """Make the sinks of a run; nothing is sent yet.

    Args:
        names: Names from SINKS.
        directory: The run.
        project: Project of the run in W&B and trackio.
        config: The run's configuration.
        resume_step: The step from which the run resumes; None for a new run.

    Raises:
        ValueError: If a name is not in SINKS.
        UserError: If a package is not installed; names its extra.
    """
    sinks: list[Sink] = []
    for name in names:
        if name == "tensorboard":
            sinks.append(TensorBoardSink(directory / "tensorboard", resume_step=resume_step))
        elif name == "wandb":
            sinks.append(WandbSink(directory, project=project, config=config))
        elif name == "trackio":
            sinks.append(TrackioSink(directory, project=project, config=config, resume_step=resume_step))
        else:
            raise ValueError(f"a sink must be one of {', '.join(SINKS)}, got {name!r}")
    return sinks


__all__ = ["SINKS", "Sink", "SinkThread", "TensorBoardSink", "TrackioSink", "WandbSink", "check_sinks", "make_sinks"]
