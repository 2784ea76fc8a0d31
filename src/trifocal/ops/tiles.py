"""Tile sizes of the kernels, as measured. Nothing here needs Triton."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifocal.ops import devices


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient of two positive numbers, rounded up. Triton's can be called in kernels too and takes 3 µs."""
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not less than a positive number; as quick as `cdiv`."""
    return 1 << (number - 1).bit_length()


class Tile(NamedTuple):
    """One configuration of an attention kernel; a limit of registers fits another program on the multiprocessor."""

    BLOCK_M: int
    BLOCK_N: int
    warps: int
    stages: int
    registers: int | None = None


class SelectedTile(NamedTuple):
    """One configuration of a kernel of selected attention; a piece has slots only in the block-major order."""

    BLOCK_M: int
    warps: int
    stages: int
    piece_slots: int = 0
    registers: int | None = None


class Widths(NamedTuple):
    """A head dim, `size`, as one or two power-of-two parts, 192 as 128 + 64: the first at least 16, as a matrix unit
    takes, the second 0 when one is enough.
    """

    size: int
    part_1: int
    part_2: int

    @property
    def padded(self) -> int:
        """Columns that a tile holds."""
        return self.part_1 + self.part_2


@functools.cache
def split_width(size: int) -> Widths:
    """Cover `size` columns with one power of two, or 129 to 192 of them with 128 and 64; with second parts of 16
    columns, kernels of Triton 3.6 on an H200 gave wrong products in 16-bit types and read beyond their tensors.
    """
    whole = max(16, next_power_of_2(size))
    return Widths(size, 128, 64) if 128 < size <= 192 else Widths(size, whole, 0)


@functools.cache
def named_widths(**sizes: int) -> dict[str, int]:
    """Constants of kernels: of each NAME its size and, as NAME_1 and NAME_2, the parts that cover it."""
    names = ("", "_1", "_2")
    return {name + part: n for name, size in sizes.items() for part, n in zip(names, split_width(size), strict=True)}


# Columns of the wider of q and v up to which a configuration holds -> the configuration, first fit. fp32 multiplies
# on the ordinary units, exactly, so its tiles are small. Rows "hopper" of 64, 128 and 192 columns: the fastest of
# several on an H200 (`benchmarks/kernels.py`).
_TILES: dict[tuple[str, str], dict[int, Tile]] = {
    ("hopper", "forward"): {
        64: Tile(64, 32, 4, 3),
        128: Tile(128, 64, 8, 2, 128),
        192: Tile(64, 64, 4, 2),
        256: Tile(128, 64, 8, 2),
    },
    ("hopper", "d_q"): {
        64: Tile(64, 32, 4, 3, 128),
        128: Tile(64, 64, 4, 2),
        192: Tile(128, 64, 8, 2),
        256: Tile(64, 64, 8, 2),
    },
    ("hopper", "dkdv"): {
        64: Tile(128, 64, 4, 2),
        128: Tile(64, 128, 8, 2),
        192: Tile(32, 64, 4, 2),
        256: Tile(32, 64, 8, 2),
    },
    ("ampere", "forward"): {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 4, 2)},
    ("ampere", "d_q"): {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 4, 2)},
    ("ampere", "dkdv"): {64: Tile(64, 64, 4, 2), 128: Tile(32, 64, 8, 2), 256: Tile(16, 32, 4, 2)},
    ("small", "forward"): {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(32, 16, 4, 2)},
    ("small", "d_q"): {64: Tile(64, 32, 4, 2), 128: Tile(32, 32, 4, 2), 256: Tile(16, 16, 4, 2)},
    ("small", "dkdv"): {64: Tile(32, 64, 4, 2), 128: Tile(16, 32, 4, 2), 256: Tile(16, 16, 4, 2)},
    ("fp32", "forward"): {64: Tile(32, 32, 4, 2), 128: Tile(16, 32, 4, 2), 256: Tile(16, 16, 4, 2)},
    ("fp32", "d_q"): {64: Tile(16, 32, 4, 2), 128: Tile(16, 16, 4, 2), 256: Tile(16, 16, 4, 1)},
    ("fp32", "dkdv"): {64: Tile(16, 32, 4, 2), 128: Tile(16, 16, 4, 2), 256: Tile(16, 16, 4, 1)},
}
# The window's keys are seen by few rows: smaller key tiles waste fewer of them.
_WINDOW_TILES: dict[tuple[str, str], dict[int, Tile]] = {("hopper", "dkdv"): {128: Tile(64, 64, 4, 2)}}
# Kernels of `hopper`: by kernel, whether it is the window's, and columns of q, the fastest of several. At 64
# columns the portable kernels, with several programs on a multiprocessor, are as fast or faster, but for the
# window's d_k and d_v. Wider keys leave registers for fewer rows.
HOPPER_INTERVAL: dict[tuple[str, bool], dict[int, dict[str, Any]]] = {
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
HOPPER_IMPORTANCE: dict[int, dict[str, int]] = {128: {"k_stages": 2, "stack": 1}, 192: {"k_stages": 1, "stack": 2}}


def _columns(*tensors: Tensor) -> int:
    """Columns of the widest of these [*, D], as a tile holds them."""
    return max(split_width(x.shape[-1]).padded for x in tensors)


def interval_tile(kernel: str, q: Tensor, v: Tensor, *, window: bool) -> Tile:
    """The tile of the compressed or window branch's portable kernel `"forward"`, `"d_q"` or `"dkdv"`."""
    row, columns = _row_of(q), _columns(q, v)
    most, tile = next((most, tile) for most, tile in _TILES[row, kernel].items() if columns <= most)
    return _WINDOW_TILES.get((row, kernel), {}).get(most, tile) if window else tile


