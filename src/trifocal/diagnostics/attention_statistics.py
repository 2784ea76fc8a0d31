"""Figures about gates and chosen blocks: pure functions of what one attention layer computed.

All of them stay on the device. Shape letters as in DESIGN.md; the batch is one sequence, so B is left out.
"""

import math

import torch
from torch import Tensor

from trifocal.ops import Documents, Geometry
from trifocal.ops.layout import compressed_layout

BRANCHES = ("cmp", "slc", "win")
IGNORED_GATE = 0.05
"""A head whose mean gate of a branch is below this ignores the branch."""
_SAMPLED_QUERIES = 128
"""Queries at which importance and overlap are measured: enough for a mean, and bounded for any length."""


def gate_statistics(gates: Tensor) -> dict[str, Tensor]:
    """Describe the gates of one layer.

    Args:
        gates: [T, H, 3] in the order cmp, slc, win.

    Returns:
        For each branch b: `gate_mean_b` and `gate_spread_b` (standard deviation), over tokens and heads;
        `gate_entropy_b`, the mean entropy of the gate seen as a coin, in nats: ln 2 when undecided, 0 when saturated
        and without gradient; `heads_ignoring_b`, the share of heads whose mean gate is below IGNORED_GATE.
    """
    gates = gates.float()
    entropy = torch.special.entr(gates) + torch.special.entr(1 - gates)
    ignoring = (gates.mean(0) < IGNORED_GATE).float().mean(0)
    per_branch = {
        "gate_mean": gates.mean((0, 1)),
        "gate_spread": gates.std((0, 1), correction=0),
        "gate_entropy": entropy.mean((0, 1)),
        "heads_ignoring": ignoring,
    }
    return {f"{name}_{branch}": values[i] for name, values in per_branch.items() for i, branch in enumerate(BRANCHES)}


