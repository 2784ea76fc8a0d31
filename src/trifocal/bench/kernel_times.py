"""`trifocal bench kernels`: how long each kernel of one attention call takes on the GPU.

It times what the dispatch rules choose. To try another kernel or configuration, change the rule and run it again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from trifocal.bench.inputs import DTYPES, make_inputs
from trifocal.bench.kernels import Kernel, kernel_table, record_kernels
from trifocal.bench.parity import check_parity
from trifocal.bench.recorder import Recorder, Refused, Unavailable, failure
from trifocal.bench.shapes import AttentionShape, named_shapes
from trifocal.errors import UserError
from trifocal.ops import Geometry, nsa_attention
from trifocal.train.preflight import choose_device

Direction = Literal["forward", "backward"]

NOTES = (
    "Device time of each kernel in one attention call, the mean over the profiled calls; random inputs.",
    "Direction backward is a training call without its forward: the kernels that run between the two.",
)


@dataclass(frozen=True, kw_only=True)
class KernelsOptions:
    """Time every kernel of one attention call on a GPU; refuses to time wrong results."""

    shapes: tuple[str, ...] = ("A", "B", "C", "D")
    """Shapes by name: A, B, C, D, P8k, P16k, P32k, P64k; P is the last four."""
    geometry: Geometry = field(default_factory=Geometry)
    """Block sizes, in tokens."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of the inputs."""
    calls: int = 5
    """Calls to profile, after three to warm up."""
    most: int = 20
    """Kernels to list for each shape and direction; the rest is one row."""
    seconds: float = 600.0
    """Time limit of the whole; rows that it leaves out are listed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; "auto" takes a GPU if there is one. There is nothing to profile on a CPU."""
    name: str = "kernels"
    """Of the result files."""
    output: str = ""
    """Folder of the result files; benchmarks/results in a checkout, else the current folder."""
    commit: str = ""
    """The commit to write down, for a tree without its history."""

    def __post_init__(self) -> None:
        for name in ("calls", "most"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not self.seconds > 0:
            raise UserError(f"--seconds must be positive, got {self.seconds}")


def bench_kernels(options: KernelsOptions, recorder: Recorder) -> None:
    """Measure every shape; rows are in `recorder.rows`.

    Raises:
        UserError: If the device is not a GPU.
    """
    shapes, device = named_shapes(options.shapes), choose_device(options.device)
    if device.type != "cuda":
        raise UserError("bench kernels profiles GPU kernels, and there is no CUDA device here")
    for shape in shapes:
        recorder.say(f"{shape.name}: {shape.batch} x {shape.tokens}, {shape.heads}/{shape.groups} heads")
        for row in shape_rows(options, shape, device, recorder):
            recorder.keep(row)


def shape_rows(
    options: KernelsOptions, shape: AttentionShape, device: torch.device, recorder: Recorder
) -> list[dict[str, Any]]:
    """The rows of one shape: a kernel each, or one that says why there are none."""
    labels: dict[str, Any] = {"shape": shape.name, "batch": shape.batch, "tokens": shape.tokens}
    if not recorder.remaining_seconds():
        return [{**labels, "status": f"not run: the limit of {options.seconds:g} s has passed"}]
    try:
        check_parity(shape, options.geometry, device, DTYPES[options.dtype], "auto")
        calls = _calls(options, shape, device)
        recorded = {direction: _profile(call, options.calls, device) for direction, call in calls.items()}
    except Unavailable as reason:
        return [{**labels, "status": f"not available: {reason}"}]
    except Refused as reason:
        return [{**labels, "status": f"refused: {reason}"}]
    except Exception as error:
        return [{**labels, "status": failure(error)}]
    return [
        {**labels, "direction": direction, **_renamed(row), "status": "ok"}
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


def _profile(call: Callable[[], object], calls: int, device: torch.device) -> list[Kernel]:
    for _ in range(3):
        call()

    def work() -> None:
        for _ in range(calls):
            call()

    return record_kernels(work, device)


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `kernel_table`, a step being a call here."""
    return {
        "kernel": row["kernel"],
        "launches": row["calls_a_step"],
        "ms": row["ms_a_step"],
        "us_a_launch": row["us_a_call"],
    }
