"""Configurations of selected attention on Hopper, as measured there; no autotuning at run time."""

import torch
from torch import Tensor

from trifocal.ops.triton.common import Tile, is_hopper, strides
from trifocal.ops.triton.launch import cdiv, next_power_of_2

# A slot's rows must fill the 8 rows that shared memory's pattern repeats after, to be copied into a tile by themselves.
FEWEST_HEADS_BY_ROLES = 8
# Programs a multiprocessor from which on the masked order's d_k, d_v leaves a block's rows together, and about as many
# as it makes otherwise, as measured on an H200.
ENOUGH_PROGRAMS = 12
# Rows of a part: 16 tiles, beside which loading a block and storing its sums is little.
FEWEST_ROWS_OF_A_PART = 1024


def fits_by_hand(order: str, *tensors: Tensor, rep: int, block_size: int) -> bool:
    """Whether the kernels scheduled by hand take these queries, keys and values, [B, *, heads, D].

    On Hopper; 16-bit types; widths of 64 and 128; blocks of 64 tokens; rows that are copied 16 bytes at a time; for
    keys-outside, a slot in a tile of 64 rows.
    """
    return (
        all(x.dtype != torch.float32 and x.shape[-1] in (64, 128) for x in tensors)
        and block_size == 64
        and (order == "masked" or (order == "gathered" and rep <= 64))
        and is_hopper(tensors[0].device)
        and all(x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in strides(x)) for x in tensors)
    )


def sizes_by_hand(shape: dict[str, int]) -> dict[str, int]:
    """The compile-time sizes that these kernels take, of those of the portable ones."""
    parts = ("D_1", "D_2", "V_1", "V_2", "KEYS")
    return {name: size for name, size in shape.items() if name not in parts}


def forward_tile(order: str, dtype: torch.dtype, rep: int, dim: int, value_dim: int, by_hand: bool) -> Tile:
    """Fixed configurations; `keys` is the number of slots of a piece."""
    if by_hand:
        return Tile(rows=64, keys=max(128, 1024 // rep), warps=4, stages=1)
    if dtype == torch.float32:
        # Exact products run on the ordinary units, fully unrolled: large tiles would spill.
        if order == "masked":
            return Tile(rows=32, keys=0, warps=8, stages=1)
        rows = max(16, next_power_of_2(rep))
        return Tile(rows=rows, keys=64, warps=4 if rows == 16 else 8, stages=1)
    if order == "query":
        return Tile(rows=16, keys=0, warps=4, stages=2)
    wide = max(dim, value_dim) > 128
    if order == "masked":
        if max(dim, value_dim) <= 64:
            return Tile(rows=128, keys=0, warps=8, stages=3, registers=128)
        return Tile(rows=128, keys=0, warps=8, stages=2 if wide else 3)
    return Tile(rows=64, keys=max(64, 512 // rep), warps=4, stages=2 if wide or rep >= 16 else 3)


def gathered_tile(dtype: torch.dtype, rep: int, dim: int, value_dim: int, by_hand: bool, hopper: bool) -> Tile:
    """Fixed configurations; `keys` is the number of slots of a piece."""
    if by_hand:
        # Narrow tiles take less time each, beside which a piece's own sums are to stay small.
        return Tile(rows=64, keys=max(256 if max(dim, value_dim) > 64 else 512, 2048 // rep), warps=4, stages=1)
    if dtype == torch.float32:
        return Tile(rows=max(16, next_power_of_2(rep)), keys=128, warps=8, stages=1)
    if max(dim, value_dim) > 128:
        return Tile(rows=64, keys=256, warps=8, stages=1)
    return Tile(rows=64, keys=max(256, 2048 // rep), warps=4 if hopper else 8, stages=2 if hopper else 1)


def masked_tile(dtype: torch.dtype, rep: int, dim: int, value_dim: int, by_hand: bool) -> Tile:
    if by_hand:
        return Tile(rows=64, keys=0, warps=4, stages=1)
    if dtype == torch.float32:
        return Tile(rows=16, keys=0, warps=8, stages=1)
    wide = max(dim, value_dim) > 128
    return Tile(rows=64, keys=0, warps=8, stages=1) if wide else Tile(rows=64, keys=0, warps=4, stages=1)


def part_of_queries(num_queries: int, rep: int, blocks: int, multiprocessors: int) -> int:
    """Of how many queries one program of the masked order's d_k, d_v takes the rows.

    Of all, where there are programs enough; otherwise a program's work is cut at multiples of this many queries, so
    that the first block, which all queries may choose, is not the work of one.

    Args:
        num_queries: T.
        rep: Heads of a group.
        blocks: Blocks of all batch entries and groups.
        multiprocessors: Those of the device.
    """
    parts = min(ENOUGH_PROGRAMS * multiprocessors // blocks, num_queries * rep // FEWEST_ROWS_OF_A_PART)
    return cdiv(cdiv(num_queries, parts), 64) * 64 if parts > 1 else num_queries


def masked_d_q_tile(dtype: torch.dtype, dim: int, value_dim: int) -> Tile:
    if dtype == torch.float32:
        return Tile(rows=16, keys=0, warps=8, stages=1)
    columns = max(dim, value_dim)
    if columns <= 64:
        return Tile(rows=64, keys=0, warps=4, stages=3, registers=168)
    return Tile(rows=64, keys=0, warps=4, stages=2) if columns <= 128 else Tile(rows=64, keys=0, warps=8, stages=1)


def partial_d_q_type(dtype: torch.dtype, places: int, by_hand: bool) -> torch.dtype:
    """Type of a slot's share of d_q: fp32 for short choices, where it needs no more memory than long ones' 16 bits.

    In 16 bits each share is rounded before they are added, and a sum of few shares errs by more of itself.
    """
    return torch.float32 if places <= 8 and not by_hand else dtype
