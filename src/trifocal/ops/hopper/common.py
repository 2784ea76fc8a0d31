"""Shared by the Hopper kernels: descriptors, tiles in shared memory and their products, shares of a group's heads."""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma, warpgroup_mma

from trifocal.ops.tiles import Widths
from trifocal.ops.triton.launch import Descriptor, describe_tiles

# Rows, or keys, that four warps hold.
PART_ROWS = gl.constexpr(64)
# Made once: it takes as long as the rest of a descriptor, on the host.
TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def _renamed(owner: Any, name: str, before: str) -> Any:
    """A function that Triton 3.8 or 3.9 renamed. A release may keep the earlier name and refuse it in a kernel."""
    return getattr(owner, name if hasattr(owner, name) else before)


tma_load = _renamed(tma, "async_load", "async_copy_global_to_shared")
tma_store = _renamed(tma, "async_store", "async_copy_shared_to_global")
async_load = _renamed(async_copy, "async_load", "async_copy_global_to_shared")
reinterpret = _renamed(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")

# fmt: off

@gluon.jit
def copy_tile(sources, batch, row, head, ready, tiles, place, D_1: gl.constexpr, D_2: gl.constexpr):
    """Ask for one tile of q or k, all columns: a second part, if there is one, lies in shared memory by itself."""
    tma_load(sources[0], [batch, row, head, 0], ready, tiles[0].index(place))
    if D_2 > 0:
        tma_load(sources[1], [batch, row, head, D_1], ready, tiles[1].index(place))


@gluon.jit
def multiply(
    a_tiles, a_place, b_tiles, b_place, zeros,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr,
):
    """Begin a tile of q and k's product, or k's and q's."""
    a = a_tiles[0].index(a_place).reshape([A_ROWS, D_1])
    b = b_tiles[0].index(b_place).reshape([B_ROWS, D_1])
    product = warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if D_2 > 0:
        a_2 = a_tiles[1].index(a_place).reshape([A_ROWS, D_2])
        b_2 = b_tiles[1].index(b_place).reshape([B_ROWS, D_2])
        product = warpgroup_mma(a_2, b_2.permute((1, 0)), product, is_async=True)
    return product


@gluon.jit
def allocate_tiles(source, source_2, COUNT: gl.constexpr, D_2: gl.constexpr):
    """Shared memory for tiles of both parts; without a second part, the first stands in for it."""
    tiles = gl.allocate_shared_memory(source.dtype, [COUNT] + source.block_type.shape, source.layout)
    tiles_2 = tiles
    if D_2 > 0:
        tiles_2 = gl.allocate_shared_memory(source.dtype, [COUNT] + source_2.block_type.shape, source.layout)
    return tiles, tiles_2


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, ARRIVALS):
    """An array of COUNT barriers for each of the numbers of arrivals that end a phase."""
    barriers = ()
    for _ in gl.static_range(len(ARRIVALS)):
        barriers = barriers + (gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout()),)
    for place in gl.static_range(COUNT):
        for number in gl.static_range(len(ARRIVALS)):
            mbarrier.init(barriers[number].index(place), count=ARRIVALS[number])
    return barriers

# fmt: on


def tile_descriptor(x: Tensor, positions: int, heads: int, columns: int) -> Descriptor:
    """A descriptor of x [B, positions, heads, columns] in tiles of these sizes."""
    return describe_tiles(x, x.shape, x.stride(), (1, positions, heads, columns), TILE_LAYOUT)


def split_heads(heads: int) -> tuple[int, int]:
    """Cut the heads of a group into shares of a power of two, of which a tile of rows holds whole queries: heads of a
    share, and shares. Six heads are three shares of two, as many groups more.
    """
    q_per_kv = heads & -heads
    return q_per_kv, heads // q_per_kv


def part_descriptors(x: Tensor, positions: int, heads: int, width: Widths) -> tuple[Descriptor, Descriptor | None]:
    """Descriptors of both parts of x's columns; None where there is no second, since each costs the host time."""
    first = tile_descriptor(x, positions, heads, width.part_1)
    return first, tile_descriptor(x, positions, heads, width.part_2) if width.part_2 else None
