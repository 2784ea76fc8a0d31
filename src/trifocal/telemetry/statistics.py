"""Figures about gates and selected blocks, which docs/diagnostics.md defines: pure functions of the layers' tensors.

All of them stay on the device. Shape letters as in DESIGN.md; the batch is one sequence. Leading dimensions of
the arguments are those of every figure.
"""

import math

import torch
from torch import Tensor

from trifocal.ops import Documents, Geometry
from trifocal.ops.choice_loss import choice_shares, free_blocks, free_places, num_free
from trifocal.telemetry.maps import LayerAttention, evenly_spaced, full_attention_shares

BRANCHES = ("cmp", "slc", "win")
NEIGHBOURS = (4, 8, 16)
"""Neighbouring queries whose blocks are counted together: the tiles that a kernel may take."""
_SAMPLED_PAIRS = 128
"""Pairs or tiles of neighbours to compare: enough for a mean, and bounded for any length."""


def attention_statistics(layer: LayerAttention) -> dict[str, Tensor]:
    """The figures of the three functions below, NaN where they are of branches that the layer has not."""
    found = {
        **gate_statistics(layer.gates),
        **selection_statistics(layer.selected, layer.geometry, layer.documents),
        **choice_statistics(layer),
    }
    # Without gates there is no window.
    found["free_local_share"] = found["free_local_share"].where(~found["gate_mean_win"].isnan(), torch.nan)
    return found


def gate_statistics(gates: Tensor) -> dict[str, Tensor]:
    """Describe gates [..., T, H, 3] in the order cmp, slc, win; NaN where there are none, as the figures then are."""
    gates = gates.float()
    entropy = torch.special.entr(gates) + torch.special.entr(1 - gates)
    per_branch = {
        "gate_mean": gates.mean((-3, -2)),
        "gate_share": (gates / gates.sum(-1, keepdim=True).clamp(min=1e-9)).mean((-3, -2)),
        "gate_entropy": entropy.mean((-3, -2)),
    }
    return {
        f"{name}_{branch}": value
        for name, values in per_branch.items()
        for branch, value in zip(BRANCHES, values.unbind(-1), strict=True)
    }


def selection_statistics(selected: Tensor, geometry: Geometry, documents: Documents | None) -> dict[str, Tensor]:
    """Describe selected blocks [..., T, G, N], -1 pads, counted from the start of the query's document."""
    num_queries, device = selected.shape[-3], selected.device
    positions = torch.arange(num_queries, device=device) if documents is None else documents.positions
    own = (positions // geometry.selection_block_size)[:, None, None]
    chosen = selected >= 0
    every = (-3, -2, -1)
    count = chosen.sum(every).clamp(min=1)
    distance = torch.where(chosen, own - selected, 0)

    forced = chosen & ((selected < geometry.num_initial_blocks) | (selected > own - geometry.num_local_blocks))
    has_choice = own + 1 > geometry.num_selected_blocks
    free = chosen & ~forced & has_choice
    # The window reaches back w - 1 tokens; a block is seen whole if its first token is.
    in_window = positions[:, None, None] - selected * geometry.selection_block_size < geometry.window_size

    of_query = chosen.sum(-1)
    kinds = torch.arange(geometry.num_selected_blocks + 1, device=device)
    count_shares = (of_query[..., None] == kinds).float().mean((-3, -2))
    return {
        "selected_distance_shares": _by_distance(distance, chosen.float(), num_queries, geometry) / count[..., None],
        "selected_forced_share": forced.sum(every) / count,
        "free_local_share": (free & in_window).sum(every) / free.sum(every).clamp(min=1),
        "neighbour_overlap": _neighbour_overlap(selected, documents),
        "blocks_of_neighbours": torch.stack(
            [_blocks_of_tiles(selected, positions, has_choice[:, 0, 0], number) for number in NEIGHBOURS], dim=-1
        )
        / geometry.num_selected_blocks,
        "selected_count_shares": count_shares,
        "fewer_than_n_share": 1 - count_shares[..., -1],
    }


def distance_bins(num_tokens: int, geometry: Geometry) -> int:
    """Bins of `selected_distance_shares`: 0, 1, 2-3, 4-7, … blocks, up to the longest distance."""
    longest = geometry.num_selection_blocks(num_tokens) - 1
    return 1 if longest == 0 else 2 + int(math.log2(longest))


def choice_statistics(layer: LayerAttention) -> dict[str, Tensor]:
    """Compare the choice with the exact one, by full attention over the selected branch's keys, at sampled queries with
    more free candidates than free places; NaN if there are none.
    """
    queries, geometry = layer.sampled_queries(), layer.geometry
    mass, sample = full_attention_shares(layer, queries), layer.sample(queries)
    own = (layer.positions[queries] // geometry.selection_block_size)[:, None]
    block = torch.arange(mass.shape[-1], device=mass.device)
    free = free_blocks(sample, geometry, mass.shape[-1])
    held, best = choice_shares(mass, layer.selected[:, queries], free, sample.eligible, geometry)
    every, _ = choice_shares(mass, block.expand_as(mass), free, sample.eligible, geometry)
    count = best.sum((1, 2, 3))
    drawn = free_places(geometry) / num_free(own, geometry).clamp(min=1)

    distance = (own - block).clamp(min=0)[:, None]
    by_distance = [_by_distance(distance, shares, len(layer.positions), geometry) for shares in (held, best)]
    return {
        "choice_recall": held.sum((1, 2, 3)) / count,
        "recall_by_chance": (every.sum((2, 3)) * drawn[:, 0]).sum(1) / count,
        "exact_mass_by_distance": by_distance[1] / count[:, None],
        "held_mass_by_distance": by_distance[0] / count[:, None],
    }


def _by_distance(distance: Tensor, shares: Tensor, num_tokens: int, geometry: Geometry) -> Tensor:
    """Sums of shares [..., T, G, *] by their distance in blocks, [..., bins]."""
    bins = distance_bins(num_tokens, geometry)
    bin_of = torch.bucketize(distance, 2 ** torch.arange(bins - 1, device=shares.device), right=True)
    sums = shares.new_zeros(*shares.shape[:-3], bins)
    return sums.scatter_add_(-1, bin_of.expand_as(shares).flatten(-3), shares.flatten(-3))


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


def _blocks_of_tiles(selected: Tensor, positions: Tensor, counted: Tensor, queries: int) -> Tensor:
    """Mean number of blocks that any of some neighbours in one document selected; tiles begin at their multiples."""
    tiles = selected.shape[-3] // queries
    if not tiles:
        return selected.new_full(selected.shape[:-3], math.nan, dtype=torch.float32)
    first = evenly_spaced(tiles, _SAMPLED_PAIRS, selected.device) * queries
    of_tile = selected[..., first[:, None] + torch.arange(queries, device=first.device), :, :]
    ordered = of_tile.transpose(-3, -2).flatten(-2).sort(-1).values
    new = (ordered[..., 1:] != ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    blocks = new.sum(-1) + (ordered[..., 0] >= 0)
    valid = counted[first] & (positions[first + queries - 1] - positions[first] == queries - 1)
    return (blocks * valid[:, None]).sum((-2, -1)) / (valid.sum() * blocks.shape[-1])
