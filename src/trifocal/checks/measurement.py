"""The results of checks: one measurement each, and a report of all."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich import box
from rich.table import Table

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Measurement:
    """The finding of one check on this machine.

    Attributes:
        figure: The measured value; passes if it is a number and at most `bound`.
        bound: The largest value allowed; the check's docstring derives it.
        unit: Of both.
        details: Lines for a person: further figures, the worst case's name.
    """

    figure: float
    bound: float
    unit: str
    details: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return math.isfinite(self.figure) and self.figure <= self.bound


@dataclass(frozen=True)
class Skipped:
    """Why a check could not run here."""

    reason: str


@dataclass(frozen=True)
class CheckResult:
    """One row of the report.

    Attributes:
        name: As `--only` takes it.
        guards: The failures, as `trifocal.checks.registry` numbers them, that the check guards against.
        what: The property that it proves, in a few words.
        status: "passed", "failed" or "skipped". A check that raises has failed.
        figure, bound, unit: See `Measurement`; None where there is none.
        details: Lines for a person; the reason of a skip or an error.
        seconds: Its duration.
    """

    name: str
    guards: tuple[int, ...]
    what: str
    status: Status
    figure: float | None
    bound: float | None
    unit: str
    details: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Report:
    """The results of a run of checks, on one device."""

    device: str
    results: tuple[CheckResult, ...]
    environment: dict[str, Any]

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.status == "failed")

    @property
    def exit_status(self) -> int:
        """0 if nothing failed, else 1."""
        return 1 if self.failed else 0

    def table(self) -> Table:
        """All results, at most 80 columns wide; `guards` are the failures that `trifocal.checks.registry` numbers."""
        table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("check", no_wrap=True)
        table.add_column("guards", no_wrap=True)
        table.add_column("figure", justify="right", no_wrap=True)
        table.add_column("bound", justify="right", no_wrap=True)
        table.add_column("unit", no_wrap=True)
        table.add_column("result", no_wrap=True)
        for result in self.results:
            table.add_row(
                result.name,
                ",".join(map(str, result.guards)),
                "" if result.figure is None else format_number(result.figure),
                "" if result.bound is None else f"≤ {format_number(result.bound)}",
                result.unit,
                _STATUS_MARKUP[result.status],
            )
        return table

    def summary(self) -> str:
        """Numbers of passed, failed and skipped checks, in one line."""
        counts = {status: sum(result.status == status for result in self.results) for status in _STATUSES}
        seconds = sum(result.seconds for result in self.results)
        return ", ".join(f"{count} {status}" for status, count in counts.items()) + f" in {seconds:.0f} s"

    def to_json(self) -> str:
        """Everything, as JSON; figures that are not finite are strings."""
        rows = [
            {
                key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in asdict(result).items()
            }
            for result in self.results
        ]
        content = {
            "device": self.device,
            "exit_status": self.exit_status,
            "results": rows,
            "environment": self.environment,
        }
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


_STATUS_MARKUP = {"passed": "[green]passed[/]", "failed": "[bold red]FAILED[/]", "skipped": "[yellow]skipped[/]"}
_STATUSES: tuple[Status, ...] = ("passed", "failed", "skipped")


def format_number(value: float) -> str:
    """A number as the table shows it: whole ones whole, others with three digits."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.3g}"
