"""Memory of this process, on the device that trains."""

import os
import resource
import sys
from pathlib import Path
from typing import NamedTuple

import torch


class MemoryStatistics(NamedTuple):
    """Bytes in use. On CUDA the caching allocator's figures; on a CPU the process's resident set, without `/proc` its
    peak.
    """

    allocated_bytes: int
    reserved_bytes: int | None
    """Memory that the caching allocator holds from the driver; None on a CPU."""
    peak_allocated_bytes: int


def memory_statistics(device: torch.device | str) -> MemoryStatistics:
    """The memory in use on a CUDA device, without synchronising it, or the process's resident memory."""
    device = torch.device(device)
    if device.type == "cuda":
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak")
        statistics = torch.cuda.memory_stats(device)
        return MemoryStatistics(*(statistics.get(name, 0) for name in names))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        resident = peak
    # The system updates its peak lazily, so it may lag behind.
    return MemoryStatistics(resident, None, max(resident, peak))
