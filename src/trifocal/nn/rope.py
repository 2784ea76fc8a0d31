"""Rotary position embedding: a score of a rotated query and a rotated key depends on their distance alone.

Convention: every head is rotated by itself, and dimension `i` pairs with dimension `i + D/2` ("half-split").
Pair `i` turns by `position * theta ** (-2i / D)`. Source: arXiv:2104.09864.
"""

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles.

    Angles are computed in fp64: in fp32 an angle near one million is off by 0.06 radians.

    Args:
        positions: Position of each token in its document, [T], an integer type.
        head_dim: D, even.
        theta: Base of the frequencies; the slowest pair turns once in about `2 * pi * theta` tokens.
        dtype: Type of the tables.

    Returns:
        Cosine and sine, each [T, D/2].
    """
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64)
    angles = positions.to(torch.float64)[:, None] * theta ** (-pairs / head_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of each token by its position's angles.

    Args:
        x: Queries or keys, [B, T, H, D].
        cos: From `rotary_tables`, [T, D/2]; its type is that of the arithmetic, so fp32 for bf16 inputs.
        sin: As `cos`.

    Returns:
        The rotated tensor, [B, T, H, D], in the type of `x`.
    """
    # Without a concatenation, so that a compiler makes one pass of it, without fp32 tensors in memory.
    cos, sin = cos[:, None, None], sin[:, None, None]
    signs = torch.arange(-1, 2, 2, device=sin.device, dtype=sin.dtype)[:, None]
    halves = x.to(cos.dtype).unflatten(-1, (2, -1))
    return (halves * cos + halves.flip(-2) * (sin * signs)).flatten(-2).to(x.dtype)
