"""The first call of the whole core in a fresh process: `python -m trifocal.bench.first_call` with a request as JSON.

The parent gives the process an empty folder for Triton's cache. The imports of torch and trifocal and the start of the
device are not counted; imports and compilations of the first call itself are.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trifocal.bench.recorder import child_environment, failure
from trifocal.bench.shapes import AttentionShape, make_inputs
from trifocal.bench.timing import synchronized_seconds
from trifocal.ops import Geometry, nsa_attention


def first_calls(
    shapes: Sequence[AttentionShape],
    geometry: Geometry,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    cache: Path,
    timeout_seconds: float,
) -> list[dict[str, Any]]:
    """Seconds of the first forward and the first forward and backward for each shape, all at the same time.

    The processes share one cache, empty at first, so a kernel that two of them need may be compiled by one.

    Args:
        shapes: One a kind.
        geometry: Block sizes, in tokens.
        dtype: Of the inputs.
        device: Where.
        backend: Of the attention.
        cache: An empty folder.
        timeout_seconds: After which a process is ended.

    Returns:
        For each shape `forward_seconds` and `forward_backward_seconds`, or `error`.
    """
    environment = child_environment(TRITON_CACHE_DIR=str(cache))
    processes = []
    for shape in shapes:
        request = {
            "shape": asdict(shape),
            "geometry": asdict(geometry),
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
            "backend": backend,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "trifocal.bench.first_call", json.dumps(request)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        processes.append(process)
    deadline = time.monotonic() + timeout_seconds
    return [_answer(process, deadline) for process in processes]


def _answer(process: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
    try:
        output, errors = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": "not finished in time"}
    with contextlib.suppress(ValueError, IndexError):
        return dict(json.loads(output.splitlines()[-1]))
    return {"error": (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1][:300]}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Time the first call, in the fresh process.

    Args:
        request: `shape`, `geometry`, `dtype`, `device` and `backend`, plain values.
    """
    device, shape = torch.device(request["device"]), AttentionShape(**request["shape"])
    geometry, backend = Geometry(**request["geometry"]), request["backend"]
    inputs = make_inputs(shape, geometry, device, getattr(torch, request["dtype"])).leaves()
    d_o = torch.randn(*inputs.q.shape[:3], shape.value_dim, device=device, dtype=inputs.q.dtype)
    seconds = []
    for with_backward in (False, True):
        begin = synchronized_seconds(device)
        with torch.set_grad_enabled(with_backward):
            o = nsa_attention(*inputs, geometry, backend=backend)
        if with_backward:
            torch.autograd.grad(o, inputs, d_o)
        seconds.append(synchronized_seconds(device) - begin)
    return {"forward_seconds": seconds[0], "forward_backward_seconds": sum(seconds)}


if __name__ == "__main__":
    try:
        print(json.dumps(measure(json.loads(sys.argv[1]))))
    except Exception as error:
        print(json.dumps({"error": failure(error)}))
