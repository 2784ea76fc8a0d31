"""The last collectives of this process on NCCL and gloo, from PyTorch's flight recorder.

The recorder is a ring of the last collectives (2,000, or TORCH_FR_BUFFER_SIZE). It costs next to nothing and is always
on; see `trifocal.distributed.processes`.
"""

import logging
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_SHOWN = 30
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collective:
    """One collective or point-to-point operation."""

    library: str
    """nccl or gloo."""
    group: str
    """Number and description of the process group."""
    number: int
    """Sequence number in the group, the same in every process."""
    operation: str
    sizes: str
    """Shapes and types of its inputs."""
    ended: bool
    state: str
    """scheduled, started (NCCL only) or completed."""
    age_seconds: float
    """Time since this process called it."""
    duration_milliseconds: float | None
    """Time on the device, if NCCL measured it."""
    called_at: str
    """The innermost Python frames outside of PyTorch."""


def recorded_collectives() -> list[Collective]:
    """The collectives in the flight recorders of this process, oldest first; empty without process groups."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    module = getattr(torch._C, "_distributed_c10d", None)
    dumps = [getattr(module, name, None) for name in ("_dump_nccl_trace", "_dump_fr_trace")]
    if dumps == [None, None]:
        logger.warning("collectives are left out: torch %s has no flight recorder where it was", torch.__version__)
    found: list[Collective] = []
    for dump in filter(None, dumps):
        # Safe to unpickle: this process has just made it.
        found += decode(pickle.loads(dump()), time.time())
    return sorted(found, key=lambda collective: -collective.age_seconds)


def decode(dump: dict[str, Any], now: float) -> list[Collective]:
    """Read a flight recorder's unpickled dump; `now` is in seconds since the epoch."""
    found = []
    for entry in dump.get("entries", []):
        library, _, operation = entry["profiling_name"].partition(":")
        types = [*entry.get("input_dtypes", []), *[""] * len(entry["input_sizes"])]
        sizes = ", ".join(
            f"{list(size)} {kind}".strip() for size, kind in zip(entry["input_sizes"], types, strict=False)
        )
        ended = bool(entry["retired"]) or entry["state"] == "completed"
        found.append(
            Collective(
                library=library,
                group=" ".join(filter(None, entry["process_group"])),
                number=entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
                operation=operation,
                sizes=sizes,
                ended=ended,
                state="completed" if ended else entry["state"],
                age_seconds=round(now - entry["time_created_ns"] / 1e9, 3),
                duration_milliseconds=entry.get("duration_ms"),
                called_at=_called_at(entry.get("frames") or []),
            )
        )
    return found


def describe(collectives: Sequence[Collective]) -> str:
    """A page of text: the collectives that have not ended, and the last ones of all."""
    lines = ["Collectives that this process has called and that have not ended:", ""]
    lines += [f"  {_line(found)}" for found in collectives if not found.ended] or ["  none"]
    lines += ["", f"The last {_SHOWN} of {len(collectives)} on record, oldest first:", ""]
    return "\n".join([*lines, *(f"  {_line(found)}" for found in collectives[-_SHOWN:]), ""])


def describe_waiting_ranks(last: dict[int, list[Collective]]) -> list[str]:
    """Sentences about ranks that wait for ranks that have not called the last collective of a group."""
    groups = sorted({(found.library, found.group) for of_rank in last.values() for found in of_rank})
    sentences = []
    for key in groups:
        at = {rank: found for rank, of_rank in last.items() for found in of_rank if (found.library, found.group) == key}
        newest = max(at.values(), key=lambda found: found.number)
        waiting = [rank for rank, found in at.items() if found.number == newest.number and not found.ended]
        behind = [rank for rank, found in at.items() if found.number < newest.number]
        if not waiting:
            continue
        what = f"{newest.library}'s {newest.operation} number {newest.number} of group {newest.group}"
        if behind:
            verb = "waits" if len(waiting) == 1 else "wait"
            come = "has" if len(behind) == 1 else "have"
            sentences.append(
                f"{_ranks(waiting).capitalize()} {verb} in {what} for {_ranks(behind)}, which {come} not called it."
            )
        elif len(waiting) == len(at) > 1:
            sentences.append(f"All ranks are in {what}, and it does not end: look at the network and at the devices.")
    return sentences


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _line(found: Collective) -> str:
    took = "" if found.duration_milliseconds is None else f", took {found.duration_milliseconds:.3g} ms"
    return (
        f"{found.library} {found.operation} number {found.number} of group {found.group}: {found.state}, called "
        f"{found.age_seconds:.1f} s ago{took}; {found.sizes or 'no input'}; {found.called_at or 'called by C++ code'}"
    )


def _called_at(frames: Sequence[dict[str, Any]]) -> str:
    """The three innermost Python frames outside of PyTorch."""
    own = [frame for frame in frames if "/torch/" not in frame["filename"].replace("\\", "/")]
    return " < ".join(f"{frame['name']} ({frame['filename'].rpartition('/')[2]}:{frame['line']})" for frame in own[:3])
