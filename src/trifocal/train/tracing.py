"""The tracer of a run, and what a person should know about what it will not see."""

from pathlib import Path

import torch

from trifocal.diagnostics.heartbeat import Phases
from trifocal.diagnostics.traces import Tracer
from trifocal.distributed import Parallel, Processes
from trifocal.models import DecoderLM
from trifocal.train.config import RunConfig
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
    if names and all(end <= step + 1 or first > config.train.steps for first, end in windows):
        say("note", f'trace.steps "{config.trace.steps}" has no step of this run: nothing is traced', "warning")
    if "exchange" in names and parallel.watch is None:
        say("note", "trace.what: one process exchanges nothing", "warning")
    severity = {"traced": "info", "anomaly": "error"}
    return Tracer(
        directory,
        names,
        windows,
        model=model,
        parallel=parallel,
        optimizer=optimizer,
        device=processes.device,
        rank=processes.rank,
        phases=phases,
        report=lambda name, sentence: say(name, sentence, severity.get(name, "warning")),
    )
