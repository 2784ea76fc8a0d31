"""Importance and full attention by selection block: pure functions on the device.

Shape letters as in DESIGN.md; the batch is one sequence, so B is left out. Q sampled queries stand for all T. Every
tensor may have leading dimensions, so that one call describes many layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trifocal.ops import Documents, Geometry
from trifocal.ops.layout import compressed_layout

_MOST_QUERIES = 128
"""Sampled queries: enough for a mean, and bounded for any length."""
_FEWEST_QUERIES = 16
MOST_SCORES = 2**26
"""Scores of full attention in one call: at most 256 MiB in fp32, for any length."""


@dataclass(frozen=True)
class LayerAttention:
    """Tensors of one layer, or of several equal ones, for one sequence.

    Attributes:
        gates: [..., T, H, 3] in the order cmp, slc, win; NaN in a layer without gates.
        q: Queries, [..., T, H, D].
        k_cmp: Compressed keys, [..., C, G, D].
        lse: Log-sum-exp of the compressed scores, [..., T, H]; -inf where no block is visible.
        k_slc: Keys of the selected branch, [..., T, G, D].
        selected: Selected blocks, [..., T, G, N], -1 pads, counted from the start of the query's document.
        geometry: Block sizes, in tokens.
        scale: Factor on the scores.
        documents: Packed documents, if there are several.
    """

    gates: Tensor
    q: Tensor
    k_cmp: Tensor
    lse: Tensor
    k_slc: Tensor
    selected: Tensor
    geometry: Geometry
    scale: float
    documents: Documents | None = None

    @classmethod
    def stack(cls, layers: Sequence["LayerAttention"]) -> "LayerAttention":
        """Several layers as one, with a leading dimension of layers."""
        names = ("gates", "q", "k_cmp", "lse", "k_slc", "selected")
        stacked: dict[str, Any] = {name: torch.stack([getattr(layer, name) for layer in layers]) for name in names}
        return replace(layers[0], **stacked)

    @property
    def num_scores(self) -> int:
        """Scores of full attention at the sampled queries."""
        return len(self.sampled_queries()) * self.q.shape[-3] * self.q.shape[-2]

    @property
    def positions(self) -> Tensor:
        """Position of each token in its document, [T]."""
        if self.documents is None:
            return torch.arange(self.q.shape[-3], device=self.q.device)
        return self.documents.positions

    @property
    def document_ids(self) -> Tensor:
        """Document of each token, [T]."""
        if self.documents is None:
            return torch.zeros(self.q.shape[-3], dtype=torch.int32, device=self.q.device)
        return self.documents.ids

    def sampled_queries(self) -> Tensor:
        """Evenly spaced queries, few enough for full attention in bounded memory, [Q]."""
        num_tokens, num_heads = self.q.shape[-3:-1]
        most = max(_FEWEST_QUERIES, min(_MOST_QUERIES, MOST_SCORES // (num_tokens * num_heads)))
        return evenly_spaced(num_tokens, most, self.q.device)


def block_importance(layer: LayerAttention, queries: Tensor) -> Tensor:
    """Importance of each selection block (Eq. 9, 10), by which blocks are selected.

    Args:
        layer: Tensors of the layer.
        queries: Indices of the queries, [Q].

    Returns:
        [..., Q, G, J], blocks counted from the start of the query's document; 0 where no compressed block is visible.
    """
    geometry, device = layer.geometry, layer.q.device
    num_tokens, (num_blocks, num_groups) = layer.q.shape[-3], layer.k_cmp.shape[-3:-1]
    stride, block = geometry.compression_stride, geometry.selection_block_size
    if layer.documents is None:
        starts = torch.arange(num_blocks, device=device) * stride
        block_ids = torch.zeros_like(starts)
    else:
        layout = compressed_layout(layer.documents, num_blocks, geometry)
        starts, block_ids = layout.starts, layout.ids
    positions, ids = layer.positions[queries], layer.document_ids[queries]
    ends = starts + geometry.compression_block_size
    visible_QC = (block_ids == ids[:, None]) & (ends - 1 <= positions[:, None])

    q_QGRD = layer.q[..., queries, :, :].float().unflatten(-2, (num_groups, -1))
    scores_QGRC = torch.einsum("...qgrd,...cgd->...qgrc", q_QGRD, layer.k_cmp.float()) * layer.scale
    lse_QGR = layer.lse[..., queries, :].float().unflatten(-1, (num_groups, -1))
    p_QGRC = (scores_QGRC - lse_QGR[..., None]).exp().masked_fill(~visible_QC[:, None, None], 0.0)

    first = torch.arange(geometry.num_selection_blocks(num_tokens), device=device) * block
    overlap_CJ = (torch.minimum(ends[:, None], first + block) - torch.maximum(starts[:, None], first)).clamp(min=0)
    return p_QGRC.sum(-2) @ (overlap_CJ / stride).float()


def dense_block_mass(layer: LayerAttention, queries: Tensor) -> Tensor:
    """Probability of full attention over the selected branch's keys, in each selection block.

    Args:
        layer: Tensors of the layer.
        queries: Indices of the queries, [Q].

    Returns:
        [..., Q, G, J], mean over the heads of a group; sums to 1 over the blocks.
    """
    num_tokens, num_groups = layer.k_slc.shape[-3:-1]
    positions, ids = layer.positions, layer.document_ids
    visible_QS = (ids[queries][:, None] == ids) & (positions <= positions[queries][:, None])
    q_QGRD = layer.q[..., queries, :, :].float().unflatten(-2, (num_groups, -1))
    scores_QGRS = torch.einsum("...qgrd,...sgd->...qgrs", q_QGRD, layer.k_slc.float()) * layer.scale
    p_QGS = scores_QGRS.masked_fill_(~visible_QS[:, None, None], -torch.inf).softmax(-1).mean(-2)
    mass = p_QGS.new_zeros(*p_QGS.shape[:-1], layer.geometry.num_selection_blocks(num_tokens))
    return mass.index_add_(-1, positions // layer.geometry.selection_block_size, p_QGS)


def evenly_spaced(count: int, most: int, device: torch.device) -> Tensor:
    """At most `most` of `count` indices, including both ends, [min(count, most)]."""
    return torch.linspace(0, max(count - 1, 0), min(max(count, 0), most), device=device).round().long()