LARGEST_BLOCK = 64
"""Larger selection blocks are cut into equal parts of at most this many tokens, each with its own slot."""


def largest_block_of_backward(q: Tensor, v: Tensor) -> int:
    """Tokens of a selection block that backward holds at a time: half as many where wide sums would leave registers."""
    wide = _columns(q, v) > 128 and devices.architecture(q.device) != "hopper"
    return LARGEST_BLOCK // 2 if wide else LARGEST_BLOCK


def selected_tile(kernel: str, q: Tensor, v: Tensor, q_per_kv: int, *, on_hopper: bool) -> SelectedTile:
    """The tile of a kernel of selected attention, named by its order and its pass, such as `"masked forward"`."""
    columns, architecture = _columns(q, v), devices.architecture(q.device)
    if on_hopper:
        return _hopper_selected_tile(kernel, q_per_kv, columns)
    if q.dtype == torch.float32:
        # Exact products run on the ordinary units, fully unrolled: large tiles would spill.
        return _selected_fp32(kernel, max(16, next_power_of_2(q_per_kv)))
    hopper = architecture == "hopper"
    if kernel in ("masked forward", "tile forward"):
        if columns <= 64 and kernel == "tile forward" and q_per_kv < 8:
            return SelectedTile(64, warps=4, stages=3, registers=168 if hopper else None)
        if columns <= 64:
            return SelectedTile(128, warps=8, stages=3, registers=128 if hopper else None)
        return SelectedTile(128 if hopper else 64, warps=8, stages=2 if columns > 128 else 3)
    if kernel == "block_major forward":
        return SelectedTile(64, warps=4, stages=2 if columns > 128 else 3, piece_slots=512 // q_per_kv)
    if kernel == "block_major backward":
        if columns > 128:
            return SelectedTile(64, warps=8, stages=1, piece_slots=256)
        warps, stages = (4, 2) if hopper else (8, 2 if columns > 64 and architecture == "ampere" else 1)
        return SelectedTile(64, warps, stages, piece_slots=max(256, 2048 // q_per_kv))
    if kernel == "masked dkdv":
        if hopper:
            return SelectedTile(64, warps=8 if columns > 128 else 4, stages=1)
        return SelectedTile(32 if columns > 128 else 64, warps=8, stages=2)
    assert kernel in ("masked d_q", "tile d_q"), kernel
    if columns <= 64:
        return SelectedTile(64, warps=4, stages=3, registers=168) if hopper else SelectedTile(64, warps=8, stages=2)
    if not hopper:
        return SelectedTile(32, warps=4, stages=2)
    if columns <= 128:
        return SelectedTile(64, warps=4, stages=2)
    # Tiles of 256 columns spill in two stages a quarter of what they spill in one.
    return SelectedTile(64, warps=8, stages=2 if kernel == "tile d_q" else 1)


def _selected_fp32(kernel: str, rows: int) -> SelectedTile:
    if kernel == "masked forward":
        return SelectedTile(32, warps=8, stages=1)
    if kernel in ("masked dkdv", "masked d_q", "tile forward", "tile d_q"):
        return SelectedTile(16, warps=8, stages=1)
    if kernel == "block_major backward":
        return SelectedTile(rows, warps=8, stages=1, piece_slots=128)
    return SelectedTile(rows, warps=4, stages=1, piece_slots=64)


def _hopper_selected_tile(kernel: str, q_per_kv: int, columns: int) -> SelectedTile:
    pieces = 0
    if kernel == "block_major forward":
        pieces = 1024 // q_per_kv
    if kernel == "block_major backward":
        # Narrow tiles take less time each, beside which a piece's own sums are to stay small.
        pieces = max(256 if columns > 64 else 512, 2048 // q_per_kv)
    return SelectedTile(64, warps=4, stages=1, piece_slots=pieces)


def importance_tile(q: Tensor, q_per_kv: int) -> Tile:
    """The tile of the portable importance kernel; `BLOCK_M` counts queries and `BLOCK_N` compressed blocks."""
    if q.dtype == torch.float32:
        return Tile(32, 32, warps=4, stages=1)
    hopper = devices.architecture(q.device) == "hopper"
    if _columns(q) > 128 or not hopper:
        return Tile(64, 64, warps=4 if hopper else 8, stages=2)
    return Tile(64, 128 if q_per_kv > 2 else 64, warps=4, stages=3 if q_per_kv > 4 else 2)


def index_tile(q_idx: Tensor) -> Tile:
    """The tile of the index scores; `BLOCK_M` counts rows, a query and group each."""
    columns = _columns(q_idx)
    if q_idx.dtype == torch.float32:
        return Tile(32, 64, warps=8, stages=1)
    return Tile(128, 64, warps=4 if columns <= 64 else 8, stages=3 if columns <= 128 else 2)


# As `_TILES`, for decoding: rows are few, and what counts is how many keys are on their way from memory. `stages` less
# one tiles of keys and values fit beside one another, three times on a multiprocessor; where a tile is a whole unit, a
# program asks for all of it at once.
_DECODE_TILES: dict[str, dict[int, Tile]] = {
    "hopper": {
        64: Tile(16, 128, 4, 2, 168),
        128: Tile(16, 64, 4, 3, 168),
        192: Tile(16, 64, 4, 3),
        256: Tile(16, 32, 4, 3),
    },
    # Shorter pipelines and fewer registers leave room for more programs: 9 % of a layer of 32 x 65,536 tokens with 4
    # groups of 128 columns, 12 % of one of 64 x 65,536 with 2 groups of 64.
    "hopper scores": {
        64: Tile(16, 256, 8, 2, 128),
        128: Tile(16, 64, 4, 2, 128),
        192: Tile(16, 64, 4, 3),
        256: Tile(16, 32, 4, 3),
    },
    # A long past keeps a pipeline busy.
    "hopper dense": {
        64: Tile(16, 128, 4, 3, 168),
        128: Tile(16, 64, 4, 3, 168),
        192: Tile(16, 64, 4, 3),
        256: Tile(16, 32, 4, 3),
    },
    "ampere": {64: Tile(16, 64, 4, 4, 168), 128: Tile(16, 64, 4, 3, 168), 256: Tile(16, 32, 4, 3)},
    "small": {64: Tile(16, 64, 4, 3, 168), 128: Tile(16, 32, 4, 3, 168), 256: Tile(16, 32, 4, 2)},
    "fp32": {64: Tile(16, 32, 4, 2), 128: Tile(16, 32, 4, 2), 256: Tile(16, 16, 4, 2)},
}
# Most rows of a tile, and most of its scores, so that they fit the registers of eight warps.
_DECODE_MAX_ROWS, _DECODE_MAX_SCORES = 64, 64 * 128
# Keys that decoding adds up one after the other in any case, and such units of a group; see `decode.triton.common`.
DECODE_UNIT = 256
DECODE_GROUP = 4


def decode_tile(q: Tensor, v: Tensor, rows: int, kernel: str) -> Tile:
    """The tile of a decoding kernel, `"scores"`, `"attend"` or `"dense"`; any number of rows has the same `BLOCK_N`."""
    row, columns = _row_of(q), _columns(q, v)
    widths = _DECODE_TILES.get(f"{row} {kernel}", _DECODE_TILES[row])
    tile = next(tile for most, tile in widths.items() if columns <= most)
    if rows <= tile.BLOCK_M:
        return tile
    # More accumulators need more registers.
    most_rows = min(_DECODE_MAX_ROWS, _DECODE_MAX_SCORES // tile.BLOCK_N, next_power_of_2(rows))
    return tile._replace(
        BLOCK_M=most_rows, warps=8 if most_rows == _DECODE_MAX_ROWS else max(4, tile.warps), registers=None
    )


def _row_of(q: Tensor) -> str:
    """The row of a table: fp32, or the architecture of the device."""
    return "fp32" if q.dtype == torch.float32 else devices.architecture(q.device)
