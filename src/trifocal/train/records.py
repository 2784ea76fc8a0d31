"""What a run writes down from its start on: its environment, its metrics."""

from dataclasses import asdict
from pathlib import Path

import torch

from trifocal.runlog import MetricsWriter, make_sinks, write_environment
from trifocal.train.run_config import RunConfig
from trifocal.train.toml import to_toml


def open_records(
    config: RunConfig, directory: Path, *, device: torch.device, resume_step: int | None, first: bool
) -> MetricsWriter:
    """Write `env.json`, and open the metrics with their sinks.

    Args:
        config: The run.
        directory: Of the run.
        device: Where it computes.
        resume_step: The step that it goes on from; None for a new one.
        first: Whether this process writes for all; any other gets metrics that go nowhere.
    """
    if not first:
        return MetricsWriter.silent()
    write_environment(directory / "env.json", to_toml(config), device=device, precision=config.train.precision)
    sinks = make_sinks(
        config.log.sink_names(),
        directory,
        project=config.log.project,
        config=asdict(config),
        resume_step=resume_step,
    )
    return MetricsWriter(directory / "metrics.jsonl", resume_step=resume_step, sinks=sinks)
