"""What every kernel shares: how widths split into tiles, which configuration a device takes, loads of tiles.

Rows. The heads of a group read the same keys, so a tile's rows are (query, head of the group) pairs: row
`r` is query `r // R`, head `r % R`, with R heads a group. A key or value tile is then loaded once for all of them,
whatever R is, and no row is padding except behind the last query.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.triton.launch import next_power_of_2, own_device

# Exponentials are to base 2: scores are multiplied by this.
LOG2_E = math.log2(math.e)
LOG2_E_KERNEL = tl.constexpr(LOG2_E)
LN_2 = tl.constexpr(math.log(2.0))
# A running maximum starts at a finite low, so that no guard against inf - inf is needed.
LOWEST = tl.constexpr(-1.0e30)


class Tile(NamedTuple):
    """One configuration of an attention kernel.

    Attributes:
        rows: (query, head) pairs in a tile.
        keys: Keys in a tile.
        warps: Warps of a program.
        stages: Depth of the software pipeline of loads.
        registers: Most registers a thread may take, to fit another program on the multiprocessor; None: as it comes.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


class Widths(NamedTuple):
    """A head dim as one or two power-of-two parts: 192 is 128 + 64 instead of 256, 100 is one part of 128.

    Attributes:
        size: The dim itself.
        part_1: First part, at least 16: the least that a matrix unit takes.
        part_2: Second part; 0 when one part is enough.
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
    """Cover `size` columns with one power of two, or 129 to 192 of them with 128 and 64.

    Narrower second parts are not taken: with one of 16 columns, kernels of Triton 3.6 on an H200 gave wrong products
    in 16-bit types and read beyond their tensors, while what the masked columns of one part cost is small.
    """
    whole = max(16, next_power_of_2(size))
    return Widths(size, 128, 64) if 128 < size <= 192 else Widths(size, whole, 0)


_properties = functools.cache(torch.cuda.get_device_properties)
_capability = functools.cache(torch.cuda.get_device_capability)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on a device."""
    return _properties(own_device(device)).shared_memory_per_block_optin


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 for the interpreter's CPU."""
    device = own_device(device)
    return _properties(device).multi_processor_count if device.type == "cuda" else 1


def architecture(device: torch.device) -> str:
    """Which row of a configuration table a device takes: by its matrix units and its shared memory.

    `"hopper"`: sm_90 and newer with more than 200 KiB; `"ampere"`: more than 150 KiB; `"small"`: the rest.
    """
    device = own_device(device)
    if device.type != "cuda":
        return "hopper"
    capability = _capability(device)
    available = shared_memory(device)
    if capability[0] >= 9 and available > 200 * 1024:
        return "hopper"
    return "ampere" if available > 150 * 1024 else "small"


# Columns of the wider of q and v up to which a configuration holds -> the configuration, first fit. fp32 multiplies
# on the ordinary units, exactly, so its tiles are small. Rows "hopper" of 64, 128 and 192 columns: the fastest of
# several on an H200 (`trifocal bench kernels`).
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
    ("hopper", "d_k_d_v"): {
        64: Tile(128, 64, 4, 2),
        128: Tile(64, 128, 8, 2),
        192: Tile(32, 64, 4, 2),
        256: Tile(32, 64, 8, 2),
    },
    ("ampere", "forward"): {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 4, 2)},
    ("ampere", "d_q"): {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 4, 2)},
    ("ampere", "d_k_d_v"): {64: Tile(64, 64, 4, 2), 128: Tile(32, 64, 8, 2), 256: Tile(16, 32, 4, 2)},
    ("small", "forward"): {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(32, 16, 4, 2)},
    ("small", "d_q"): {64: Tile(64, 32, 4, 2), 128: Tile(32, 32, 4, 2), 256: Tile(16, 16, 4, 2)},
    ("small", "d_k_d_v"): {64: Tile(32, 64, 4, 2), 128: Tile(16, 32, 4, 2), 256: Tile(16, 16, 4, 2)},
    ("fp32", "forward"): {64: Tile(32, 32, 4, 2), 128: Tile(16, 32, 4, 2), 256: Tile(16, 16, 4, 2)},
    ("fp32", "d_q"): {64: Tile(16, 32, 4, 2), 128: Tile(16, 16, 4, 2), 256: Tile(16, 16, 4, 1)},
    ("fp32", "d_k_d_v"): {64: Tile(16, 32, 4, 2), 128: Tile(16, 16, 4, 2), 256: Tile(16, 16, 4, 1)},
}
# The window's keys are seen by few rows: smaller key tiles waste fewer of them.
_WINDOW_TILES: dict[tuple[str, str], dict[int, Tile]] = {("hopper", "d_k_d_v"): {128: Tile(64, 64, 4, 2)}}


