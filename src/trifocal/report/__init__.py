"""A self-contained page about one run, or about several for comparison (extra `report`)."""

import os
from collections.abc import Sequence
from pathlib import Path

from trifocal.errors import UserError
from trifocal.report.page import build_page
from trifocal.runlog.run import read_run
from trifocal.runlog.whole_files import write_output, write_whole

__all__ = ["write_report"]


def write_report(
    run_dirs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], output: str | os.PathLike[str] | None = None
) -> Path:
    """Write the report of one run, or of several for comparison, as a single HTML file that needs no network.

    Reads files only, also of running runs.

    Args:
        run_dirs: The run directory, or several.
        output: The file to write; by default `report.html` in the run directory, of several runs `comparison.html` in
            the first.

    Returns:
        The file written.

    Raises:
        UserError: If plotly is not installed (names the extra), a directory holds no run, one of its files cannot be
            read, or the output cannot be written.
    """
    directories = [run_dirs] if isinstance(run_dirs, str | os.PathLike) else list(run_dirs)
    if not directories:
        raise UserError("a report needs at least one run directory")
    runs = [read_run(Path(directory)) for directory in directories]
    plotly = _plotly_source()
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.directory)
    page = build_page(runs, plotly)
    name = "report.html" if len(runs) == 1 else "comparison.html"
    path = Path(output) if output is not None else runs[0].directory / name
    try:
        if output is None:
            # Others may write to this folder: do not follow a link of that name.
            write_whole(path, page)
        else:
            write_output(path, page)
    except OSError as error:
        advice = "; name another file with --output" if output is None else ""
        raise UserError(f"cannot write the report to {path}: {error.strerror}{advice}") from error
    return path


def _plotly_source() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError(
            "the report draws with plotly, which is not installed: pip install 'trifocal[report]'"
        ) from error
    return str(get_plotlyjs())
