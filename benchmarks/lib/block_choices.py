"""Choices of blocks of two kinds, for a benchmark that gives them to the attention."""

from typing import Literal

import torch
from torch import Tensor

from trifocal.ops import Geometry, compressed_attention, select_blocks
from trifocal.testing.inputs import Inputs

Choices = Literal["random", "smooth"]
# Queries whose block scores are in memory at a time while a smooth choice is made.
_CHUNK = 8192
_SMOOTH_FEATURES = 8
# Tokens between turns of the drift. At the paper's sizes four neighbours then choose about 22 different blocks out of
# 65,536 tokens, as against 51 at random.
_SMOOTH_TOKENS = 8


def make_choice(choices: Choices, inputs: Inputs, geometry: Geometry) -> Tensor:
    """Selected blocks, [B, T, G, N], int32, ascending, -1 pads.

    "random" is the choice of scoring on random inputs: neighbours share little but the forced blocks. "smooth" is the
    best by scores that drift slowly along the sequence, as in trained models: neighbours share most blocks.
    """
    with torch.no_grad():
        if choices == "random":
            tokens = inputs.q.shape[1]
            _, lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, geometry, num_keys=tokens)
            return select_blocks(inputs.q, inputs.k_cmp, lse, geometry, num_keys=tokens)
        batch, tokens, groups = inputs.q.shape[0], inputs.q.shape[1], inputs.k_slc.shape[2]
        return _smooth(batch, tokens, groups, geometry, inputs.q.device)


def blocks_of_4_neighbours(selected_blocks: Tensor) -> float:
    """Different blocks that four adjacent queries of one group choose together, on average."""
    tokens = selected_blocks.shape[1] // 4 * 4
    tiles = selected_blocks[:, :tokens].unflatten(1, (-1, 4)).transpose(2, 3).flatten(3)
    ranked = tiles.sort(-1).values
    different = torch.ones_like(ranked, dtype=torch.bool)
    different[..., 1:] = ranked[..., 1:] != ranked[..., :-1]
    return (different & (ranked >= 0)).sum(-1).float().mean().item()


def _smooth(batch: int, tokens: int, groups: int, geometry: Geometry, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    blocks, slots = geometry.num_selection_blocks(tokens), geometry.num_selected_blocks
    # A taste that changes in small steps; every block has its own flavour.
    knots = torch.randn(
        batch * groups * _SMOOTH_FEATURES, 1, tokens // _SMOOTH_TOKENS + 2, generator=generator, device=device
    )
    walk = torch.nn.functional.interpolate(knots, size=tokens, mode="linear")
    walk = walk.view(batch, groups, _SMOOTH_FEATURES, tokens).permute(0, 3, 1, 2)
    flavour = torch.randn(_SMOOTH_FEATURES, blocks, generator=generator, device=device)
    block = torch.arange(blocks, device=device)
    chosen = torch.full((batch, tokens, groups, slots), -1, dtype=torch.int32, device=device)
    for first in range(0, tokens, _CHUNK):
        scores = walk[:, first : first + _CHUNK] @ flavour
        own = (
            torch.arange(first, first + scores.shape[1], device=device)[:, None, None] // geometry.selection_block_size
        )
        forced = (block < geometry.num_initial_blocks) | (block > own - geometry.num_local_blocks)
        scores = scores.masked_fill(forced, torch.inf).masked_fill(block > own, -torch.inf)
        best = scores.topk(min(slots, blocks), dim=-1)
        index = best.indices.masked_fill(best.values == -torch.inf, blocks).sort(-1).values
        chosen[:, first : first + _CHUNK, :, : index.shape[-1]] = index.masked_fill(index == blocks, -1).int()
    return chosen
