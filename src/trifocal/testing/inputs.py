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
    """Draw unit-normal queries, keys and values of every branch, and gates in (0, 1).

    Args:
        geometry: Block sizes, in tokens.
        num_queries: T.
        device: Where the inputs lie.
        dtype: Dtype of the inputs.
        batch: B.
        num_heads: H.
        num_kv_heads: G.
        head_dim: D.
        value_dim: V.
        num_keys: S; 0: as many as queries.
        num_window_keys: Keys of the window branch; 0: S.
        num_compressed: C; by the geometry unless given.
        document_lengths: Lengths of packed documents; one document a row unless given.
        seed: Seed of the generator.
        on_device: Draw on the device in `dtype`, which is fast and needs no second copy, but gives other numbers on
            each device. By default the numbers are drawn in float64 on the CPU and rounded: the same everywhere.

    Returns:
        The inputs, [B, ·, ·, ·] each.
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
