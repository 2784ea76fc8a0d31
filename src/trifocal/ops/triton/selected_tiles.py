"""Configurations of selected attention on Hopper, as measured there; no autotuning at run time."""

import torch
import triton

from trifocal.ops.triton.common import Tile


def forward_tile(order: str, dtype: torch.dtype, rep: int, dim: int, value_dim: int) -> Tile:
    """Fixed configurations; `keys` is the number of slots of a piece."""
    if dtype == torch.float32:
        # Exact products run on the ordinary units, fully unrolled: large tiles would spill.
        if order == "masked":
            return Tile(rows=32, keys=0, warps=8, stages=1)
        rows = max(16, triton.next_power_of_2(rep))
        return Tile(rows=rows, keys=64, warps=4 if rows == 16 else 8, stages=1)
    if order == "query":
        return Tile(rows=16, keys=0, warps=4, stages=2)
    wide = max(dim, value_dim) > 128
    if order == "masked":
        if max(dim, value_dim) <= 64:
            return Tile(rows=128, keys=0, warps=8, stages=3, registers=128)
        return Tile(rows=128, keys=0, warps=8, stages=2 if wide else 3)
    return Tile(rows=64, keys=max(64, 512 // rep), warps=4, stages=2 if wide or rep >= 16 else 3)


def finishing_tile(dtype: torch.dtype, dim: int, value_dim: int) -> Tile:
    """Fixed configurations; `keys` is the number of slots that are added at a time."""
    if dtype == torch.float32:
        return Tile(rows=32, keys=1, warps=8, stages=1)
    return Tile(rows=64, keys=2, warps=4, stages=1)


def gathered_tile(dtype: torch.dtype, rep: int, dim: int, value_dim: int) -> Tile:
    """Fixed configurations; `keys` is the number of slots of a piece."""
    if dtype == torch.float32:
        return Tile(rows=max(16, triton.next_power_of_2(rep)), keys=128, warps=8, stages=1)
    wide = max(dim, value_dim) > 128
    if wide:
        return Tile(rows=64, keys=256, warps=8, stages=1)
    if rep >= 16:
        return Tile(rows=32, keys=256, warps=4, stages=2)
    return Tile(rows=64, keys=max(256, 2048 // rep), warps=8, stages=2)


def masked_tile(dtype: torch.dtype, rep: int, dim: int, value_dim: int) -> Tile:
    if dtype == torch.float32:
        return Tile(rows=16, keys=0, warps=8, stages=1)
    wide = max(dim, value_dim) > 128
    return Tile(rows=64, keys=0, warps=8, stages=1) if wide else Tile(rows=64, keys=0, warps=4, stages=1)


def masked_d_q_tile(dtype: torch.dtype, dim: int, value_dim: int) -> Tile:
    if dtype == torch.float32:
        return Tile(rows=16, keys=0, warps=8, stages=1)
    columns = max(dim, value_dim)
    if columns <= 64:
        return Tile(rows=128, keys=0, warps=8, stages=3)
    return Tile(rows=64, keys=0, warps=4, stages=2) if columns <= 128 else Tile(rows=64, keys=0, warps=8, stages=1)
