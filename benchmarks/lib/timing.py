"""Time and memory of a call; on a GPU by the device's clock."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# Written before every timed call on a GPU, so that no call finds its inputs in the L2 cache; larger than any L2.
_FLUSH_BYTES = 2**28
# No GPU counts faster than this.
_MAX_CYCLES_PER_SECOND = 3e9

Call = Callable[[], Any]


class Timing(NamedTuple):
    """Milliseconds of one call: the median, the spread from the 20th to the 80th percentile, and the number of calls.

    `first_seconds` is the time of the first call, compilation included.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    calls: int
    first_seconds: float = 0.0

    @classmethod
    def of(cls, times_ms: list[float]) -> "Timing":
        """Summarise at least one time."""
        if len(times_ms) == 1:
            return cls(times_ms[0], times_ms[0], times_ms[0], 1)
        fifths = statistics.quantiles(times_ms, n=5, method="inclusive")
        return cls(statistics.median(times_ms), fifths[0], fifths[-1], len(times_ms))


def time_call(
    call: Call, device: torch.device, *, budget_seconds: float, minimum_calls: int = 5, maximum_calls: int = 100
) -> Timing:
    """Time a call again and again, after two that warm it up.

    On a GPU each call is timed between two events, after its cache was flushed.
    """
    begin = synchronized_seconds(device)
    call()
    first_seconds = synchronized_seconds(device) - begin
    estimate = _times_ms(call, device, 1)[0]
    calls = int(budget_seconds * 1000 / max(estimate, 1e-3))
    timing = Timing.of(_times_ms(call, device, max(minimum_calls, min(maximum_calls, calls))))
    return timing._replace(first_seconds=first_seconds)


def device_ms(call: Call, device: torch.device, *, budget_seconds: float, calls: int = 20) -> float | None:
    """Milliseconds that a call, which has run before, keeps the device busy, the median; None on a CPU.

    The device is held up until the host has handed over the whole call. So this is the time of a call where the host is
    ahead, as in a recorded step; `time_call` gives the time of a call by itself.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call()
    host_seconds = time.perf_counter() - begin
    torch.cuda.synchronize(device)
    each = 2 * host_seconds + time.perf_counter() - begin
    times = _times_ms(call, device, max(3, min(calls, int(budget_seconds / each))), hold_seconds=2 * host_seconds)
    return statistics.median(times)


def extra_peak_bytes(call: Call, device: torch.device) -> int | None:
    """Most memory that a call needs at a time beyond what was in use before it, its results included; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def synchronized_seconds(device: torch.device) -> float:
    """The clock once the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_gib(device: torch.device) -> float | None:
    """Most memory that was allocated at a time since the last reset; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def recorded(step: Call, device: torch.device) -> Call:
    """The step as a CUDA graph; on a CPU the step itself."""
    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # Kernels must be compiled before the recording.
        step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()

    return replay


def _times_ms(call: Call, device: torch.device, calls: int, hold_seconds: float = 0.0) -> list[float]:
    times = []
    if device.type != "cuda":
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1000)
        return times
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for begin_event, end_event in events:
        flush.zero_()
        if hold_seconds:
            torch.cuda._sleep(int(hold_seconds * _MAX_CYCLES_PER_SECOND))
        begin_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize(device)
    return [begin_event.elapsed_time(end_event) for begin_event, end_event in events]
