"""`trifocal check`: prove this installation right on this machine."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from trifocal import checks
from trifocal.checks.measurement import format_number
from trifocal.cli.output import check_output
from trifocal.cli.signals import unwinding_signals
from trifocal.paths import user_path
from trifocal.train.config.load import parse_arguments


@dataclass(frozen=True, kw_only=True)
class CheckArguments:
    """Prove this installation right on this machine: a table of named checks. Exit status 1 if any fails.

    The column `guards` has numbers of failures in docs/runs.md.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to check; "auto" takes a GPU if there is one."""
    only: tuple[str, ...] = ()
    """Names of the checks to run; all by default."""
    json: str = ""
    """A file for the results, the details and the environment, as JSON."""


def run(args: Sequence[str]) -> int:
    """Run the checks, showing each as it ends, then the table.

    Raises:
        UserError: If a check's name is unknown, or there is no such device.
    """
    options: CheckArguments = parse_arguments(CheckArguments, args, prog="trifocal check")
    check_output(options.json)
    console = Console(file=sys.stdout, soft_wrap=not sys.stdout.isatty())
    status = console.status("starting") if console.is_terminal else None

    def on_start(check: checks.Check, number: int, total: int) -> None:
        text = f"[{number}/{total}] {check.name}: {check.what}"
        if status is not None:
            status.update(text.replace("[", r"\["))
        else:
            print(text, flush=True)

    def on_result(result: checks.CheckResult) -> None:
        line = f"{result.status:8}{result.name}, {result.seconds:.1f} s"
        if result.figure is not None and result.bound is not None:
            line += f": {format_number(result.figure)} {result.unit}, at most {format_number(result.bound)}"
        style = {"passed": "green", "failed": "bold red", "skipped": "yellow"}[result.status]
        console.print(line, style=style, markup=False, highlight=False)
        for line in result.details:
            console.print(f"        {line}", style="dim", markup=False, highlight=False)

    with status if status is not None else nullcontext(), unwinding_signals():
        report = checks.run(device=options.device, only=options.only, on_start=on_start, on_result=on_result)
    if options.json:
        user_path(options.json, "--json").write_text(report.to_json(), encoding="utf-8")
    console.print(f"\n{report.device}", markup=False, highlight=False)
    console.print(report.table())
    console.print(report.summary(), markup=False, highlight=False)
    return report.exit_status