def selection_statistics(selected: Tensor, geometry: Geometry, documents: Documents | None) -> dict[str, Tensor]:
    """Describe the choice of one layer.

    Args:
        selected: Chosen blocks, [T, G, N], -1 pads, counted from the start of the query's document.
        geometry: Block sizes, in tokens.
        documents: Packed documents, if there are several.

    Returns:
        `selected_distance_shares` [bins]: share of the chosen blocks that lie 0, 1, 2-3, 4-7, … blocks before the
        query's own; `selected_forced_share`: share that was forced; `free_local_share`: of those that were not, and
        were chosen by queries with more candidates than n, the share that the window sees anyway (0 if there are
        none); `neighbour_overlap`: share of a query's blocks that the query before it chose too;
        `selected_block_entropy`: entropy of the chosen blocks over their indices, in nats;
        `fewer_than_n_share`: share of queries with fewer than n.
    """
    num_queries, device = selected.shape[0], selected.device
    positions = torch.arange(num_queries, device=device) if documents is None else documents.positions
    own = (positions // geometry.selection_block_size)[:, None, None]
    chosen = selected >= 0
    count = chosen.sum().clamp(min=1)

    distance = torch.where(chosen, own - selected, 0)
    bins = distance_bins(num_queries, geometry)
    edges = 2 ** torch.arange(bins - 1, device=device)
    bin_of = torch.bucketize(distance, edges, right=True)
    shares = torch.zeros(bins, device=device).scatter_add_(0, bin_of.flatten(), chosen.float().flatten()) / count

    forced = chosen & ((selected < geometry.num_initial_blocks) | (selected > own - geometry.num_local_blocks))
    has_choice = own + 1 > geometry.num_selected_blocks
    free = chosen & ~forced & has_choice
    # The window reaches back w - 1 tokens; a block is seen whole if its first token is.
    in_window = positions[:, None, None] - selected * geometry.selection_block_size < geometry.window_size

    blocks = torch.where(chosen, selected, 0).flatten().long()
    counts = torch.zeros(geometry.num_selection_blocks(num_queries), device=device)
    counts.scatter_add_(0, blocks, chosen.float().flatten())
    return {
        "selected_distance_shares": shares,
        "selected_forced_share": forced.sum() / count,
        "free_local_share": (free & in_window).sum() / free.sum().clamp(min=1),
        "neighbour_overlap": _neighbour_overlap(selected, documents),
        "selected_block_entropy": torch.special.entr(counts / count).sum(),
        "fewer_than_n_share": (chosen.sum(-1) < geometry.num_selected_blocks).float().mean(),
    }


def distance_bins(num_tokens: int, geometry: Geometry) -> int:
    """Bins of `selected_distance_shares`: 0, 1, 2-3, 4-7, … blocks, up to the longest distance."""
    longest = geometry.num_selection_blocks(num_tokens) - 1
    return 1 if longest == 0 else 2 + int(math.log2(longest))


def importance_covered(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    selected: Tensor,
    geometry: Geometry,
    scale: float,
    documents: Documents | None,
) -> Tensor:
    """How much of the importance (Eq. 9, 10) lies in the blocks that were chosen.

    Args:
        q: Queries, [T, H, D].
        k_cmp: Compressed keys, [C, G, D].
        lse: Log-sum-exp of the compressed scores, [T, H]; -inf where no block is visible.
        selected: Chosen blocks, [T, G, N].
        geometry: Block sizes, in tokens.
        scale: Factor on the scores.
        documents: Packed documents, if there are several.

    Returns:
        Mean share between 0 and 1 over evenly spaced queries that see a compressed block; 1 if none does.
    """
    num_queries, num_groups = q.shape[0], k_cmp.shape[1]
    sample = _evenly_spaced(num_queries, q.device)
    stride, block = geometry.compression_stride, geometry.selection_block_size
    if documents is None:
        positions, ids = torch.arange(num_queries, device=q.device), torch.zeros(num_queries, device=q.device)
        starts = torch.arange(k_cmp.shape[0], device=q.device) * stride
        block_ids = torch.zeros_like(starts)
    else:
        positions, ids = documents.positions, documents.ids
        layout = compressed_layout(documents, k_cmp.shape[0], geometry)
        starts, block_ids = layout.starts, layout.ids
    positions, ids = positions[sample], ids[sample]
    ends = starts + geometry.compression_block_size
    visible_TC = (block_ids == ids[:, None]) & (ends - 1 <= positions[:, None])

    q_TGRD = q[sample].float().unflatten(1, (num_groups, -1))
    scores_TGRC = torch.einsum("tgrd,cgd->tgrc", q_TGRD, k_cmp.float()) * scale
    lse_TGR = lse[sample].float().unflatten(1, (num_groups, -1))
    p_TGRC = (scores_TGRC - lse_TGR[..., None]).exp().masked_fill(~visible_TC[:, None, None], 0.0)

    first = torch.arange(geometry.num_selection_blocks(num_queries), device=q.device) * block
    overlap_CJ = (torch.minimum(ends[:, None], first + block) - torch.maximum(starts[:, None], first)).clamp(min=0)
    importance_TGJ = p_TGRC.sum(2) @ (overlap_CJ / stride).float()

    chosen = selected[sample]
    taken = importance_TGJ.gather(-1, chosen.clamp(min=0).long()).masked_fill(chosen < 0, 0.0).sum(-1)
    total = importance_TGJ.sum(-1)
    seen = total > 0
    share = torch.where(seen, taken / total.clamp(min=1e-30), 0.0).sum() / seen.sum().clamp(min=1)
    return torch.where(seen.any(), share, 1.0)


def _neighbour_overlap(selected: Tensor, documents: Documents | None) -> Tensor:
    later = _evenly_spaced(selected.shape[0] - 1, selected.device) + 1
    mine, before = selected[later], selected[later - 1]
    shared = (mine[..., :, None] == before[..., None, :]).any(-1) & (mine >= 0)
    valid = torch.ones_like(later, dtype=torch.bool)
    if documents is not None:
        valid = documents.ids[later] == documents.ids[later - 1]
    counted = (mine >= 0) & valid[:, None, None]
    return (shared & counted).sum() / counted.sum().clamp(min=1)


def _evenly_spaced(num_queries: int, device: torch.device) -> Tensor:
    count = min(max(num_queries, 0), _SAMPLED_QUERIES)
    return torch.linspace(0, max(num_queries - 1, 0), count, device=device).round().long()
