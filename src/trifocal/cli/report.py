"""`trifocal report`: one self-contained HTML page of a run, or of several."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from trifocal.cli.flags import parse_arguments
from trifocal.cli.output import printable
from trifocal.paths import user_path
from trifocal.report import write_report


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Write one self-contained HTML page of a run, or of several side by side."""

    run_directories: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR ...")]
    """The run, or several to compare."""
    output: str = ""
    """Where to write; by default report.html in the run, of several runs comparison.html in the first."""


def run(args: Sequence[str]) -> int:
    """Write the page and print its path."""
    options: ReportArguments = parse_arguments(ReportArguments, args, prog="trifocal report")
    directories = [user_path(directory, "RUN_DIR") for directory in options.run_directories]
    path = write_report(directories, user_path(options.output, "--output") if options.output else None)
    print(printable(str(path)))
    return 0
