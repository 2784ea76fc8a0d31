"""The kernels that a stretch of work runs on a GPU, their times, and the time in which none runs."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_LONGEST_NAME = 90


class Kernel(NamedTuple):
    """One run of a kernel, a copy or a fill on the device; nanoseconds."""

    name: str
    begin: int
    end: int


def record_kernels(work: Callable[[], Any], device: torch.device) -> list[Kernel]:
    """Everything that a call runs on a GPU; only the device is traced, so the host is hardly slower than always."""
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize(device)
    return [
        Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in trace.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA
    ]


def busy_share(kernels: Iterable[Kernel]) -> float:
    """Share of the time, from the first kernel's begin to the last one's end, in which at least one ran."""
    spans = sorted((kernel.begin, kernel.end) for kernel in kernels)
    if not spans:
        return 0.0
    busy, reached = 0, spans[0][0]
    for begin, end in spans:
        busy += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return busy / (reached - spans[0][0])


def kernel_table(kernels: Iterable[Kernel], steps: int, rows: int) -> list[dict[str, Any]]:
    """The kernels with the most time, as means of a step: launches and milliseconds; and the rest as one row."""
    times: defaultdict[str, list[int]] = defaultdict(list)
    for kernel in kernels:
        times[short_name(kernel.name)].append(kernel.end - kernel.begin)
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
    table = [_row(name, durations, steps) for name, durations in ordered[:rows]]
    rest = [duration for _, durations in ordered[rows:] for duration in durations]
    return [*table, _row(f"{len(ordered) - rows} others", rest, steps)] if rest else table


def short_name(name: str) -> str:
    """A kernel's name without its C++ argument list, cut to a table's width."""
    name = re.sub(r"^void ", "", name).replace("(anonymous namespace)::", "").replace("at::native::", "")
    head = name.split("(")[0]
    return (head or name)[:_LONGEST_NAME]


def _row(name: str, durations: list[int], steps: int) -> dict[str, Any]:
    total = sum(durations)
    return {
        "kernel": name,
        "launches": len(durations) / steps,
        "ms": total / steps / 1e6,
        "us_a_launch": total / len(durations) / 1e3,
    }
