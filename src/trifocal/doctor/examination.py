"""The whole examination, one thing after another, and its lines for people."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trifocal._version import __version__
from trifocal.doctor import machine, probes
from trifocal.doctor.machine import Finding
from trifocal.doctor.measured import LIMIT_SECONDS, Need, need_of
from trifocal.train.config.sections import RunConfig


@dataclass(frozen=True)
class Examination:
    """Findings about the machine, and the needs of configurations: if one cannot run, something is broken."""

    findings: tuple[Finding, ...]
    needs: tuple[Need, ...]

    @property
    def broken(self) -> list[str]:
        """The faults that stop training, in words."""
        found = [f"{finding.name}: {finding.text}" for finding in self.findings if finding.status == "broken"]
        return found + [f"{need.name}: {need.problem}" for need in self.needs if need.problem]

    def to_dict(self) -> dict[str, Any]:
        """Plain values; units are in the names."""
        return {
            "trifocal": __version__,
            "healthy": not self.broken,
            "broken": self.broken,
            "findings": [asdict(finding) for finding in self.findings],
            "needs": [asdict(need) for need in self.needs],
        }

    def lines(self) -> Iterator[str]:
        """All of it for people; commands stand at the end of their lines, to be copied."""
        for finding in self.findings:
            fix = f"; to fix it: {finding.remedy}" if finding.remedy else ""
            yield f"{finding.status:6} {finding.name}: {finding.text}{fix}"
        for need in self.needs:
            yield from _need(need)
        if not self.needs:
            yield "trifocal doctor CONFIG.toml measures two steps of a configuration here."
        broken = self.broken
        count = "1 thing stops" if len(broken) == 1 else f"{len(broken)} things stop"
        yield f"{count} training:" if broken else "Nothing stops training here."
        for line in broken:
            yield f"  {line}"


def _need(need: Need) -> Iterator[str]:
    yield (
        f"needs  {need.name}: {need.parameters / 1e6:,.1f} M parameters, {_size(need.state_bytes)} of weights, "
        f"gradients and optimizer, {_size(need.disk_bytes)} of disk for checkpoints"
    )
    if need.peak_bytes is not None and need.step_seconds is not None:
        place = f"{need.processes} x {need.device}" if need.processes > 1 else need.device
        whole = "" if need.memory_bytes is None else f" of {_size(need.memory_bytes)}"
        yield (
            f"  measured on {place}: {_size(need.peak_bytes)}{whole} at its peak, {need.step_seconds:.3g} s a step, "
            f"{need.tokens_per_second:,.0f} tokens/s"
        )
    else:
        yield "  not measured"
    yield from (f"  {line}" for line in (need.data, need.problem) if line)
    yield from (f"  try {remedy}" for remedy in need.remedies)


def _size(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def examine(
    configs: Mapping[str, RunConfig], run_directory: Path, *, on_start: Callable[[str], None] = lambda what: None
) -> Examination:
    """Examine the machine, where runs would be written, and configurations by name; `on_start` gets parts' names."""
    on_start("software and hardware")
    findings = [machine.check_software(), *machine.check_gpus(), machine.check_cpu(), machine.check_compiler()]
    on_start("a kernel")
    findings.append(probes.check_triton())
    on_start(f"the disk at {run_directory}")
    findings.append(probes.check_disk(run_directory))
    needs = []
    for name, config in configs.items():
        on_start(f"two steps of {name}, for {LIMIT_SECONDS:.0f} s at most")
        needs.append(need_of(name, config))
    return Examination(tuple(findings), tuple(needs))
