"""An examination for people: tables on a terminal, plain lines elsewhere."""

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trifocal.doctor.examination import Examination
from trifocal.doctor.needs import DECODED_LENGTHS, EFFICIENCY, USABLE_SHARE, Need

_STYLES = {"ok": "green", "note": "yellow", "broken": "bold red"}


def show(examination: Examination, console: Console) -> None:
    """Print everything: as tables where the console is a terminal, else a line for each thing."""
    if console.is_terminal:
        console.print(_findings(examination))
        # Under the table, not in its cells: a command that is to be copied may not be broken across lines.
        for finding in examination.findings:
            if finding.remedy:
                _plain(console, f"  {finding.name}: {finding.remedy}")
        if examination.needs:
            console.print(_needs(examination))
            for need in examination.needs:
                _plain(console, f"  {need.name}: {_decoding(need)}")
                for change in _changes(need):
                    _plain(console, f"  {need.name}: {change}")
    else:
        for line in _lines(examination):
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


def _needs(examination: Examination) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, title="Needs of each configuration here", title_justify="left")
    for heading in ("configuration", "parameters", "on", "memory", "fits", "step", "whole run", "disk"):
        number = heading in ("parameters", "memory", "step", "whole run", "disk")
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for need in examination.needs:
        verdict = _verdict(need)
        style = "green" if verdict == "yes" else "bold red"
        table.add_row(
            escape(need.name), count(need.parameters), _where(need), size(need.memory.total), f"[{style}]{verdict}[/]",
            f"~{duration(need.step_seconds)}", f"~{duration(need.run_seconds)}", size(need.disk_bytes),
        )  # fmt: skip
    return table


def _lines(examination: Examination) -> Iterator[str]:
    for finding in examination.findings:
        mend = f"; to mend it: {finding.remedy}" if finding.remedy else ""
        yield f"{finding.status:6} {finding.name}: {finding.text}{mend}"
    for need in examination.needs:
        parts = [
            f"{count(need.parameters)} parameters on {_where(need)}",
            f"{size(need.memory.total)} of memory, fullest in the {need.memory.moment}: fits: {_verdict(need)}",
            f"about {duration(need.step_seconds)} a step, {duration(need.run_seconds)} in all",
            f"{size(need.disk_bytes)} of disk",
            _decoding(need),
            *_changes(need),
        ]
        yield f"needs  {need.name}: {'; '.join(parts)}"


def _closing(examination: Examination) -> Iterator[str]:
    if examination.needs:
        yield (
            f"Memory is by formula, for the fullest device; it fits under {USABLE_SHARE:.0%} of the free memory. "
            "Times are estimates: the operations that a step computes, at a share of the measured speed of large "
            f"products ({EFFICIENCY['cuda']:.0%} on a GPU, {EFFICIENCY['cpu']:.0%} on a CPU). Expect them to be off by "
            "a factor of two or three."
        )
    broken = examination.broken
    if not broken:
        yield "Nothing stops training here."
        return
    yield "One thing stops training:" if len(broken) == 1 else f"{len(broken)} things stop training:"
    for line in broken:
        yield f"  {line}"


def _decoding(need: Need) -> str:
    """The caches of `trifocal generate`."""
    text = f"generate caches {need.cache_token_bytes:,} bytes a token"
    if need.cached_sequences is None:
        return text
    pairs = zip(need.cached_sequences, DECODED_LENGTHS, strict=True)
    return f"{text}: " + " or ".join(f"{count:,} sequences of {length:,} tokens" for count, length in pairs) + " fit"


def _changes(need: Need) -> list[str]:
    """The problem of a configuration here, and the flags that help."""
    remedy = "" if need.remedy and need.remedy in need.problem else need.remedy
    return [part for part in (need.problem, remedy, need.advice) if part]


def _verdict(need: Need) -> str:
    if need.fits is None:
        return "unknown"
    return "yes" if need.fits else "no"


def _where(need: Need) -> str:
    shared = f"{need.processes} GPUs, {need.mode}, " if need.processes > 1 else ""
    return f"{shared}{need.backend}"


def size(number: int) -> str:
    """Bytes for people."""
    return f"{number / 2**30:.1f} GiB" if number >= 0.1 * 2**30 else f"{number / 2**20:.0f} MiB"


def count(number: int) -> str:
    """A number of parameters for people."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def duration(seconds: float | None) -> str:
    """A time for people, without more digits than they need."""
    if seconds is None:
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * length or unit == "s":
            number, unit = (seconds / length, unit) if seconds >= 1 else (seconds * 1000, "ms")
            return f"{number:,.0f} {unit}" if number >= 10 else f"{number:.1f} {unit}"
    raise AssertionError("every time has a unit")
