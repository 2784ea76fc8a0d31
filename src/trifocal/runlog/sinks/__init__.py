"""Further readers of the one stream of metrics: TensorBoard, Weights & Biases, Hugging Face trackio."""

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
    """Refuse sinks whose packages are not installed, before anything is begun.

    Raises:
        UserError: Names the package, and the extra that has it.
    """
    for name in names:
        # Each is the name of the package and of the extra too.
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
        names: Of SINKS.
        directory: The run.
        project: Under which W&B and trackio file the run.
        config: The run's configuration, which they show.
        resume_step: The step that the run goes on from; None for a new one.

    Raises:
        ValueError: If a name is not one of SINKS.
        UserError: If a package is not installed; names the extra that has it.
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