def choose_tile(kernel: str, q: Tensor, v: Tensor, *, window: bool) -> Tile:
    """The configuration of `"forward"`, `"d_q"` or `"d_k_d_v"` for these tensors: fixed, never measured at run time."""
    row = "fp32" if q.dtype == torch.float32 else architecture(q.device)
    columns = max(split_width(q.shape[-1]).padded, split_width(v.shape[-1]).padded)
    most, tile = next((most, tile) for most, tile in _TILES[row, kernel].items() if columns <= most)
    return _WINDOW_TILES.get((row, kernel), {}).get(most, tile) if window else tile


def unit_stride(x: Tensor) -> Tensor:
    """Leave strides as they come, but copy what is not contiguous along its last dimension."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def has_copy_engine(device: torch.device) -> bool:
    """Whether a device copies tensor tiles on its own (TMA)."""
    return _generation(device) >= 9


def is_hopper(device: torch.device) -> bool:
    """Whether a device is of the one generation with Hopper's matrix units."""
    return _generation(device) == 9


def _generation(device: torch.device) -> int:
    """The major number of a CUDA device's capability; 0 for others."""
    device = own_device(device)
    return _capability(device)[0] if device.type == "cuda" else 0


def tma_fits(*tensors: Tensor) -> bool:
    """Whether the tensor copy engine of this device, if it has one, can read these: 16-byte alignment everywhere.

    fp32 stays with pointers: its small tiles gain nothing.
    """
    if not has_copy_engine(tensors[0].device):
        return False
    for x in tensors:
        if x.dtype == torch.float32 or x.numel() == 0 or x.data_ptr() % 16:
            return False
        size = x.element_size()
        # A loop, since a generator takes longer than what it would go through; short calls wait for this.
        for stride in x.stride()[:-1]:
            if stride * size % 16:
                return False
    return True


def strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, position and head. One batch has none: its value would only force a compilation."""
    batch, time, head = x.stride()[:3]
    return (0 if x.shape[0] == 1 else batch), time, head


@triton.jit
def load_tile(base, offsets, keep, FIRST: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Load columns FIRST to FIRST + PART of the rows at `offsets`; zero past SIZE and, if MASKED, where not `keep`."""
    columns = FIRST + tl.arange(0, PART)
    pointers = base + offsets[:, None] + columns[None, :]
    if MASKED:
        mask = keep[:, None]
        if FIRST + PART > SIZE:
            mask = mask & (columns < SIZE)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif FIRST + PART > SIZE:
        tile = tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(base, offsets, keep, values, FIRST: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr):
    """Store a tile's columns FIRST to FIRST + PART, those under SIZE, of the rows to keep."""
    columns = FIRST + tl.arange(0, PART)
    pointers = base + offsets[:, None] + columns[None, :]
    mask = keep[:, None]
    if FIRST + PART > SIZE:
        mask = mask & (columns < SIZE)[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def nothing_lost(total, a):
    """What a sum of products of `a` has lost to rounding before it began; see `add_product`."""
    # One return: a second one is compiled even where the first is taken.
    lost = 0.0
    if a.dtype == tl.float32:
        lost = tl.zeros_like(total)
    return lost


@triton.jit
def add_product(total, lost, a, b):
    """total + a @ b, and what rounding took from it, for sums over the rows of many tiles.

    In fp32 a chain of additions as long as all rows of all tiles would err more than PyTorch's attention. There a
    tile's products are added up by themselves, and the tiles with Kahan's compensation.
    """
    if a.dtype == tl.float32:
        # Were this an addition to a product, the compiler would draw it into the product.
        product = tl.fma(tl.dot(a, b, input_precision="ieee"), 1.0, -lost)
        larger = total + product
        lost = (larger - total) - product
        total = larger
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total, lost
