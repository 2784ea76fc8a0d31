"""The scores that choose blocks, and full attention, by selection block: pure functions on the device.

Shape letters as in DESIGN.md. The batch is one sequence; Q sampled queries stand for T.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trifocal.ops import Documents, Geometry
from trifocal.ops.choice_loss import Sample, compressed_importance, free_places, index_scores, num_free, teacher_masses

_MAX_QUERIES = 128
"""Sampled queries: enough for a mean, and bounded for any length."""
_MIN_QUERIES = 16
_MAX_SCORES = 2**26
"""Scores of full attention in one call: at most 256 MiB in fp32, for any length."""


@dataclass(frozen=True)
class LayerAttention:
    """Tensors of a layer for one sequence.

    Attributes:
        gates: [1, T, H, 3] in the order cmp, slc, win; NaN in a layer without gates.
        q: Rotated queries, [1, T, H, D].
        k_slc: Rotated keys of the selected branch, [1, T, G, D].
        selected: Selected blocks, [1, T, G, N], -1 pads, counted from the start of the query's document.
        chooser: What chose them: compressed keys, [1, C, G, D]; or index queries and keys, [1, T, G, Di] and
            [1, T, Di]; or nothing: by exact mass.
        geometry: Block sizes, in tokens.
        documents: Packed documents, if there are several.
    """

    gates: Tensor
    q: Tensor
    k_slc: Tensor
    selected: Tensor
    chooser: tuple[Tensor, ...]
    geometry: Geometry
    documents: Documents | None = None

    @property
    def positions(self) -> Tensor:
        """Position of each token in its document, [T]."""
        if self.documents is None:
            return torch.arange(self.q.shape[1], device=self.q.device)
        return self.documents.positions.long()

    def sampled_queries(self) -> Tensor:
        """Evenly spaced queries, few enough for full attention in bounded memory, [Q]."""
        num_tokens, num_heads = self.q.shape[1:3]
        most = max(_MIN_QUERIES, min(_MAX_QUERIES, _MAX_SCORES // (num_tokens * num_heads)))
        return evenly_spaced(num_tokens, most, self.q.device)

    def sample(self, queries: Tensor) -> Sample:
        """These queries [Q] as [1, Q]; eligible if they have more free candidates than free places."""
        positions = self.positions[queries]
        free = num_free(positions // self.geometry.selection_block_size, self.geometry)
        fields = (queries, queries - positions, free > free_places(self.geometry))
        return Sample(*(field[None] for field in fields))


def choosing_shares(layer: LayerAttention, queries: Tensor) -> Tensor:
    """Share of each block of a query's document in the scores that choose, [1, Q, G, J], at queries [Q]; of an index
    the softmax, 0 where no compressed block is visible.
    """
    sample = layer.sample(queries)
    position, geometry = layer.positions[queries][:, None, None], layer.geometry
    if len(layer.chooser) == 1:
        importance = compressed_importance(
            layer.q, layer.chooser[0], sample, geometry, layer.documents, layer.q.shape[1]
        )
        seen = importance.where(position >= geometry.compression_block_size - 1, 0)
        return seen / seen.sum(-1, keepdim=True).clamp(min=1e-30)
    if not layer.chooser:
        return full_attention_shares(layer, queries)
    q_idx, k_idx = layer.chooser
    scores = index_scores(q_idx, k_idx, sample, geometry, layer.documents)
    block = torch.arange(scores.shape[-1], device=scores.device)
    return scores.masked_fill(block > position // geometry.selection_block_size, -torch.inf).softmax(-1)


def full_attention_shares(layer: LayerAttention, queries: Tensor) -> Tensor:
    """Probability of full attention over the selected branch's keys by selection block, [1, Q, G, J]; sums to 1."""
    return teacher_masses(layer.q, layer.k_slc, layer.sample(queries), layer.geometry, layer.documents)


def evenly_spaced(count: int, most: int, device: torch.device) -> Tensor:
    """At most `most` of `count` indices, including both ends, [min(count, most)]."""
    return torch.linspace(0, max(count - 1, 0), min(max(count, 0), most), device=device).round().long()
