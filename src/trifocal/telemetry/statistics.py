"""Figures about gates and selected blocks: pure functions of the layers' tensors.

All of them stay on the device. Shape letters as in DESIGN.md; the batch is one sequence, so B is left out. Leading
dimensions of the arguments, such as layers, are those of every figure.
"""

import math

import torch
from torch import Tensor

from trifocal.ops import Documents, Geometry
from trifocal.telemetry.maps import LayerAttention, block_importance, dense_block_mass, evenly_spaced

BRANCHES = ("cmp", "slc", "win")
IGNORED_GATE = 0.05
"""A head with a mean gate below this ignores the branch."""
_SAMPLED_PAIRS = 128
"""Pairs of neighbours to compare: enough for a mean, and bounded for any length."""


def attention_statistics(layer: LayerAttention) -> dict[str, Tensor]:
    """The figures of the four functions below."""
    return {
        **gate_statistics(layer.gates),
        **selection_statistics(layer.selected, layer.geometry, layer.documents),
        "importance_covered": importance_covered(layer),
        **dense_recall(layer),
    }


def gate_statistics(gates: Tensor) -> dict[str, Tensor]:
    """Describe the gates.

    Args:
        gates: [..., T, H, 3] in the order cmp, slc, win; NaN where there are none, and then so are the figures.

    Returns:
        For each branch b: `gate_mean_b` and `gate_spread_b` (standard deviation), over tokens and heads;
        `gate_share_b`, the branch's mean share in the sum of the three gates; `gate_entropy_b`, the mean entropy of the
        gate as a probability, in nats: ln 2 at 0.5, 0 when saturated and without gradient; `heads_ignoring_b`, the
        share of heads with a mean gate below IGNORED_GATE.
    """
    gates = gates.float()
    entropy = torch.special.entr(gates) + torch.special.entr(1 - gates)
    mean = gates.mean(-3)
    ignoring = (mean < IGNORED_GATE).float().where(~mean.isnan(), torch.nan).mean(-2)
    per_branch = {
        "gate_mean": gates.mean((-3, -2)),
        "gate_spread": gates.std((-3, -2), correction=0),
        "gate_share": (gates / gates.sum(-1, keepdim=True).clamp(min=1e-9)).mean((-3, -2)),
        "gate_entropy": entropy.mean((-3, -2)),
        "heads_ignoring": ignoring,
    }
    return {
        f"{name}_{branch}": value
        for name, values in per_branch.items()
        for branch, value in zip(BRANCHES, values.unbind(-1), strict=True)
    }


