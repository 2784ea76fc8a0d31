"""`trifocal watch`: a run live in the terminal, only from its files."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.live import Live

from trifocal.cli.console import SafeConsole
from trifocal.cli.flags import parse_arguments
from trifocal.cli.output import unwinding_signals
from trifocal.fields import check_at_least
from trifocal.paths import user_path
from trifocal.report.live_view import OVER, render
from trifocal.runlog.run import read_run
from trifocal.runlog.stalls.verdict import verdicts


@dataclass(frozen=True, kw_only=True)
class WatchArguments:
    """Show every rank of a run live: progress, loss, throughput, and whether it runs, is slow or is stuck."""

    run_directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """The run. On another machine: ssh -t HOST trifocal watch RUN_DIR."""
    interval_seconds: float = 2.0
    """Time between two pictures; 0 shows one and ends, as everywhere but on a terminal."""

    def __post_init__(self) -> None:
        check_at_least(self, "", interval_seconds=0)


def run(args: Sequence[str]) -> int:
    """Show the run until it is over or Ctrl-C; exit status 1 if a rank is stalled, failed or dead at the end."""
    options: WatchArguments = parse_arguments(WatchArguments, args, prog="trifocal watch")
    console = SafeConsole()
    directory = user_path(options.run_directory, "RUN_DIR")
    watched = read_run(directory, live=True)
    if options.interval_seconds == 0 or not console.is_terminal or console.is_dumb_terminal:
        console.print(render(watched))
    else:
        try:
            # Without its end, the terminal has no cursor.
            with unwinding_signals(), Live(console=console, auto_refresh=False) as live:
                while True:
                    live.update(render(watched), refresh=True)
                    states = {verdict.state for verdict in verdicts(watched).values()}
                    if states and states <= OVER:
                        break
                    time.sleep(options.interval_seconds)
                    watched = read_run(directory, live=True)
        except KeyboardInterrupt:
            pass
    return int(any(verdict.mark == "bad" for verdict in verdicts(watched).values()))
