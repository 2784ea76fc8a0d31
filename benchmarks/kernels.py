"""The time of each kernel of one attention call on the GPU.

    python benchmarks/kernels.py --shapes A D
    python benchmarks/kernels.py --shapes A B C D --teaching 64

It times the kernels that the dispatch rules choose. To try another kernel or configuration, change the rule.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from lib.choice_problem import ChoiceProblem, check_choice_parity
from lib.kernel_trace import Kernel, kernel_table, record_kernels
from lib.parity import check_parity
from lib.recorder import Recorder
from lib.script import Benchmark, BenchOptions
from lib.shapes import DTYPES, AttentionShape, make_inputs, named_shapes
from trifocal.errors import UserError
from trifocal.ops import Geometry, nsa_attention

NOTES = (
    "Device time of each kernel in one attention call, the mean over the profiled calls; random inputs.",
    "Direction backward is a training call without its forward: the kernels that run between the two.",
)


@dataclass(frozen=True, kw_only=True)
class KernelsOptions(BenchOptions):
    """Time every kernel of one attention call on a GPU; refuses to time wrong results."""

    shapes: tuple[str, ...] = ("A", "B", "C", "D")
    """Shapes by name: A, B, C, D, P8k, P16k, P32k, P64k; P is the last four."""
    geometry: Geometry = field(default_factory=Geometry)
    """Block sizes, in tokens."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of the inputs."""
    calls: int = 5
    """Calls to profile, after three to warm up."""
    most: int = 20
    """Kernels to list for each shape and direction; the rest is one row."""
    teaching: int = 0
    """Also time the choice by an index and the loss that teaches it, of one query in n; 0: neither."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("calls", "most")
        if self.teaching < 0:
            raise UserError(f"teaching must be at least 0, got {self.teaching}")


def bench_kernels(options: KernelsOptions, recorder: Recorder) -> None:
    """Measure every shape; rows are in `recorder.rows`."""
    shapes, device = named_shapes(options.shapes), options.torch_device
    if device.type != "cuda":
        raise UserError("kernels.py profiles GPU kernels, and there is no CUDA device here")
    for shape in shapes:
        recorder.say(f"{shape.name}: {shape.batch} x {shape.tokens}, {shape.heads}/{shape.groups} heads")
        labels = {"shape": shape.name, "batch": shape.batch, "tokens": shape.tokens}
        recorder.measure_rows(labels, partial(_shape_rows, options, shape, device))


def _shape_rows(options: KernelsOptions, shape: AttentionShape, device: torch.device) -> list[dict[str, Any]]:
    """The figures of one shape: a row for each kernel."""
    check_parity(shape, options.geometry, device, DTYPES[options.dtype])
    calls = _calls(options, shape, device)
    if options.teaching:
        check_choice_parity(shape, options.geometry, device, DTYPES[options.dtype])
        calls |= _choice_calls(options, shape, device)
    recorded = {direction: _profile(call, options.calls, device) for direction, call in calls.items()}
    return [
        {"direction": direction, **row}
        for direction, kernels in recorded.items()
        for row in kernel_table(kernels, options.calls, options.most)
    ]


def _calls(options: KernelsOptions, shape: AttentionShape, device: torch.device) -> dict[str, Callable[[], object]]:
    """A call without gradients, and a backward pass whose forward has run."""
    inputs = make_inputs(shape, options.geometry, device, DTYPES[options.dtype])

    def forward() -> object:
        with torch.no_grad():
            return nsa_attention(*inputs, options.geometry)

    leaves = inputs.leaves()
    o = nsa_attention(*leaves, options.geometry)
    d_o = torch.randn_like(o)

    def backward() -> object:
        return torch.autograd.grad(o, list(leaves), d_o, retain_graph=True)

    return {"forward": forward, "backward": backward}


def _choice_calls(
    options: KernelsOptions, shape: AttentionShape, device: torch.device
) -> dict[str, Callable[[], object]]:
    """The choice by an index, and forward and backward of the loss that teaches it."""
    problem = ChoiceProblem.draw(shape, options.geometry, device, DTYPES[options.dtype], options.teaching)
    loss, _ = problem.loss()
    return {
        "index choice": problem.choose,
        "choice loss, forward": problem.loss,
        "choice loss, backward": lambda: torch.autograd.grad(loss, problem.index, retain_graph=True),
    }


def _profile(call: Callable[[], object], calls: int, device: torch.device) -> list[Kernel]:
    for _ in range(3):
        call()

    def work() -> None:
        for _ in range(calls):
            call()

    return record_kernels(work, device)


KERNELS = Benchmark(
    "kernels",
    KernelsOptions,
    bench_kernels,
    NOTES,
    {
        "shape": "shape", "direction": "direction", "kernel": "kernel", "launches": "launches", "ms": "ms",
        "us_a_launch": "µs a launch", "status": "status",
    },
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(KERNELS.main())
