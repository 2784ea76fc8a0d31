"""Blocks drawn at random: the forced ones always, the rest uniformly, the same in every call."""

import torch

from trifocal.nn.random_selection import random_blocks
from trifocal.ops import Geometry

GEOMETRY = Geometry(4, 2, 8, num_selected_blocks=6, num_initial_blocks=1, num_local_blocks=2, window_size=7)


def test_forced_blocks_are_there_and_none_is_twice_or_ahead() -> None:
    positions = torch.arange(200)
    blocks = random_blocks(positions, GEOMETRY, 3, layer=1)
    assert blocks.shape == (1, 200, 3, 6) and blocks.dtype == torch.int32
    own = (positions // 8)[:, None, None]
    row = blocks[0]
    few = (own < 6).expand_as(row)
    assert torch.equal(row[few], torch.arange(6).where(torch.arange(6) <= own, -1).expand_as(row).to(torch.int32)[few])
    many = row[48:]
    assert (many.diff(dim=-1) > 0).all() and (many <= own[48:]).all()
    for forced in (torch.zeros_like(own), own - 1, own):
        assert (many == forced[48:]).any(-1).all()


def test_the_rest_is_drawn_uniformly() -> None:
    # At one position in many layers: 11 blocks to draw 3 of.
    drawn = torch.cat([random_blocks(torch.tensor([8 * 13]), GEOMETRY, 8, layer)[0, 0] for layer in range(500)])
    counts = torch.bincount(drawn.flatten().long(), minlength=14)
    assert (counts[[0, 12, 13]] == 4000).all()
    # Each of 11 blocks is expected 4000 * 3 / 11 times, with a standard deviation below 29.
    assert (counts[1:12] - 4000 * 3 / 11).abs().max() < 5 * 29
    pairs = {tuple(row.tolist()) for row in drawn}
    assert len(pairs) == 11 * 10 * 9 // 6


def test_a_choice_depends_on_position_layer_and_head_alone() -> None:
    positions = torch.arange(300)
    blocks = random_blocks(positions, GEOMETRY, 2, layer=0)
    assert torch.equal(random_blocks(positions[250:], GEOMETRY, 2, layer=0), blocks[:, 250:])
    assert not torch.equal(random_blocks(positions, GEOMETRY, 2, layer=1), blocks)
    assert not torch.equal(blocks[:, :, 0], blocks[:, :, 1])
