"""The tracer of a run, and what a person should know about what it will not see."""

from pathlib import Path

import torch

from trifocal.distributed import Parallel, Processes
from trifocal.models import DecoderLM
from trifocal.runlog.heartbeat import Phases
from trifocal.runlog.traces import Tracer
from trifocal.train.run_config import RunConfig
from trifocal.train.saving import Say


def make_tracer(
    config: RunConfig,
    directory: Path,
    processes: Processes,
    *,
    model: DecoderLM,
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    phases: Phases,
    step: int,
    say: Say,
) -> Tracer:
    """Make the tracer that `config.trace` asks for, which may be one that does nothing.

    Args:
        config: The run.
        directory: Of the run.
        processes: This process among those of the run.
        model: The model itself.
        parallel: The model as it is trained.
        optimizer: Of its parameters.
        phases: The heartbeat.
        step: Steps done so far.
        say: Told what was traced, and what cannot be.
    """
    names, windows = config.trace.names(), config.trace.windows()
    interval, total = config.trace.interval_steps, config.train.steps
    by_interval = interval > 0 and step // interval < total // interval
    if names and not by_interval and all(end <= step + 1 or first > total for first, end in windows):
        given = f'trace.steps "{config.trace.steps}"' + (f" and trace.interval_steps {interval}" if interval else "")
        say("note", f"{given}: no step of this run is among them, and nothing is traced", "warning")
    if "exchange" in names and parallel.watch is None:
        say("note", "trace.what: one process exchanges nothing", "warning")
    severity = {"traced": "info", "anomaly": "error"}
    return Tracer(
        directory,
        names,
        windows,
        interval_steps=interval,
        model=model,
        parallel=parallel,
        optimizer=optimizer,
        device=processes.device,
        rank=processes.rank,
        phases=phases,
        report=lambda name, sentence: say(name, sentence, severity.get(name, "warning")),
    )
