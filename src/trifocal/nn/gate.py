"""Gates: the weight of each branch (compressed, selected, window; in this order) for every query head."""

import torch
from torch import Tensor, nn

NUM_BRANCHES = 3


class SigmoidGate(nn.Module):
    """An independent gate per head and branch: `sigmoid(x W + b)`. Source: arXiv:2502.11089, Eq. 5.

    The bias starts at zero, so that branches start half open on average.

    Args:
        dim: E, width of the layer's input.
        num_heads: H.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, num_heads * NUM_BRANCHES)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        """Map the layer's input [B, T, E] to gates [B, T, H, 3] between 0 and 1, fp32 (fp64 for fp64).

        `logits` is `proj(x)`, [B, T, 3 * H], if the layer has computed it together with other projections.
        """
        logits = self.proj(x) if logits is None else logits
        return _in_full_precision(logits).sigmoid().unflatten(-1, (-1, NUM_BRANCHES))


class GroupSoftmaxGate(nn.Module):
    """Branches compete: a softmax over the three, from the mean query of a group, shared by the group's heads.

    The bias starts at zero, so that branches start at one third on average.

    Args:
        num_heads: H.
        num_kv_heads: G.
        head_dim: D of the queries.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.q_per_kv = num_heads // num_kv_heads
        self.proj = nn.Linear(head_dim, NUM_BRANCHES)
        nn.init.zeros_(self.proj.bias)

    def forward(self, q: Tensor) -> Tensor:
        """Map unrotated queries [B, T, H, D] to gates [B, T, H, 3] that sum to 1, fp32 (fp64 for fp64)."""
        pooled = q.unflatten(2, (self.num_kv_heads, self.q_per_kv)).mean(3)
        gates = _in_full_precision(self.proj(pooled)).softmax(-1)
        return gates.repeat_interleave(self.q_per_kv, dim=2)


def _in_full_precision(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