def selection_statistics(selected: Tensor, geometry: Geometry, documents: Documents | None) -> dict[str, Tensor]:
    """Describe the selected blocks.

    Args:
        selected: Selected blocks, [..., T, G, N], -1 pads, counted from the start of the query's document.
        geometry: Block sizes, in tokens.
        documents: Packed documents, if there are several.

    Returns:
        `selected_distance_shares` [..., bins]: share of the selected blocks that lie 0, 1, 2-3, 4-7, … blocks before
        the query's own; `selected_forced_share`: share of forced blocks; `free_local_share`: among the free blocks of
        queries with more candidates than n, the share inside the window (0 without such blocks);
        `neighbour_overlap`: share of a query's blocks that the query before it selected too;
        `selected_block_entropy`: entropy of the selected blocks over their indices, in nats;
        `selected_count_shares` [..., n + 1]: share of the queries of a group that select 0, 1, …, n blocks;
        `fewer_than_n_share`: share of those with fewer than n.
    """
    num_queries, device = selected.shape[-3], selected.device
    positions = torch.arange(num_queries, device=device) if documents is None else documents.positions
    own = (positions // geometry.selection_block_size)[:, None, None]
    chosen = selected >= 0
    every = (-3, -2, -1)
    count = chosen.sum(every).clamp(min=1)
    weights = chosen.float().flatten(-3)

    distance = torch.where(chosen, own - selected, 0)
    bins = distance_bins(num_queries, geometry)
    edges = 2 ** torch.arange(bins - 1, device=device)
    bin_of = torch.bucketize(distance, edges, right=True)
    leading = selected.shape[:-3]
    bin_counts = torch.zeros(*leading, bins, device=device).scatter_add_(-1, bin_of.flatten(-3), weights)

    forced = chosen & ((selected < geometry.num_initial_blocks) | (selected > own - geometry.num_local_blocks))
    has_choice = own + 1 > geometry.num_selected_blocks
    free = chosen & ~forced & has_choice
    # The window reaches back w - 1 tokens; a block is seen whole if its first token is.
    in_window = positions[:, None, None] - selected * geometry.selection_block_size < geometry.window_size

    of_query = chosen.sum(-1)
    kinds = torch.arange(geometry.num_selected_blocks + 1, device=device)
    count_shares = (of_query[..., None] == kinds).float().mean((-3, -2))

    blocks = torch.where(chosen, selected, 0).flatten(-3).long()
    counts = torch.zeros(*leading, geometry.num_selection_blocks(num_queries), device=device)
    counts.scatter_add_(-1, blocks, weights)
    return {
        "selected_distance_shares": bin_counts / count[..., None],
        "selected_forced_share": forced.sum(every) / count,
        "free_local_share": (free & in_window).sum(every) / free.sum(every).clamp(min=1),
        "neighbour_overlap": _neighbour_overlap(selected, documents),
        "selected_block_entropy": torch.special.entr(counts / count[..., None]).sum(-1),
        "selected_count_shares": count_shares,
        "fewer_than_n_share": 1 - count_shares[..., -1],
    }


def distance_bins(num_tokens: int, geometry: Geometry) -> int:
    """Bins of `selected_distance_shares`: 0, 1, 2-3, 4-7, … blocks, up to the longest distance."""
    longest = geometry.num_selection_blocks(num_tokens) - 1
    return 1 if longest == 0 else 2 + int(math.log2(longest))


def importance_covered(layer: LayerAttention) -> Tensor:
    """Share of the importance (Eq. 9, 10) in the selected blocks.

    Args:
        layer: Tensors of the layer.

    Returns:
        Mean share between 0 and 1 over sampled queries that see a compressed block; 1 if none does.
    """
    queries = layer.sampled_queries()
    importance, chosen = block_importance(layer, queries), layer.selected[..., queries, :, :]
    taken, total = _taken(importance, chosen), importance.sum(-1)
    seen = total > 0
    share = torch.where(seen, taken / total.clamp(min=1e-30), 0.0).sum((-2, -1)) / seen.sum((-2, -1)).clamp(min=1)
    return torch.where(seen.any(-1).any(-1), share, 1.0)


def dense_recall(layer: LayerAttention) -> dict[str, Tensor]:
    """Agreement of the selection with full attention over the selected branch's keys, at sampled queries.

    Only queries with more candidates than n count: the others read everything.

    Args:
        layer: Tensors of the layer.

    Returns:
        `dense_recall`: share of selected blocks among the n blocks with the most probability of full attention;
        `dense_mass_covered`: share of that probability inside the selected blocks; `recall_by_chance`: the recall of n
        random blocks, mean of n / candidates. All NaN if no query has more candidates than n.
    """
    queries, geometry = layer.sampled_queries(), layer.geometry
    mass, chosen = dense_block_mass(layer, queries), layer.selected[..., queries, :, :]
    candidates = layer.positions[queries] // geometry.selection_block_size + 1
    has_choice = (candidates > geometry.num_selected_blocks).float()
    top = mass.topk(min(geometry.num_selected_blocks, mass.shape[-1]), dim=-1).indices
    found = (top[..., :, None] == chosen[..., None, :]).any(-1).float().mean((-1, -2))
    count = has_choice.sum()
    chance = (geometry.num_selected_blocks / candidates * has_choice).sum() / count
    return {
        "dense_recall": (found * has_choice).sum(-1) / count,
        "dense_mass_covered": (_taken(mass, chosen).mean(-1) * has_choice).sum(-1) / count,
        "recall_by_chance": chance.expand(found.shape[:-1]),
    }


def _taken(weights: Tensor, chosen: Tensor) -> Tensor:
    """Sum over the selected blocks: [..., Q, G] from weights [..., Q, G, J] and blocks [..., Q, G, N]."""
    return weights.gather(-1, chosen.clamp(min=0).long()).masked_fill(chosen < 0, 0.0).sum(-1)


def _neighbour_overlap(selected: Tensor, documents: Documents | None) -> Tensor:
    later = evenly_spaced(selected.shape[-3] - 1, _SAMPLED_PAIRS, selected.device) + 1
    mine, before = selected[..., later, :, :], selected[..., later - 1, :, :]
    shared = (mine[..., :, None] == before[..., None, :]).any(-1) & (mine >= 0)
    valid = torch.ones_like(later, dtype=torch.bool)
    if documents is not None:
        valid = documents.ids[later] == documents.ids[later - 1]
    counted = (mine >= 0) & valid[:, None, None]
    every = (-3, -2, -1)
    return (shared & counted).sum(every) / counted.sum(every).clamp(min=1)
