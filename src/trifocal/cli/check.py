"""`trifocal check`: prove this installation right on this machine."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from trifocal.checks import registry
from trifocal.cli.flags import parse_arguments
from trifocal.cli.output import check_output, unwinding_signals, write_file
from trifocal.train.config.check import choose_device

_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


@dataclass(frozen=True, kw_only=True)
class CheckArguments:
    """Prove this installation right on this machine, by named checks. Exit status 1 if any fails.

    Each has a figure and a bound. The numbers behind `guards` are numbers of failures in docs/runs.md.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to check; "auto" takes a GPU if there is one."""
    only: tuple[str, ...] = ()
    """Names of the checks to run; all by default."""
    json: str = ""
    """A file for the results, the details and the environment, as JSON."""


def run(args: Sequence[str]) -> int:
    """Run the checks, showing each as it ends."""
    options: CheckArguments = parse_arguments(CheckArguments, args, prog="trifocal check")
    check_output(options.json)
    console = Console(file=sys.stdout, soft_wrap=not sys.stdout.isatty(), highlight=False, markup=False)

    checks = registry.chosen_checks([name for text in options.only for name in text.split(",")])
    device, results = choose_device(options.device), list[registry.CheckResult]()
    with unwinding_signals():
        for number, check in enumerate(checks, 1):
            guards = f" (guards {', '.join(map(str, check.guards))})" if check.guards else ""
            console.print(f"[{number}/{len(checks)}] {check.name}: {check.what}{guards}")
            results.append(registry.run_check(check, device))
            _show(results[-1], console)
    report = registry.Report(device, tuple(results))
    if options.json:
        write_file(options.json, report.to_json())
    console.print(f"\n{report.summary()}")
    for result in report.results:
        if result.status == "failed":
            console.print(f"failed: {result.name}", style=_STYLES["failed"])
    return report.exit_status


def _show(result: registry.CheckResult, console: Console) -> None:
    line = f"  {result.status} in {result.seconds:.1f} s"
    if result.figure is not None and result.bound is not None:
        line += f": {_number(result.figure)} {result.unit}, at most {_number(result.bound)}"
    console.print(line, style=_STYLES[result.status])
    for line in result.details:
        console.print(f"    {line}", style="dim")


def _number(value: float) -> str:
    """A number with three digits; a whole one whole."""
    return f"{value:.0f}" if math.isfinite(value) and value == round(value) and abs(value) < 1e6 else f"{value:.3g}"
