"""The check of distributed training: two processes train as one does, over gloo on a CPU, over NCCL on two GPUs."""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from trifocal.checks.measurement import Measurement
from trifocal.checks.process_worker import Case
from trifocal.testing.processes import run_processes

PROCESSES = 2
LIMIT_SECONDS = 180.0
REPORTED_LAYERS = (5, 12)
"""Depths at which distributed training was reported not to work."""
# Both sides add up the same numbers in another order, and a dozen layers pass the rounding on.
BOUND = 64 * torch.finfo(torch.float32).eps

CASES = (
    *(
        Case("ddp", num_layers=layers, checkpointing=recompute)
        for layers in REPORTED_LAYERS
        for recompute in (False, True)
    ),
    Case("ddp", num_layers=12, checkpointing=True, static_graph=True),
    Case("ddp", num_layers=12, checkpointing=True, find_unused=True),
    Case("ddp", checkpointing=True, accumulation=2),
    Case("ddp", accumulation=2, static_graph=True),
    Case("ddp", accumulation=2, after=True),
    *(Case("fsdp", num_layers=layers, checkpointing=True) for layers in REPORTED_LAYERS),
    Case("fsdp", accumulation=2),
    Case("fsdp", checkpointing=True, reshard=False),
    Case("ddp", context=2, checkpointing=True, accumulation=2),
    Case("ddp", context=2, after=True),
    Case("fsdp", context=2, checkpointing=True),
    *(Case("hsdp", shards=shards, checkpointing=True, accumulation=2) for shards in (1, 2)),
)
"""Among them the cases reported not to work: 5 and 12 layers, checkpointing, a static graph, unused parameters."""


def parallel_gradients(device: torch.device, *, prepare: str = "") -> Measurement:
    """Two processes under DDP, FSDP2 and hybrid sharding compute the gradient of one, for every parameter; with rows of
    their own, and where they share each row.

    The figure is the worst difference, relative to the largest entry of its gradient; infinite where a gradient differs
    by a bit between the processes. Bound: 64 roundings of fp32. The reported cases stand below by name.
    """
    found = measure(CASES, device, prepare)
    # The largest comes first, and a NaN before any number.
    ranked = sorted(zip(found, CASES, strict=True), key=lambda row: (row[0][0] == row[0][0], -row[0][0]))
    (figure, name), case = ranked[0]
    place = f"{PROCESSES} GPUs over NCCL" if _over_nccl(device) else f"{PROCESSES} processes on the CPU over gloo"
    reported = [
        f"{case.name}: {difference:.2g}"
        for (difference, _), case in zip(found, CASES, strict=True)
        if case.num_layers in REPORTED_LAYERS
    ]
    detail = f"{len(CASES)} cases, {place}; worst: {name} ({case.name})"
    return Measurement(figure, BOUND, "difference", (detail, *reported))


def measure(cases: Sequence[Case], device: torch.device, prepare: str = "") -> list[tuple[float, str]]:
    """Start the processes, and read a figure and a parameter's name for each case.

    Args:
        cases: The cases.
        device: GPUs are used where there are enough.
        prepare: See `process_worker.main`.

    Raises:
        ProcessesFailed: If a process fails, or they do not end in time.
    """
    kind = "cuda" if _over_nccl(device) else "cpu"
    with tempfile.TemporaryDirectory(prefix="trifocal-check-") as folder:
        path = Path(folder) / "found.json"
        fields = [dataclasses.asdict(case) for case in cases]
        arguments = f"{kind!r}, {fields!r}, {str(path)!r}, {prepare!r}"
        code = f"from trifocal.checks.process_worker import main; main({arguments})"
        run_processes(["-c", code], PROCESSES, Path(folder), limit_seconds=LIMIT_SECONDS)
        return [(float(figure), name) for figure, name in json.loads(path.read_text(encoding="utf-8"))]


def _over_nccl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.device_count() >= PROCESSES
