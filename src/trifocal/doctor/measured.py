"""The needs of a configuration on this machine: parameters by count, memory and time of two real steps."""

import re
import signal
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trifocal.doctor.machine import available_memory
from trifocal.errors import UserError, one_line
from trifocal.models import parameter_count
from trifocal.runlog import read_metrics
from trifocal.testing.processes import ProcessesFailed, run_processes
from trifocal.train.config.check import choose_device, disk_bytes, existing_folder, preflight, state_bytes
from trifocal.train.config.load import override
from trifocal.train.config.sections import RunConfig
from trifocal.train.config.toml import to_toml
from trifocal.train.out_of_memory import memory_remedies

LIMIT_SECONDS = 300.0
"""Steps that have not ended by then are stopped."""
_MAX_MICRO_BATCHES = 2
# More steps than are taken, so that no end is saved.
_ONLY_STEPS: dict[str, Any] = {
    "train.steps": 1000,
    "schedule.warmup_steps": 0,
    "log.interval_steps": 1,
    "log.sinks": "",
    "checkpoint.interval_steps": 0,
    "evaluate.interval_steps": 0,
    "log.sample_interval_steps": 0,
    "log.telemetry_interval_steps": 0,
}


@dataclass(frozen=True, kw_only=True)
class Need:
    """The needs of one configuration here; empty or None is what was not measured.

    The state is that of the whole model: weights, gradients and optimizer. The memory is that of one device: the whole
    of a GPU, the available memory of a host. The peak is that of the first device, the step that of the whole global
    batch. `data` are those of the steps, where they are not the config's own; `problem` is why the run would fail.
    """

    name: str
    parameters: int
    state_bytes: int
    disk_bytes: int
    device: str = ""
    processes: int = 1
    memory_bytes: int | None = None
    peak_bytes: int | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    data: str = ""
    problem: str = ""
    remedies: tuple[str, ...] = ()


class _DoesNotFit(Exception):
    """The steps ran out of memory."""


def need_of(name: str, config: RunConfig) -> Need:
    """Count a configuration's parameters, and take two steps on its device: of random tokens if its data fail."""
    need = Need(name=name, parameters=parameter_count(config.model), state_bytes=0, disk_bytes=0)
    try:
        need = replace(need, state_bytes=sum(state_bytes(config)), disk_bytes=disk_bytes(config))
        device = choose_device(config.run.device)
        processes = _processes(config, device)
        preflight(config, device, processes)
    except UserError as error:
        return replace(need, problem=one_line(error))
    gpu = device.type == "cuda"
    need = replace(
        need,
        device=torch.cuda.get_device_name(device) if gpu else "CPU",
        processes=processes,
        memory_bytes=torch.cuda.mem_get_info(device)[1] if gpu else available_memory(),
    )
    try:
        try:
            return _measured(need, config)
        except UserError as error:
            # If random tokens train, the data are at fault.
            need = replace(need, problem=one_line(error))
            need = _measured(need, replace(config, data=config.data.only("synthetic")))
            return replace(need, data=f"measured on random tokens, as {config.data.name} cannot be read")
    except _DoesNotFit as error:
        problem = need.problem or f"the memory does not suffice: {one_line(error)}"
        return replace(need, problem=problem, remedies=tuple(memory_remedies(config, processes)))
    except UserError:
        return need
    except RuntimeError as error:
        return replace(need, problem=need.problem or one_line(error))


def _measured(need: Need, config: RunConfig) -> Need:
    """Take steps with the real trainer in a temporary folder, in processes that the system may end for their memory."""
    train = config.train
    # A third micro-batch takes no more memory than the second. Two steps, or one more where code is compiled or
    # recorded; the last one is timed.
    groups = config.parallel.groups(need.processes)
    at_once = train.sequences_at_once(groups)
    batch = min(train.global_batch_size, _MAX_MICRO_BATCHES * at_once * groups)
    count = 3 if train.compile or train.cuda_graphs else 2
    with tempfile.TemporaryDirectory(
        prefix=".trifocal-doctor-", dir=existing_folder(Path(config.run.directory))
    ) as name:
        folder = Path(name)
        metrics = folder / "run" / "metrics.jsonl"
        sizes = {"train.global_batch_size": batch, "train.micro_batch_size": at_once}
        flags = {"run.directory": str(metrics.parent), **sizes, **_ONLY_STEPS}
        (folder / "config.toml").write_text(to_toml(override(config, flags)), encoding="utf-8")

        def ended() -> bool:
            return metrics.exists() and len(read_metrics(metrics, "train")) >= count

        try:
            arguments = ["-m", "trifocal", "train", str(folder / "config.toml")]
            run_processes(arguments, need.processes, folder, limit_seconds=LIMIT_SECONDS, until=ended)
        except ProcessesFailed as failed:
            if not failed.statuses:
                raise RuntimeError(f"{count} steps did not end in {LIMIT_SECONDS:.0f} s on this machine") from None
            if found := re.search(r"out of memory \((.*)\); try", str(failed)):
                raise _DoesNotFit(found[1]) from None
            if -signal.SIGKILL in failed.statuses:
                raise _DoesNotFit("the system ended the process") from None
            if 2 in failed.statuses:
                text = (folder / "error0").read_text(errors="replace").strip().rpartition("\n")[2]
                raise UserError(text.removeprefix("trifocal: ")) from None
            raise
        row = read_metrics(metrics, "train")[-1]
    return replace(
        need,
        peak_bytes=row["memory_peak_bytes"],
        step_seconds=row["step_seconds"] * train.global_batch_size / batch,
        tokens_per_second=row["tokens_per_second"],
    )


def _processes(config: RunConfig, device: torch.device) -> int:
    """Processes that would share the work here, as rows and batch allow: one a GPU, and at least those of a row."""
    context = config.parallel.context
    count = torch.cuda.device_count() if device.type == "cuda" else context
    groups = config.parallel.groups(count)
    if not groups:
        return count
    # Each group has its own rows.
    whole = config.train.global_batch_size % groups == 0
    return groups * context if config.parallel.mode != "none" and whole else context
