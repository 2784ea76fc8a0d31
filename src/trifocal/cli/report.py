"""`trifocal report`: one self-contained HTML page of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from trifocal.diagnostics.report import write_report
from trifocal.train.arguments import parse_arguments
from trifocal.train.run_directory import load_run


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Write one self-contained HTML page of a run."""

    run_directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """The run."""
    compare: tuple[str, ...] = ()
    """Further runs to show beside it."""
    output: str = ""
    """Where to write; report.html in the run by default."""


def run(args: Sequence[str]) -> int:
    """Write the page and print its path.

    Raises:
        UserError: If there is no run.
    """
    options: ReportArguments = parse_arguments(ReportArguments, args, prog="trifocal report")
    directories = [Path(options.run_directory), *map(Path, options.compare)]
    for directory in directories:
        load_run(directory)
    path = write_report(directories, options.output or None)
    print(path)
    return 0
