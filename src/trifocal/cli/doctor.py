"""`trifocal doctor`: the abilities of this machine, two measured steps of CONFIG.toml, remedies of faults."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from trifocal.cli.console import SafeConsole
from trifocal.cli.flags import parse_arguments
from trifocal.cli.output import check_output, unwinding_signals, write_file
from trifocal.doctor.examination import examine
from trifocal.train.config.load import load_config

_STYLES = {"note": "yellow", "broken": "bold red"}


@dataclass(frozen=True, kw_only=True)
class DoctorArguments:
    """Show the abilities of this machine and the command that mends each fault.

    Takes two steps of each CONFIG.toml here, and shows their peak memory and speed, and what to lower if they do not
    fit.

    Exit status 1 if something stops training. A few seconds, and the time of the steps.
    """

    config: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG.toml ...")] = ()
    """TOML files to measure, on the device and the data that they name; each must be able to run here."""
    json: str = ""
    """A file for everything as JSON."""


def run(args: Sequence[str]) -> int:
    """Examine the machine and show the findings."""
    options: DoctorArguments = parse_arguments(DoctorArguments, args, prog="trifocal doctor")
    check_output(options.json)
    configs = {path: load_config(path) for path in options.config}
    folder = Path(next(iter(configs.values())).run.directory if configs else "runs")
    with unwinding_signals():
        examination = examine(
            configs, folder, on_start=lambda what: print(f"looking at {what}", file=sys.stderr, flush=True)
        )
    if options.json:
        write_file(options.json, json.dumps(examination.to_dict(), indent=1) + "\n")
    console = SafeConsole(file=sys.stdout, highlight=False, soft_wrap=True)
    for line in examination.lines():
        console.print(line, style=_STYLES.get(line.partition(" ")[0]))
    return int(bool(examination.broken))
