"""Choices of blocks of three kinds, and the calls that take them.

- `random`: the attention's own choice on random inputs. Neighbours share little but the forced blocks.
- `smooth`: the best blocks by scores that drift slowly along the sequence.
- `real`: what a pretrained model reads, the file `real_choices.npz`. SmolLM2-135M-Instruct read 8,192 tokens of
  documentation, and each query and KV head chose the 16 blocks of 64 tokens with the largest attention mass, among them
  the first and the last two. The file has one KV head of each of the layers 2, 9, 23 and 28, as bits, [heads, blocks,
  tokens]: eight neighbours choose 1.38, 1.21, 1.98 and 1.50 times 16 blocks together from position 2,048 on, on average
  as many as in all 15 heads of layers 2, 9, 16, 23 and 28. A shorter sequence takes the beginning, which chose without
  the rest. Where there are more sequences and groups, the heads take turns.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lib.recorder import Unavailable
from trifocal.ops import (
    Geometry,
    compressed_attention,
    nsa_attention,
    select_blocks,
    select_blocks_by_index,
    selected_attention,
)
from trifocal.testing.inputs import Inputs

Choices = Literal["random", "smooth", "real"]
REAL = Path(__file__).parent / "real_choices.npz"
REAL_TOKENS = 8192
REAL_BLOCKS = {"selection_block_size": 64, "num_selected_blocks": 16, "num_initial_blocks": 1, "num_local_blocks": 2}
NEIGHBOURS = 8
# Queries whose block scores are in memory at a time while a smooth choice is made.
_CHUNK = 8192
_SMOOTH_FEATURES = 8
# Tokens between turns of the drift. At the paper's sizes eight neighbours then choose 1.6 n blocks in 8,192 tokens.
_SMOOTH_TOKENS = 8


def make_choice(choices: Choices, inputs: Inputs, geometry: Geometry) -> Tensor | None:
    """Selected blocks, [B, T, G, N], int32, ascending, -1 pads; None for those that the attention chooses by itself."""
    if choices == "random":
        return None
    made = _smooth if choices == "smooth" else _real
    return made(inputs.q.shape[0], inputs.q.shape[1], inputs.k_slc.shape[2], geometry, inputs.q.device)


def scored_choice(inputs: Inputs, geometry: Geometry) -> Callable[[], Tensor]:
    """A call that chooses blocks by scoring; the log-sum-exp of the compressed scores is made before."""
    tokens = inputs.q.shape[1]
    with torch.no_grad():
        _, lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, geometry, num_keys=tokens)
    return lambda: select_blocks(inputs.q, inputs.k_cmp, lse, geometry, num_keys=tokens)


def whole_call(inputs: Inputs, geometry: Geometry, choice: Tensor | None) -> Callable[..., Tensor]:
    """`nsa_attention`; where blocks are given, scoring runs beside, as if it had chosen them."""
    if choice is None:
        return lambda *leaves: nsa_attention(*leaves, geometry)
    choose = scored_choice(inputs, geometry)

    def attend(*leaves: Tensor) -> Tensor:
        choose()
        return nsa_attention(*leaves, geometry, selected_blocks=choice)

    return attend


def one_branch_call(
    index: tuple[Tensor, Tensor], geometry: Geometry, choice: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The selected branch, chosen by an index; where blocks are given, the index chooses beside them."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chosen = select_blocks_by_index(*index, geometry)
        return selected_attention(q, k, v, chosen if choice is None else choice, geometry)

    return attend


def blocks_of_neighbours(selected_blocks: Tensor) -> float | None:
    """Different blocks that eight adjacent queries of one group choose together, over N; the mean where all have N."""
    tokens = selected_blocks.shape[1] // NEIGHBOURS * NEIGHBOURS
    tiles = selected_blocks[:, :tokens].unflatten(1, (-1, NEIGHBOURS)).transpose(2, 3).flatten(3)
    ranked = tiles[(tiles >= 0).all(-1)].sort(-1).values
    if not len(ranked):
        return None
    different = (ranked[:, 1:] != ranked[:, :-1]).sum(-1) + 1
    return different.float().mean().item() / selected_blocks.shape[-1]


def _real(batch: int, tokens: int, groups: int, geometry: Geometry, device: torch.device) -> Tensor:
    wanted = {name: getattr(geometry, name) for name in REAL_BLOCKS}
    if wanted != REAL_BLOCKS or tokens > REAL_TOKENS:
        rules = "16 blocks of 64 tokens, 1 first and 2 local"
        raise Unavailable(f"real choices are those of up to {REAL_TOKENS:,} tokens and of {rules}")
    with np.load(REAL) as file:
        bits = torch.from_numpy(np.unpackbits(file["chosen"], axis=-1, count=tokens)).to(device).transpose(1, 2)
    blocks = bits.shape[-1]
    listed = torch.where(bits.bool(), torch.arange(blocks, device=device), blocks).sort(-1).values
    listed = listed[..., : geometry.num_selected_blocks]
    heads = torch.arange(batch * groups, device=device) % len(bits)
    chosen = listed.masked_fill(listed == blocks, -1).int()[heads].unflatten(0, (batch, groups))
    return chosen.transpose(1, 2).contiguous()


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
