"""The attention in your own model: one layer takes the place of dense attention.

An index chooses the blocks. It learns from a loss that the layer adds to the backward pass by itself.

python examples/layer.py
"""

import torch
from torch import nn

from trifocal import Geometry
from trifocal.nn import NSAttention, choice_recall


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(dim), nn.RMSNorm(dim)])
        # Blocks for rows of a few hundred tokens; Geometry() has the paper's, for thousands.
        geometry = Geometry(
            compression_block_size=8, compression_stride=4, selection_block_size=16,
            num_selected_blocks=4, num_local_blocks=1, window_size=32,
        )  # fmt: skip
        self.attention = NSAttention(
            dim=dim, num_heads=heads, num_kv_heads=heads // 4, head_dim=dim // heads, value_dim=dim // heads,
            geometry=geometry, chooser="index",
        )  # fmt: skip
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 128), Layer(128, 8), Layer(128, 8), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# Rows that repeat themselves after 32 tokens.
tokens = torch.randint(64, (2, 32)).repeat(1, 8)
losses = []
for _ in range(12):
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} at the first step, {losses[-1]:.2f} at the last")
print("recall of the choice:", {name: round(recall, 2) for name, recall in choice_recall(model).items()})
