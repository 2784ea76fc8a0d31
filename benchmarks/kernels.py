"""The time of each kernel of one attention call on the GPU.

    python benchmarks/kernels.py --shapes A D
    python benchmarks/kernels.py --shapes A B C D --choices real smooth --teaching 64

It times the kernels that the dispatch rules choose. To try another kernel or configuration, change the rule.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from lib.block_choices import Choices, make_choice, one_branch_call, whole_call
from lib.choice_problem import ChoiceProblem, check_choice_parity, check_index, random_index
from lib.kernel_trace import Kernel, kernel_table, record_kernels
from lib.parity import check_parity
from lib.recorder import Recorder
from lib.script import Benchmark, BenchOptions
from lib.shapes import DTYPES, AttentionShape, make_inputs, named_shapes
from trifocal.errors import UserError
from trifocal.ops import Geometry

NOTES = (
    "Device time of each kernel in one attention call, the mean over the profiled calls; random inputs. Random choices "
    "are the attention's own; smooth and real ones are given, and what chooses (scoring, the index) runs beside.",
    "Direction backward is a training call without its forward: the kernels that run between the two.",
)


@dataclass(frozen=True, kw_only=True)
class KernelsOptions(BenchOptions):
    """Time every kernel of one attention call on a GPU; refuses to time wrong results."""

    shapes: tuple[str, ...] = ("A", "B", "C", "D", "E")
    """Shapes by name: A to G, P8k, P16k, P32k, P64k; P is the last four."""
    rows: tuple[Literal["whole", "one_branch"], ...] = ("whole", "one_branch")
    """Attention: whole, NSA from compressed keys and gates; one_branch, selected attention with an index."""
    choices: tuple[Choices, ...] = ("random",)
    """Choices of blocks: random (from random inputs), smooth (drifting slowly), real (a pretrained model's, up to 8,192
    tokens)."""
    geometry: Geometry = field(default_factory=Geometry)
    """Block sizes, in tokens."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of the inputs."""
    calls: int = 5
    """Calls to profile, after three to warm up."""
    most: int = 20
    """Kernels to list for each shape and direction; the rest is one row."""
    teaching: int = 0
    """Also time the loss that teaches an index, of one query in n; 0: not."""

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
        rows = [(row.replace("_", " "), choices) for choices in options.choices for row in options.rows]
        for row, choices in [*rows, *([("choice loss", "")] if options.teaching else [])]:
            figures = partial(_rows, options, shape, device, row, choices)
            recorder.measure_rows({**labels, "row": row, "choices": choices}, figures)


def _rows(
    options: KernelsOptions, shape: AttentionShape, device: torch.device, row: str, choices: Choices
) -> list[dict[str, Any]]:
    """The kernels of one shape, row and kind of choices: a row for each, in forward and in backward."""
    _check(row, shape, options.geometry, device, DTYPES[options.dtype])
    attend, leaves = _call(options, shape, device, row, choices)
    o = attend(*leaves)
    d_o = torch.randn_like(o)

    def forward() -> object:
        with torch.set_grad_enabled(row == "choice loss"):
            return attend(*leaves)

    def backward() -> object:
        return torch.autograd.grad(o, leaves, d_o, retain_graph=True)

    return [
        {"direction": direction.__name__, **figures}
        for direction in (forward, backward)
        for figures in kernel_table(_profile(direction, options.calls, device), options.calls, options.most)
    ]


@cache
def _check(row: str, *problem: Any) -> None:
    """Refuse to time wrong results; once for all choices."""
    for check in {"whole": [check_parity], "one branch": [check_parity, check_index]}.get(row, [check_choice_parity]):
        check(*problem)


def _call(
    options: KernelsOptions, shape: AttentionShape, device: torch.device, row: str, choices: Choices
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """What a row calls, and with what."""
    geometry, dtype = options.geometry, DTYPES[options.dtype]
    if row == "choice loss":
        problem = ChoiceProblem.draw(shape, geometry, device, dtype, options.teaching)
        return lambda *_: problem.loss()[0], problem.index
    inputs = make_inputs(shape, geometry, device, dtype).leaves()
    choice = make_choice(choices, inputs, geometry)
    if row == "whole":
        return whole_call(inputs, geometry, choice), tuple(inputs)
    attend = one_branch_call(random_index(shape, device, dtype), geometry, choice)
    return attend, (inputs.q, inputs.k_slc, inputs.v_slc)


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
        "shape": "shape", "row": "row", "choices": "choices", "direction": "direction", "kernel": "kernel",
        "launches": "launches", "ms": "ms", "us_a_launch": "µs a launch", "status": "status",
    },
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(KERNELS.main())
