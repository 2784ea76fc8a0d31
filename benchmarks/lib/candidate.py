"""One thing to time, and its figures."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lib.formulas import Work
from lib.timing import device_ms, extra_peak_bytes, time_call

GIB = 2**30


class Candidate(NamedTuple):
    """A call to time: `attend` makes o, [B, T, H, V], of its leaves; the note says how it differs from others."""

    attend: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    work: Work
    note: str = ""


def measure_candidate(
    candidate: Candidate, d_o: Tensor, direction: str, device: torch.device, budget_seconds: float
) -> dict[str, Any]:
    """The figures of one row."""
    work, attend = candidate.work, candidate.attend
    leaves = tuple(x.detach() for x in candidate.leaves)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*leaves)

    timing = time_call(forward, device, budget_seconds=budget_seconds)
    row: dict[str, Any] = {
        "forward_ms": timing.median_ms,
        "forward_p20_ms": timing.p20_ms,
        "forward_p80_ms": timing.p80_ms,
        "forward_calls": timing.calls,
        "forward_device_ms": device_ms(forward, device, budget_seconds=budget_seconds),
        "forward_extra_peak_gib": _gib(extra_peak_bytes(forward, device)),
        "forward_tflop": work.forward_flops / 1e12,
        "forward_tflop_per_second": work.forward_flops / timing.median_ms / 1e9,
        "forward_gib": work.forward_bytes / GIB,
        "first_call_seconds": timing.first_seconds,
    }
    if direction == "forward" or not work.backward_flops:
        return row
    trained = tuple(x.clone().requires_grad_() for x in leaves)

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*trained), trained, d_o)

    both = time_call(forward_backward, device, budget_seconds=budget_seconds)
    flops = work.forward_flops + work.backward_flops
    return row | {
        "first_call_seconds": timing.first_seconds + both.first_seconds,
        "backward_ms": both.median_ms - timing.median_ms,
        "forward_backward_ms": both.median_ms,
        "forward_backward_p20_ms": both.p20_ms,
        "forward_backward_p80_ms": both.p80_ms,
        "forward_backward_calls": both.calls,
        "forward_backward_device_ms": device_ms(forward_backward, device, budget_seconds=budget_seconds),
        "forward_backward_extra_peak_gib": _gib(extra_peak_bytes(forward_backward, device)),
        "forward_backward_tflop": flops / 1e12,
        "forward_backward_tflop_per_second": flops / both.median_ms / 1e9,
        "forward_backward_gib": (work.forward_bytes + work.backward_bytes) / GIB,
    }


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB
