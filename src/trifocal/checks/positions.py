"""The check of positions: scores depend on distance alone."""

from collections.abc import Callable

import torch
from torch import Tensor

from trifocal.checks.measurement import Measurement
from trifocal.nn import NSAttention, rotary_tables, rotate
from trifocal.testing.small_models import small_config

Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]
SHIFTS = (1, 17, 1000, 65536)


def rope_distance(device: torch.device, *, rotate: Rotate = rotate) -> Measurement:
    """Moving a query and its keys, raw or compressed, along the sequence leaves their scores as they are.

    Bound: the angle of the farthest position carries a rounding error of one part in 2^53; a score is a sum of D
    products, each turned by two such angles.
    """
    config = small_config(compressor="mlp")
    heads, groups, dim = config.num_heads, config.num_kv_heads, config.head_dim
    length = 3 * config.geometry.compression_block_size
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, length, heads, dim, generator=generator, dtype=torch.float64).to(device)
    k = torch.randn(1, length, groups, dim, generator=generator, dtype=torch.float64).to(device)
    compressor = NSAttention(
        dim=config.dim,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=dim,
        value_dim=config.value_dim,
        geometry=config.geometry,
        compressor="mlp",
    ).to(device, torch.float64)

    def scores(first: int) -> tuple[Tensor, Tensor]:
        def rotated(x: Tensor, positions: Tensor) -> Tensor:
            return rotate(x, *rotary_tables(first + positions, dim, config.rope_theta, torch.float64))

        tokens = torch.arange(length, device=device)
        queries = rotated(q, tokens).unflatten(2, (groups, -1))
        k_cmp = compressor.k_compressor(k, None)
        starts = torch.arange(k_cmp.shape[1], device=device) * config.geometry.compression_stride
        raw, compressed = rotated(k, tokens), rotated(k_cmp, starts)
        return (
            torch.einsum("btgrd,bsgd->bgrts", queries, raw),
            torch.einsum("btgrd,bcgd->bgrtc", queries, compressed),
        )

    with torch.no_grad():
        at_zero = scores(0)
        worst, details = 0.0, []
        for shift in SHIFTS:
            moved = max((a - b).abs().max().item() for a, b in zip(scores(shift), at_zero, strict=True))
            worst = max(worst, moved)
            details.append(f"moved by {shift}: {moved:.3g}")
    size = (q.norm(dim=-1).max() * k.norm(dim=-1).max()).item()
    bound = 2 * dim * max(SHIFTS) * torch.finfo(torch.float64).eps * size
    return Measurement(worst, bound, "change", tuple(details))
