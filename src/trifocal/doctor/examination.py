"""The whole examination, one thing after another; each is announced before it begins."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trifocal._version import __version__
from trifocal.doctor import machine, probes
from trifocal.doctor.findings import Finding
from trifocal.doctor.measured import Need, need_of
from trifocal.train.config.sections import RunConfig

# All else takes a few seconds; together they stay under half a minute.
COMPILE_SECONDS = 17.0


@dataclass(frozen=True)
class Examination:
    """The result of an examination.

    Attributes:
        findings: Findings about the machine.
        needs: Needs of the configurations that were asked for: if one cannot run, something is broken.
    """

    findings: tuple[Finding, ...]
    needs: tuple[Need, ...]

    @property
    def broken(self) -> list[str]:
        """The faults that stop training, in words."""
        found = [f"{finding.name}: {finding.text}" for finding in self.findings if finding.status == "broken"]
        return found + [f"{need.name}: {need.problem}" for need in self.needs if need.problem]

    @property
    def exit_status(self) -> int:
        """0 for a healthy machine, 1 where something stops training."""
        return int(bool(self.broken))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; units are in the names."""
        return {
            "trifocal": __version__,
            "healthy": not self.broken,
            "broken": self.broken,
            "findings": [asdict(finding) for finding in self.findings],
            "needs": [asdict(need) for need in self.needs],
        }


def examine(
    configs: Mapping[str, RunConfig],
    run_directory: Path,
    *,
    on_start: Callable[[str], None] = lambda what: None,
) -> Examination:
    """Examine the machine and the configurations.

    Args:
        configs: Configurations by name, which must be able to run here.
        run_directory: Where runs would be written.
        on_start: Called with the name of each part as it begins.
    """
    on_start("torch.compile, in the background")
    compiling = probes.CompileProbe(needed=any(config.train.compile for config in configs.values()))
    on_start("software and hardware")
    findings = [
        machine.check_torch(),
        *machine.check_gpus(),
        *machine.check_driver(),
        machine.check_cpu(),
        *machine.check_shared_memory(),
        *machine.check_variables(),
        machine.check_compiler(),
    ]
    on_start("a kernel")
    findings.append(probes.check_triton())
    on_start("gloo and NCCL")
    findings += probes.check_collectives()
    on_start(f"the disk at {run_directory}")
    findings.append(probes.check_disk(run_directory))
    findings += machine.check_extras()
    on_start("torch.compile")
    findings.append(compiling.result(COMPILE_SECONDS))
    needs = []
    for name, config in configs.items():
        # After the compiler, as both use all cores.
        on_start(f"two steps of {name}")
        needs.append(need_of(name, config))
    return Examination(tuple(findings), tuple(needs))
