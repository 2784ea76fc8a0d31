"""The compressor φ: one key, or one value, from the tokens of a compressed block.

φ sees tokens without rotation. The attention layer then rotates a compressed key by the position of its block's
first token, so that scores depend only on distance for any φ. Source: arXiv:2502.11089, Eq. 7.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trifocal.nn.projection import is_plain
from trifocal.ops import Documents, Geometry, mean_compress
from trifocal.ops.dispatch import Backend
from trifocal.ops.layout import num_compressed_slots
from trifocal.ops.reference import compression_windows


class MeanCompressor(nn.Module):
    """The mean of a block's tokens; no parameters.

    Args:
        geometry: Block sizes, in tokens.
        backend: `"auto"`, `"reference"` or `"triton"`; see `trifocal.ops.dispatch`.
    """

    def __init__(self, geometry: Geometry, backend: Backend = "auto") -> None:
        super().__init__()
        self.geometry, self.backend = geometry, backend

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """Compress unrotated keys or values.

        Args:
            x: [B, S, G, D].
            documents: Packed documents; each has its own grid of blocks.

        Returns:
            [B, C, G, D] in the type of `x`. With documents C is `S // stride`, enough for any boundaries; slots that
            belong to no document are zero and invisible.
        """
        return mean_compress(x, self.geometry, cu_seqlens=documents, backend=self.backend)


class MLPCompressor(nn.Module):
    """The mean of a block's tokens plus an MLP of their concatenation, with learned positions in the block.

    `φ(x) = mean(x) + W2 silu(W1 concat(x + positions))`, the same for all KV heads. The mean is there so that
    training starts from a compressor that already works; W2 starts small.

    Args:
        geometry: Block sizes, in tokens.
        features: D of keys or V of values.
    """

    def __init__(self, geometry: Geometry, features: int) -> None:
        super().__init__()
        self.geometry = geometry
        hidden = 2 * features
        self.positions = nn.Parameter(torch.empty(geometry.compression_block_size, features))
        self.up_proj = nn.Linear(geometry.compression_block_size * features, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, features, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the positions and W2, also where φ was made on the meta device."""
        nn.init.normal_(self.positions, std=0.02)
        nn.init.normal_(self.down_proj.weight, std=0.02)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """Compress unrotated keys or values; arguments and result as in `MeanCompressor.forward`.

        Slots that belong to no document hold finite values and are invisible.
        """
        return _compress(self.blocks(x, documents), self.positions, self.up_proj, self.down_proj)

    def blocks(self, x: Tensor, documents: Documents | None) -> Tensor:
        """The tokens of each block, [B, S, G, D] -> [B, C, l, G, D]."""
        num_blocks = num_compressed_slots(x.shape[1], self.geometry, documents)
        return compression_windows(x, self.geometry, documents, num_blocks)

    @property
    def is_plain(self) -> bool:
        """Whether a call computes what is written here and nothing else."""
        own = type(self) is MLPCompressor and not (self._forward_hooks or self._forward_pre_hooks)
        return own and is_plain(self.up_proj) and is_plain(self.down_proj)


Compressor = MeanCompressor | MLPCompressor


def compress_keys_and_values(
    compressors: tuple[Compressor, Compressor], keys: Tensor, values: Tensor, documents: Documents | None
) -> tuple[Tensor, Tensor]:
    """Compress unrotated keys [B, S, G, D] and values [B, S, G, V], each by its own φ. In training, two learned ones of
    one width are a batch of two, whose short products take hardly longer than one's.
    """
    learned = [phi for phi in compressors if isinstance(phi, MLPCompressor) and phi.is_plain]
    inputs = keys, values
    if len(learned) < 2 or keys.shape != values.shape or not torch.is_grad_enabled():
        k_cmp, v_cmp = (phi(x, documents) for phi, x in zip(compressors, inputs, strict=True))
        return k_cmp, v_cmp
    blocks = torch.stack([phi.blocks(x, documents) for phi, x in zip(learned, inputs, strict=True)])
    positions = torch.stack([phi.positions for phi in learned])[:, None, None]
    up, down = ([getattr(phi, name).weight for phi in learned] for name in ("up_proj", "down_proj"))
    k_cmp, v_cmp = _compress(blocks, positions, partial(_linear_pair, up), partial(_linear_pair, down)).unbind(0)
    return k_cmp, v_cmp


def _compress(
    blocks: Tensor, positions: Tensor, up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]
) -> Tensor:
    """φ of blocks [*, C, l, G, D], with positions [*, l, D] that are broadcast over blocks: [*, C, G, D]."""
    placed = blocks + positions.to(blocks.dtype)[..., None, :]
    hidden = nn.functional.silu(up(placed.transpose(-3, -2).flatten(-2)))
    return blocks.mean(-3) + down(hidden).to(blocks.dtype)


def _linear_pair(weights: list[Tensor], x: Tensor) -> Tensor:
    """Two linear maps, each with its own input: [2, B, C, G, inputs] -> [2, B, C, G, outputs]."""
    return _LinearPair.apply(x.flatten(1, 3), *weights).unflatten(1, x.shape[1:4])  # type: ignore[no-any-return, no-untyped-call]


class _LinearPair(torch.autograd.Function):
    """Two linear maps, each with its own input: [2, M, inputs] -> [2, M, outputs]. Weights get gradients in rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor) -> Tensor:  # type: ignore[override]
        weights = torch.stack((first, second))
        y = torch.bmm(x, weights.mT)
        # Under autocast the product's own types.
        ctx.save_for_backward(x.to(y.dtype), weights.to(y.dtype))
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x, weights = ctx.saved_tensors
        d_first, d_second = torch.bmm(d_y.mT, x).unbind(0)
        return torch.bmm(d_y, weights), d_first, d_second
