"""Random inputs of one attention call."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trifocal.ops import Geometry


class Inputs(NamedTuple):
    """Arguments of `nsa_attention` up to the geometry."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_slc: Tensor
    v_slc: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor

    def leaves(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> "Inputs":
        """The same values as leaves that collect gradients; strides stay as they are."""
        return Inputs(*(x.detach().to(device, dtype).requires_grad_() for x in self))


def attention_inputs(
    geometry: Geometry,
    num_queries: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    *,
    batch: int = 1,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int = 12,
    num_keys: int = 0,
    num_window_keys: int = 0,
    num_compressed: int | None = None,
    document_lengths: Sequence[int] | None = None,
    seed: int = 0,
    on_device: bool = False,
) -> Inputs:
    """Unit-normal queries, keys and values of every branch, and gates in (0, 1); without `num_keys` as many keys as
    queries, and C by the geometry. Drawn in float64 on the CPU and rounded, they are the same everywhere; `on_device`,
    in `dtype`, they are made fast, but each device gives other numbers.
    """
    generator = torch.Generator(device if on_device else "cpu").manual_seed(seed)
    drawn = dtype if on_device else torch.float64

    def normal(*shape: int) -> Tensor:
        x = torch.randn((batch, *shape), generator=generator, device=generator.device, dtype=drawn)
        return x.to(device, dtype)

    def keys_and_values(count: int) -> tuple[Tensor, Tensor]:
        return normal(count, num_kv_heads, head_dim), normal(count, num_kv_heads, value_dim)

    num_keys = num_keys or num_queries
    if num_compressed is None:
        num_compressed = sum(map(geometry.num_compressed_blocks, document_lengths or (num_keys,)))
    return Inputs(
        normal(num_queries, num_heads, head_dim),
        *keys_and_values(num_compressed),
        *keys_and_values(num_keys),
        *keys_and_values(num_window_keys or num_keys),
        normal(num_queries, num_heads, 3).sigmoid(),
    )


def cotangent(like: Tensor, seed: int = 1) -> Tensor:
    """A unit-normal gradient of an output; the same numbers for every dtype and device, rounded."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device, like.dtype)
