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
        exact = torch.promote_types(logits.dtype, torch.float32)
        # Branch by branch in memory: backward's kernels read those of one.
        branches = logits.unflatten(-1, (-1, NUM_BRANCHES)).movedim(-1, 0)
        return branches.to(exact, memory_format=torch.contiguous_format).sigmoid().movedim(0, -1)
