"""Choices drawn at random: the control that shows whether the choice of blocks matters."""

import torch
from torch import Tensor

from trifocal.ops import Geometry
from trifocal.ops.choice_loss import hash_numbers


def random_blocks(positions: Tensor, geometry: Geometry, num_kv_heads: int, layer: int) -> Tensor:
    """The forced blocks, and others drawn uniformly from the rest of the candidates, without replacement.

    A hash of position, layer and KV head draws, so that the same call gives the same choice: in a forward pass that is
    made again, and after a resume.

    Args:
        positions: Position of each query in its document, [T].
        geometry: Block sizes, in tokens.
        num_kv_heads: G.
        layer: Number of the layer.

    Returns:
        Block indices as of `trifocal.ops.select_blocks`, [1, T, G, N], int32, ascending; -1 pads.
    """
    total, first, last = geometry.num_selected_blocks, geometry.num_initial_blocks, geometry.num_local_blocks
    device, drawn = positions.device, total - first - last
    positions_T1 = positions.long()[:, None]
    own_T1 = positions_T1 // geometry.selection_block_size
    keys_TG = positions_T1 * num_kv_heads + torch.arange(num_kv_heads, device=device)
    numbers_TGN = hash_numbers(
        hash_numbers(keys_TG + (layer + 1) * 0x9E3779B9)[..., None] + torch.arange(drawn, device=device)
    )
    # Floyd's way to draw a subset: number i of the candidates up to one more each time, or else the newest of them.
    newest_T1 = own_T1 + 1 - first - last - drawn
    chosen: list[Tensor] = []
    for number_TG in numbers_TGN.unbind(-1):
        pick_TG = number_TG % (newest_T1.clamp(min=0) + 1)
        taken_TG = torch.zeros_like(pick_TG, dtype=torch.bool)
        for other_TG in chosen:
            taken_TG |= pick_TG == other_TG
        chosen.append(torch.where(taken_TG, newest_T1, pick_TG))
        newest_T1 = newest_T1 + 1
    forced = [torch.full_like(keys_TG, block) for block in range(first)]
    local = [(own_T1 - back).expand_as(keys_TG) for back in range(last)]
    blocks_TGN = torch.stack([*forced, *(first + pick_TG for pick_TG in chosen), *local], dim=-1).sort(-1).values
    # With no more candidates than n, all of them.
    all_N = torch.arange(total, device=device)
    own_T11 = own_T1[..., None]
    every_T1N = all_N.where(all_N <= own_T11, -1)
    return blocks_TGN.where(own_T11 >= total, every_T1N).to(torch.int32)[None]
