"""Checks of distributed training: two processes train as one does, over gloo on a CPU, over NCCL on two GPUs."""

import dataclasses
import itertools
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
_REPORTED = tuple(itertools.product(REPORTED_LAYERS, (False, True)))
# Both sides add up the same numbers in another order, and a dozen layers pass the rounding on.
BOUND = 64 * torch.finfo(torch.float32).eps

_SWITCHES = tuple(itertools.product((False, True), (1, 2)))
DDP_CASES = (
    *(Case("ddp", checkpointing=recompute, accumulation=count) for recompute, count in _SWITCHES),
    *(Case("ddp", num_layers=layers, checkpointing=recompute) for layers, recompute in _REPORTED),
    Case("ddp", num_layers=12, checkpointing=True, static_graph=True),
    Case("ddp", num_layers=12, checkpointing=True, find_unused=True),
    Case("ddp", accumulation=2, static_graph=True),
    Case("ddp", accumulation=2, after=True),
    Case("ddp", accumulation=2, steps=5),
    Case("ddp", accumulation=2, after=True, steps=5),
)
"""Among them the cases reported not to work: 5 and 12 layers, checkpointing, a static graph, unused parameters."""
SHARDED_CASES = (
    *(Case("fsdp", checkpointing=recompute, accumulation=count) for recompute, count in _SWITCHES),
    *(Case("fsdp", num_layers=layers, checkpointing=recompute) for layers, recompute in _REPORTED),
    Case("fsdp", checkpointing=True, reshard=False),
    Case("fsdp", accumulation=2, steps=5),
    *(Case("hsdp", shards=shards, checkpointing=True, accumulation=2) for shards in (1, 2)),
    *(Case("hsdp", shards=shards, accumulation=2, steps=5) for shards in (1, 2)),
)


def ddp_gradients(device: torch.device, *, prepare: str = "") -> Measurement:
    """Two processes under DDP compute the gradient of one, for every parameter, also in the cases reported broken.

    The figure is the worst difference, relative to the largest entry of its gradient. After five optimizer steps it is
    the number of parameters that differ by a bit between the processes, or did not move. Bound: 64 roundings of fp32.
    The reported cases stand below by name.
    """
    return _worst(DDP_CASES, device, prepare)


def sharded_gradients(device: torch.device, *, prepare: str = "") -> Measurement:
    """The same under FSDP2 and hybrid sharding, with the bound of `ddp_gradients`."""
    return _worst(SHARDED_CASES, device, prepare)


def _worst(cases: Sequence[Case], device: torch.device, prepare: str) -> Measurement:
    found = measure(cases, device, prepare)
    # The largest comes first, and a NaN before any number.
    ranked = sorted(zip(found, cases, strict=True), key=lambda row: (row[0][0] == row[0][0], -row[0][0]))
    (figure, name), case = ranked[0]
    detail = f"{len(cases)} cases, {_place(device)}; worst: {name} ({case.name})"
    reported = [
        f"{case.name}: {difference:.2g}"
        for (difference, _), case in zip(found, cases, strict=True)
        if case.num_layers in REPORTED_LAYERS
    ]
    return Measurement(figure, BOUND, "difference", (detail, *reported))


def measure(cases: Sequence[Case], device: torch.device, prepare: str = "") -> list[tuple[float, str]]:
    """Start the processes, and read their figures.

    Args:
        cases: The cases.
        device: GPUs are used where there are enough.
        prepare: See `process_worker.main`.

    Returns:
        For each case a figure and a parameter's name.

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


def _place(device: torch.device) -> str:
    return f"{PROCESSES} GPUs over NCCL" if _over_nccl(device) else f"{PROCESSES} processes on the CPU over gloo"
