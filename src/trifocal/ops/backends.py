"""Which code runs an operation: chosen before it runs, by rule, and counted.

The rules of `auto`, in order:
1. tensors that are not on a CUDA device take the reference;
2. what the Triton kernels support (`trifocal.ops.triton.unsupported_reason`) takes them;
3. everything else takes the reference.
A named backend runs or raises; nothing is replaced behind a caller's back.
"""

from collections import Counter
from typing import Literal

from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.triton import unsupported_reason

Backend = Literal["auto", "reference", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "triton")

_choices: Counter[tuple[str, str, str]] = Counter()


def backend_choices() -> dict[tuple[str, str, str], int]:
    """How often each (operation, backend, reason) was chosen in this process so far."""
    return dict(_choices)


def resolve(
    operation: str, requested: str, q: Tensor, v: Tensor, geometry: Geometry | None, scale: float | None = None
) -> str:
    """Choose the backend of one call and count the choice.

    Args:
        operation: Name of the public function.
        requested: `"auto"`, `"reference"` or `"triton"`.
        q: Queries, [B, T, H, D]; their device, dtype and shape decide.
        v: Values, [B, *, G, V].
        geometry: Block sizes; None for an operation that has none.
        scale: Factor on the scores; None for the default one.

    Raises:
        ValueError: If the name is unknown, or the backend cannot run these inputs; the message says why.
    """
    check_backend(requested)
    if requested == "reference":
        chosen, reason = "reference", "asked for"
    elif requested == "auto" and q.device.type != "cuda":
        chosen, reason = "reference", "the tensors are not on a CUDA device"
    else:
        obstacle = unsupported_reason(q, v, geometry, scale)
        if requested == "triton":
            if obstacle:
                raise ValueError(f"backend 'triton' cannot run {operation} here: {obstacle}")
            chosen, reason = "triton", "asked for"
        else:
            chosen, reason = ("reference", obstacle) if obstacle else ("triton", "supported")
    count_choice(operation, chosen, reason)
    return chosen


def check_backend(requested: str) -> None:
    """Raise ValueError unless there is a backend of this name."""
    if requested not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {requested!r}")


def count_choice(operation: str, chosen: str, reason: str) -> None:
    """Count one choice; compiled code counts when it is compiled, not when it runs."""
    _choices[operation, chosen, reason] += 1


# Not a side effect of the compiled graph, which activation checkpointing inside one would refuse. This is all that
# `torch.compiler.assume_constant_result` does, after importing the compiler, and Triton with it.
count_choice._dynamo_marked_constant = True  # type: ignore[attr-defined]
