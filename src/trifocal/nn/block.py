"""The decoder block: attention and a SwiGLU with an RMSNorm each, added to the residual stream."""

from typing import Any

import torch
from torch import Tensor, nn

from trifocal.nn.attention_base import RotaryTables
from trifocal.nn.norm import RMSNorm, product_dtype
from trifocal.ops import Documents

MAX_TOKENS = 65536
"""Tokens of a sequence that pass an MLP together in training: backward has six tensors of `hidden_dim` a token."""


class SwiGLU(nn.Module):
    """`W_down (silu(W_gate x) * W_up x)`. Source: arXiv:2002.05202.

    Args:
        dim: E, width of input and output.
        hidden_dim: Width in between.
        bias: Whether the three maps have biases.
    """

    def __init__(self, dim: int, hidden_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=bias)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=bias)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, E] -> [..., T, E]."""
        # Without gradients nothing is split, so that an exported graph takes any length.
        parts = x.split(MAX_TOKENS, dim=-2) if torch.is_grad_enabled() else (x,)
        return self._of(x) if len(parts) == 1 else torch.cat([self._of(part) for part in parts], dim=-2)

    def _of(self, x: Tensor) -> Tensor:
        # Not one product like the attention's projections: joining the two gradients of this width costs more than
        # it saves.
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer of the decoder.

    Args:
        attention: An attention layer of `trifocal.nn`, or anything with its interface.
        dim: E.
        mlp_dim: Hidden width of the SwiGLU.
        norm_eps: Epsilon of both norms.
        mlp_bias: Whether the SwiGLU's maps have biases.
        norm_after: Whether the norms are behind attention and SwiGLU instead of in front of them.
    """

    def __init__(
        self,
        attention: nn.Module,
        dim: int,
        mlp_dim: int,
        norm_eps: float = 1e-6,
        mlp_bias: bool = False,
        norm_after: bool = False,
    ) -> None:
        super().__init__()
        self.norm_after = norm_after
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(dim, norm_eps)
        self.mlp = SwiGLU(dim, mlp_dim, mlp_bias)

    def __getstate__(self) -> dict[str, Any]:
        # A copied wrapper would call this block, not the copy: the copy must be wrapped anew.
        return {name: value for name, value in super().__getstate__().items() if name != "forward"}

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | Documents | None = None,
        rotary: RotaryTables | None = None,
        **given: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[B, T, E] -> [B, T, E], with a `choice_sample` also the choice's figures; keywords as for the attention."""
        attended = self.attention(self._before(self.attention_norm, x), cu_seqlens=cu_seqlens, rotary=rotary, **given)
        figures = None
        if isinstance(attended, tuple):
            attended, figures = attended
        x = x + self._behind(self.attention_norm, attended)
        x = x + self._behind(self.mlp_norm, self.mlp(self._before(self.mlp_norm, x)))
        return x if figures is None else (x, figures)

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        # Cast once, as a norm does: each product would keep its own copy.
        return x.to(product_dtype(x)) if self.norm_after else norm(x)

    def _behind(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x) if self.norm_after else x
