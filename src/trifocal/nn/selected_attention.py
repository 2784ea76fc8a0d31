"""Selected attention as a whole layer: one softmax over first, local and selected blocks, without gates."""

from typing import Any, Literal

import torch
from torch import Tensor

from trifocal.nn.attention_base import AttentionBase, KVCache, RotaryTables, check_input, documents_and_positions
from trifocal.nn.compressor import MeanCompressor
from trifocal.nn.rope import rotate
from trifocal.ops import Documents, Geometry, compressed_attention, select_blocks, selected_attention
from trifocal.ops.dispatch import check_backend

# The choice needs the scores' log-sum-exp alone. Few columns of values are the least that the operation takes.
VALUE_COLUMNS = 16


class SelectedAttention(AttentionBase):
    """Attention to the tokens of the first, the last and the most important blocks.

    Keys and values are those of dense attention: a dense model's weights fit as they are, and with enough blocks to
    cover the past both are equal. Compressed keys, the means of the unrotated keys, choose the blocks and are not
    attended to; nothing is learned by choosing.

    Args:
        geometry: Block sizes, in tokens; its window is not used.
        backend: `"auto"`, `"reference"` or `"triton"`; see `trifocal.ops.dispatch`.
        **sizes: `dim`, `num_heads`, `num_kv_heads`, `head_dim`, `value_dim` and the rest of `AttentionBase`. The heads
            that share a KV head share its chosen blocks too.

    Raises:
        ValueError: If the sizes do not fit one another.

    Source: arXiv:2509.24663 (InfLLM-V2), with the choice of arXiv:2502.11089, Eq. 8 to 11.
    """

    def __init__(
        self, *, geometry: Geometry, backend: Literal["auto", "reference", "triton"] = "auto", **sizes: Any
    ) -> None:
        super().__init__(geometry=geometry, **sizes)
        check_backend(backend)
        self.geometry: Geometry = geometry
        self.backend = backend
        self.k_compressor = MeanCompressor(geometry, backend)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | Documents | None = None,
        rotary: RotaryTables | None = None,
        selected_blocks: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attend; arguments and result as in `NSAttention.forward`."""
        check_input(x, self.q_proj.in_features)
        documents, positions = documents_and_positions(x, cu_seqlens)
        length = self._length(x, documents)
        q, [k], [v], _ = self._project(x)
        if cache is not None:
            return self.o_proj(cache.attend(self, q, [k], [v], None).flatten(2))
        raw = k.detach()
        cos, sin = self._rotary_tables(positions, q, length) if rotary is None else (rotary.cos, rotary.sin)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if selected_blocks is None:
            with torch.no_grad():
                k_cmp = self.k_compressor(raw, documents)
                k_cmp = self._rotate_compressed(k_cmp, self.geometry, documents, rotary, length)
                selected_blocks = choose_blocks(q, k_cmp, k.shape[1], self.geometry, documents, self.backend)
        o = selected_attention(q, k, v, selected_blocks, self.geometry, cu_seqlens=documents, backend=self.backend)
        return self.o_proj(o.flatten(2))


def choose_blocks(
    q: Tensor, k_cmp: Tensor, num_keys: int, geometry: Geometry, documents: Documents | None, backend: str
) -> Tensor:
    """The choice of a layer whose compressed keys have no values.

    Args:
        q: Rotated queries, [B, T, H, D]; the last T positions of `num_keys`.
        k_cmp: Rotated compressed keys, [B, C, G, D].
        num_keys: Tokens behind the compressed blocks, S.
        geometry: Block sizes, in tokens.
        documents: Packed documents, or None.
        backend: Backend of `trifocal.ops.select_blocks`.

    Returns:
        [B, T, G, N], as of `trifocal.ops.select_blocks`.
    """
    few = k_cmp[..., :VALUE_COLUMNS]
    _, lse = compressed_attention(q, k_cmp, few, geometry, num_keys=num_keys, cu_seqlens=documents, backend=backend)
    return select_blocks(q, k_cmp, lse, geometry, num_keys=num_keys, cu_seqlens=documents, backend=backend)
