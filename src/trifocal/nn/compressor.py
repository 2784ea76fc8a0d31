"""The compressor φ: one key, or one value, from the tokens of a compressed block.

φ sees tokens without rotation. The attention layer then rotates a compressed key by the position of its block's
first token, so that scores depend on distance alone for any φ. Source: arXiv:2502.11089, Eq. 7.
"""

import torch
from torch import Tensor, nn

from trifocal.ops import Documents, Geometry
from trifocal.ops.api import compress_by_mean
from trifocal.ops.dispatch import Backend
from trifocal.ops.layout import max_packed_compressed_blocks
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
        return compress_by_mean(x, self.geometry, documents, self.backend)


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
        hidden = self.hidden_features(features)
        self.positions = nn.Parameter(torch.empty(geometry.compression_block_size, features))
        self.up_proj = nn.Linear(geometry.compression_block_size * features, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, features, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the positions and W2, also where φ was made on the meta device."""
        nn.init.normal_(self.positions, std=0.02)
        nn.init.normal_(self.down_proj.weight, std=0.02)

    @staticmethod
    def hidden_features(features: int) -> int:
        """Width of the MLP for keys or values of `features` dimensions."""
        return 2 * features

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """Compress unrotated keys or values; arguments and result as in `MeanCompressor.forward`.

        Slots that belong to no document hold finite values and are invisible.
        """
        if documents is None:
            num_blocks = self.geometry.num_compressed_blocks(x.shape[1])
        else:
            num_blocks = max_packed_compressed_blocks(x.shape[1], self.geometry)
        blocks_BClGD = compression_windows(x, self.geometry, documents, num_blocks)
        placed = blocks_BClGD + self.positions.to(x.dtype)[:, None]
        hidden = nn.functional.silu(self.up_proj(placed.transpose(2, 3).flatten(3)))
        return blocks_BClGD.mean(2) + self.down_proj(hidden).to(x.dtype)
