"""Configurations of the Hopper kernels, as measured on an H200; `ops.dispatch` takes them from here. Nothing here needs
Triton."""

from typing import Any

from trifocal.ops.tiles import SelectedTile

# By kernel, whether it is the window's, and columns of q: the fastest of several (`benchmarks/kernels.py`). At 64
# columns the portable kernels, with several programs on a multiprocessor, are as fast or faster, but for the
# window's d_k and d_v. Wider keys leave registers for fewer rows.
INTERVAL: dict[tuple[str, bool], dict[int, dict[str, Any]]] = {
    ("forward", False): {128: {"keys": 128}, 192: {"keys": 128}},
    ("forward", True): {128: {"keys": 64}, 192: {"keys": 64}},
    ("d_q", False): {128: {"keys": 64}, 192: {"keys": 64}},
    ("d_q", True): {128: {"keys": 64}, 192: {"keys": 64}},
    ("dkdv", False): {128: {"rows": 64, "stages": 3, "ahead": True}, 192: {"rows": 32, "stages": 2}},
    ("dkdv", True): {
        64: {"rows": 64, "stages": 3, "ahead": True},
        128: {"rows": 64, "stages": 2},
        192: {"rows": 32, "stages": 2},
    },
}
# By columns of q: tiles of keys in shared memory for each part of a program, and tiles of queries that a program takes
# before other keys.
IMPORTANCE: dict[int, dict[str, int]] = {128: {"k_stages": 2, "stack": 1}, 192: {"k_stages": 1, "stack": 2}}


def selected_tile(kernel: str, q_per_kv: int, columns: int) -> SelectedTile:
    """The tile of a kernel of selected attention; arguments as for `ops.tiles.selected_tile`."""
    pieces = 0
    if kernel == "block_major forward":
        pieces = max(64, 1024 // q_per_kv)
    if kernel == "block_major backward":
        # Narrow tiles take less time each, beside which a piece's own sums are to stay small.
        pieces = max(256 if columns > 64 else 512, 2048 // q_per_kv)
    return SelectedTile(64, warps=4, stages=1, piece_slots=pieces)
