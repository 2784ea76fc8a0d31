"""Other consumers of the metric rows: TensorBoard and Weights & Biases, which buffer rows themselves."""

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trifocal.errors import UserError
from trifocal.runlog.sinks.rows import Sink
from trifocal.runlog.sinks.tensorboard import TensorBoardSink
from trifocal.runlog.sinks.wandb import WandbSink

SINKS = ("tensorboard", "wandb")


def check_sinks(names: Iterable[str]) -> None:
    """Refuse unknown sinks, and sinks without an installed package.

    Raises:
        ValueError: If a name is not in SINKS.
        UserError: If a package is missing; names it, and its extra.
    """
    for name in names:
        if name not in SINKS:
            raise ValueError(f"a sink must be one of {', '.join(SINKS)}, got {name!r}")
        # The package and the extra have the sink's name.
        if importlib.util.find_spec(name) is None:
            raise UserError(f"log.sinks asks for {name}, which is not installed: pip install 'trifocal[{name}]'")


def make_sinks(
    names: Sequence[str],
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
        project: Project of the run in W&B.
        config: The run's configuration.
        resume_step: The step from which the run resumes; None for a new run.

    Raises:
        ValueError, UserError: As `check_sinks`.
    """
    check_sinks(names)
    makers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoardSink(directory / "tensorboard", resume_step=resume_step),
        "wandb": lambda: WandbSink(directory, project=project, config=config),
    }
    return [makers[name]() for name in names]


__all__ = ["SINKS", "Sink", "TensorBoardSink", "WandbSink", "check_sinks", "make_sinks"]
