"""`trifocal watch`: a run live in the terminal, from its files alone."""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.live import Live

from trifocal.diagnostics.remote import RemoteRun, remote_address
from trifocal.diagnostics.run import Run, read_run
from trifocal.diagnostics.watch import Silences, render, verdicts
from trifocal.errors import UserError
from trifocal.train.arguments import parse_arguments

_OVER = {"finished", "stopped", "failed", "dead"}
_TROUBLE = {"stalled", "failed", "dead"}


@dataclass(frozen=True, kw_only=True)
class WatchArguments:
    """Show every rank of a run live: progress, loss, throughput, and whether it runs, is slow or is stuck."""

    run_directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """The run, or HOST:RUN_DIR on a machine that ssh reaches; that one needs a shell and nothing else."""
    interval_seconds: float = 2.0
    """Time between two pictures; 0 shows one and ends, as everywhere but on a terminal."""

    def __post_init__(self) -> None:
        if not self.interval_seconds >= 0:
            raise UserError(f"--interval-seconds must be at least 0, got {self.interval_seconds}")


def run(args: Sequence[str]) -> int:
    """Show the run until it is over or Ctrl-C.

    Returns:
        0, or 1 if a rank is stalled, failed or dead at the end.

    Raises:
        UserError: If there is no run, or the connection ends.
    """
    options: WatchArguments = parse_arguments(WatchArguments, args, prog="trifocal watch")
    console, silences = Console(), Silences()
    with ExitStack() as stack:
        read = _reader(options.run_directory, stack)
        watched = read()
        if options.interval_seconds == 0 or not console.is_terminal:
            console.print(render(watched, width=console.width))
        else:
            try:
                with Live(console=console, auto_refresh=False) as live:
                    while True:
                        live.update(render(watched, width=console.width, silences=silences), refresh=True)
                        states = {verdict.state for verdict in verdicts(watched, silences=silences).values()}
                        if states and states <= _OVER:
                            break
                        time.sleep(options.interval_seconds)
                        watched = read()
            except KeyboardInterrupt:
                pass
    return int(any(verdict.state in _TROUBLE for verdict in verdicts(watched, silences=silences).values()))


def _reader(where: str, stack: ExitStack) -> Callable[[], Run]:
    remote = remote_address(where)
    if remote is None:
        return lambda: read_run(Path(where), whole_heartbeats=False)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trifocal-watch-")))
    return stack.enter_context(RemoteRun(*remote, folder)).read
