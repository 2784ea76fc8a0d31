"""Memory of this process, on the device that trains."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch


class MemoryStatistics(NamedTuple):
    """Bytes in use. On CUDA the caching allocator's figures; on a CPU the process's resident set."""

    allocated_bytes: int
    reserved_bytes: int | None
    """Memory that the caching allocator holds from the driver; None on a CPU."""
    peak_allocated_bytes: int


def memory_statistics(device: torch.device | str) -> MemoryStatistics:
    """Read the memory in use, without synchronising the device.

    Args:
        device: Device of the model: a CUDA device, or any other for the process's resident memory.

    Returns:
        The figures, in bytes.
    """
    device = torch.device(device)
    if device.type == "cuda":
        statistics = torch.cuda.memory_stats(device)
        return MemoryStatistics(
            statistics.get("allocated_bytes.all.current", 0),
            statistics.get("reserved_bytes.all.current", 0),
            statistics.get("allocated_bytes.all.peak", 0),
        )
    resident = resident_bytes()
    # The system updates its peak lazily, so it may lag behind.
    return MemoryStatistics(resident, None, max(resident, peak_resident_bytes()))


def resident_bytes() -> int:
    """Resident memory of this process, in bytes; without /proc, its peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_resident_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far, in bytes; 0 if unknown."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
