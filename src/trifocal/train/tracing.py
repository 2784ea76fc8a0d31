"""The tracer of a run, and warnings where it would see nothing."""

from trifocal.runlog.traces import Tracer
from trifocal.train.run_logger import RunLogger
from trifocal.train.train_setup import TrainSetup


def make_tracer(setup: TrainSetup, log: RunLogger) -> Tracer:
    """Make the tracer that `config.trace` asks for, which may be one that does nothing.

    Args:
        setup: The run.
        log: Takes the events; its heartbeat names the phases.
    """
    config, step = setup.config, setup.state.step
    names, windows = config.trace.names(), config.trace.windows()
    interval, total = config.trace.interval_steps, config.train.steps
    by_interval = interval > 0 and step // interval < total // interval
    if names and not by_interval and all(end <= step + 1 or first > total for first, end in windows):
        given = f'trace.steps "{config.trace.steps}"' + (f" and trace.interval_steps {interval}" if interval else "")
        log.log_event("note", f"{given}: no step of this run is among them, and nothing is traced", "warning")
    if "exchange" in names and setup.parallel.watch is None:
        log.log_event("note", "trace.what: one process exchanges nothing", "warning")
    return Tracer(
        setup.directory,
        names,
        windows,
        interval_steps=interval,
        model=setup.model,
        parallel=setup.parallel,
        optimizer=setup.optimizer,
        device=setup.device,
        rank=setup.processes.rank,
        phases=log.heartbeat,
        report=lambda name, sentence: log.log_event(name, sentence, "info" if name == "traced" else "warning"),
    )
