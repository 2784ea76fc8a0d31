"""How many threads a command computes with: on a CPU as many as other programs leave cores for, beside a GPU one.

Threads wait for each other by spinning. Where another program runs on a core, all wait for the thread that it holds up,
and a step takes 2 to 10 times as long as with fewer threads. Beside a GPU the host has little to compute, and several
trainings on one GPU share its cores. Who sets one of `VARIABLES` decides instead.
PyTorch is imported where it is used: its import, which takes a second, is the time of the first look at the load.
"""

import functools
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_SECONDS = 1.0
# Looks in a row that must find free cores before there are more threads.
_LOOKS_BEFORE_MORE = 3


class Load(NamedTuple):
    """Seconds so far: on the clock, of work of the usable cores, and of this process's share in it."""

    clock: float
    work: float
    own: float


def read_load() -> Load | None:
    """The load until now; None where the system does not tell."""
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except (AttributeError, OSError):
        return None
    # user, nice, system, irq, softirq and steal, without idle and iowait (proc(5)).
    ticks = sum(sum(map(int, (*row[1:4], *row[6:9]))) for row in lines if row[0] in cores)
    return Load(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


def core_quota() -> float:
    """The cores' worth of time that a container gives; infinite without a bound."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf


def free_cores(before: Load, now: Load, cores: int, quota: float) -> int:
    """Cores that other programs, and a container's quota, left between two loads, to the nearest whole; 1 at least."""
    others = (now.work - before.work - (now.own - before.own)) / (now.clock - before.clock)
    return max(1, int(min(cores - max(0.0, others), quota) + 0.5))


@functools.cache
def load_at_start() -> Load | None:
    """The load when this was first called: `main` does, so that the first look comes before the first computation."""
    return read_load()


class Threads:
    """Follows the load with the number of threads; one beside a GPU. `fixed` keeps it: results may depend on it."""

    def __init__(self, device: "torch.device", *, fixed: bool = False) -> None:
        import torch

        chosen = any(name in os.environ for name in VARIABLES)
        if device.type != "cpu" and not chosen:
            torch.set_num_threads(1)
        self._most = torch.get_num_threads()
        fixed = fixed or device.type != "cpu" or chosen or self._most == 1
        self._before = None if fixed else load_at_start()
        self._free_looks, self._said = 0, False

    def look(self) -> str:
        """Choose anew, once a second, between two pieces of work; the first change returns a sentence, all else ""."""
        if self._before is None or time.monotonic() - self._before.clock < _SECONDS:
            return ""
        import torch

        before, self._before = self._before, read_load()
        if self._before is None:
            return ""
        number, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        wanted = min(free_cores(before, self._before, cores, core_quota()), self._most)
        self._free_looks = self._free_looks + 1 if wanted > number else 0
        if wanted == number or 0 < self._free_looks < _LOOKS_BEFORE_MORE:
            return ""
        # At most halved, so that programs that all follow the load come to share the cores.
        torch.set_num_threads(max(wanted, number // 2))
        if self._said:
            return ""
        self._said = True
        return (
            f"computes with {torch.get_num_threads()} of {self._most} CPU threads, as many as cores are free, and "
            f"follows that number; OMP_NUM_THREADS={self._most} keeps all"
        )

    def say(self) -> None:
        """Look, and print the sentence."""
        if sentence := self.look():
            print(f"note: {sentence}", file=sys.stderr)
