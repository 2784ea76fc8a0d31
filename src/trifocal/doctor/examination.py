"""The whole examination, one thing after another; each is announced before it begins."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trifocal._version import __version__
from trifocal.doctor import machine, probes
from trifocal.doctor.findings import Finding
from trifocal.doctor.needs import DECODED_LENGTHS, EFFICIENCY, USABLE_SHARE, Machine, Need, need_of
from trifocal.runlog import hardware
from trifocal.train.run_config import RunConfig

# All else takes a few seconds; together they stay under half a minute.
COMPILE_SECONDS = 17.0


@dataclass(frozen=True)
class Examination:
    """The result of an examination.

    Attributes:
        findings: About the machine.
        needs: Of the configurations.
        asked: Names of configurations that were asked for by name: if one cannot run, something is broken.
    """

    findings: tuple[Finding, ...]
    needs: tuple[Need, ...]
    asked: tuple[str, ...] = ()

    @property
    def broken(self) -> list[str]:
        """The faults that stop training, in words."""
        found = [f"{finding.name}: {finding.text}" for finding in self.findings if finding.status == "broken"]
        for need in self.needs:
            if need.name in self.asked and (need.problem or need.fits is False):
                found.append(f"{need.name}: {need.problem or 'it does not fit'}")
        return found

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
            "needs": [{**asdict(need), "memory_bytes": need.memory.total} for need in self.needs],
            "usable_share_of_memory": USABLE_SHARE,
            "cached_sequences_are_of_tokens": DECODED_LENGTHS,
            "step_seconds_are": f"an estimate: computed FLOPs over {EFFICIENCY} of the measured speed of products",
        }


def examine(
    configs: Mapping[str, RunConfig],
    run_directory: Path,
    *,
    asked: tuple[str, ...] = (),
    on_start: Callable[[str], None] = lambda what: None,
) -> Examination:
    """Examine the machine and the configurations.

    Args:
        configs: Configurations by name.
        run_directory: Where runs would be written.
        asked: Names among `configs` that must be able to run here.
        on_start: Called with the name of each part as it begins.
    """
    on_start("torch.compile, in the background")
    compiling = probes.CompileProbe(needed=any(configs[name].train.compile for name in asked))
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
    compiled = compiling.result(COMPILE_SECONDS)
    # After it, as both use all cores.
    on_start("the speed of products")
    rates, finding = _rates(findings)
    findings += [compiled, finding]
    on_start("needs of the configurations")
    here = Machine.here(rates)
    needs = tuple(need_of(name, config, here) for name, config in configs.items())
    return Examination(tuple(findings), needs, asked)


def _rates(findings: list[Finding]) -> tuple[dict[str, float], Finding]:
    """Speed of products by precision, and the finding about it."""
    usable = torch.cuda.is_available()
    if usable and any(f.name.startswith("gpu") and f.status == "broken" for f in findings):
        return {}, Finding("speed", "note", "not measured: a GPU does not compute")
    device = torch.device("cuda" if usable else "cpu")
    rates = {precision: hardware.matmul_rate(device, precision) for precision in ("fp32", "bf16")}
    text = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {precision}" for precision, rate in rates.items())
    return rates, Finding("speed", "ok", f"large products: {text}")
