"""Deterministic operations: equal bits for equal inputs."""

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def deterministic_operations(wanted: bool) -> Iterator[None]:
    """Inside, every operation gives equal bits for equal inputs; one without a deterministic form on a GPU raises.

    Args:
        wanted: If False, nothing changes.
    """
    if not wanted:
        yield
        return
    # cuBLAS reads it at its first use: with more workspaces, sums could run in another order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    # A debugging aid that costs a pass over every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
