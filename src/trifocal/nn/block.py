"""The decoder block: pre-norm attention and a pre-norm SwiGLU, each added to the residual stream."""

from typing import Any

import torch
from torch import Tensor, nn

from trifocal.nn.attention import RotaryTables
from trifocal.ops import Documents


class RMSNorm(nn.Module):
    """Scale each token to a root mean square of 1, then by a learned weight.

    Computed in fp32 at least. Under autocast the result is cast once, here, to the type of the products that
    follow; otherwise each of them would keep a copy of its own.

    Args:
        dim: E.
        eps: Added to the mean square.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., E], in autocast's type where it is on, else in the type of `x`."""
        exact = torch.promote_types(x.dtype, torch.float32)
        normed = nn.functional.rms_norm(x.to(exact), self.weight.shape, self.weight.to(exact), self.eps)
        # The meta device has no autocast to ask for.
        if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
            return normed.to(torch.get_autocast_dtype(x.device.type))
        return normed.to(x.dtype)


class SwiGLU(nn.Module):
    """`W_down (silu(W_gate x) * W_up x)`. Source: arXiv:2002.05202.

    Args:
        dim: E, width of input and output.
        hidden_dim: Width in between.
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        # Not one product like the attention's projections: joining the two gradients of this width costs more than
        # it saves.
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer of the decoder.

    Args:
        attention: `NSAttention` or `DenseAttention`, or anything with their interface.
        dim: E.
        mlp_dim: Hidden width of the SwiGLU.
        norm_eps: Of both norms.
    """

    def __init__(self, attention: nn.Module, dim: int, mlp_dim: int, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(dim, norm_eps)
        self.mlp = SwiGLU(dim, mlp_dim)

    def __getstate__(self) -> dict[str, Any]:
        # A wrapped forward would call this block from its copy: whoever wraps a block wraps its copy anew.
        return {name: value for name, value in super().__getstate__().items() if name != "forward"}

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | Documents | None = None,
        rotary: RotaryTables | None = None,
    ) -> Tensor:
        """[B, T, E] -> [B, T, E]; `cu_seqlens` and `rotary` as the attention takes them."""
        x = x + self.attention(self.attention_norm(x), cu_seqlens=cu_seqlens, rotary=rotary)
        return x + self.mlp(self.mlp_norm(x))
