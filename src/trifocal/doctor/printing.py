"""An examination for people: tables on a terminal, plain lines elsewhere."""

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trifocal.doctor.examination import Examination
from trifocal.doctor.findings import Finding
from trifocal.doctor.measured import REFERENCE_CARD, REFERENCES, Need

_STYLES = {"ok": "green", "note": "yellow", "broken": "bold red"}


def show(examination: Examination, console: Console) -> None:
    """Print everything: as tables where the console is a terminal, else a line for each thing."""
    if console.is_terminal:
        console.print(_findings(examination))
        # Under the table, not in its cells: a command that is to be copied may not be broken across lines.
        for finding in examination.findings:
            if finding.remedy:
                _plain(console, f"  {finding.name}: {finding.remedy}")
    else:
        for finding in examination.findings:
            _plain(console, _line(finding))
    for need in examination.needs:
        for line in _need(need):
            _plain(console, line)
    if not any(need.device and need.device != "CPU" for need in examination.needs):
        for line in _references(bool(examination.needs)):
            _plain(console, line)
    for line in _closing(examination):
        _plain(console, line)


def _plain(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _findings(examination: Examination) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, title="This machine", title_justify="left")
    for heading in ("what", "", "found"):
        table.add_column(heading, overflow="fold")
    for finding in examination.findings:
        style = _STYLES[finding.status]
        status = f"[{style}]{finding.status}[/]"
        table.add_row(finding.name, status, escape(finding.text))
    return table


def _line(finding: Finding) -> str:
    fix = f"; to fix it: {finding.remedy}" if finding.remedy else ""
    return f"{finding.status:6} {finding.name}: {finding.text}{fix}"


def _need(need: Need) -> Iterator[str]:
    yield (
        f"needs  {need.name}: {count(need.parameters)} parameters, {size(need.state_bytes)} of weights, gradients and "
        f"optimizer, {size(need.disk_bytes)} of disk for checkpoints"
    )
    if need.peak_bytes is not None and need.step_seconds is not None:
        place = f"{need.processes} x {need.device}" if need.processes > 1 else need.device
        of = "" if need.memory_bytes is None else f" of {size(need.memory_bytes)}"
        yield (
            f"  measured on {place}: {size(need.peak_bytes)}{of} at its peak, {duration(need.step_seconds)} a step, "
            f"{need.tokens_per_second:,.0f} tokens/s"
        )
    else:
        yield "  not measured"
    if need.data:
        yield f"  {need.data}"
    if need.problem:
        yield f"  {need.problem}"
    for remedy in need.remedies:
        yield f"  try {remedy}"


def _references(asked: bool) -> Iterator[str]:
    """Figures of the production preset, where no GPU was measured."""
    first = "No GPU was measured here. " if asked else ""
    yield f"{first}The production preset m7c_125m on {REFERENCE_CARD}, measured:"
    for row in REFERENCES:
        yield (f"  {row.what}: {row.peak_gib} GiB a GPU, {row.step_ms} ms a step, {row.tokens_per_second:,} tokens/s")
    if not asked:
        yield "trifocal doctor CONFIG.toml measures two steps of a configuration here."


def _closing(examination: Examination) -> Iterator[str]:
    broken = examination.broken
    if not broken:
        yield "Nothing stops training here."
        return
    yield "One thing stops training:" if len(broken) == 1 else f"{len(broken)} things stop training:"
    for line in broken:
        yield f"  {line}"


def size(number: int) -> str:
    """Bytes for people."""
    return f"{number / 2**30:.1f} GiB" if number >= 0.1 * 2**30 else f"{number / 2**20:.0f} MiB"


def count(number: int) -> str:
    """A number of parameters for people."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def duration(seconds: float) -> str:
    """A time for people, without more digits than they need."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * length or unit == "s":
            number, unit = (seconds / length, unit) if seconds >= 1 else (seconds * 1000, "ms")
            return f"{number:,.0f} {unit}" if number >= 10 else f"{number:.1f} {unit}"
    raise AssertionError("every time has a unit")
