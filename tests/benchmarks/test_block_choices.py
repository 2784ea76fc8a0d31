"""Inputs and choices of blocks: valid for every query, and as alike between neighbours as their names say."""

import pytest
import torch

from lib.block_choices import blocks_of_4_neighbours, make_choice
from lib.shapes import AttentionShape, make_inputs
from trifocal.ops import Geometry

SHAPE = AttentionShape("", 2, 203, 4, 2, 16, 8)
GEOMETRY = Geometry(8, 4, 16, 4, 1, 1, 16)


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(SHAPE, GEOMETRY, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("choices", ["random", "smooth"])
def test_choices_are_valid(inputs, choices):
    chosen = make_choice(choices, inputs, GEOMETRY)
    assert chosen.shape == (2, 203, 2, 4) and chosen.dtype == torch.int32
    own = torch.arange(203)[:, None] // 16
    for batch in range(2):
        for group in range(2):
            rows = chosen[batch, :, group]
            present = rows >= 0
            assert torch.equal(present.sum(-1), (own[:, 0] + 1).clamp(max=4)), "as many as there are candidates"
            assert bool((rows <= own).all()), "nothing ahead"
            assert bool(((rows == 0).any(-1) & (rows == own).any(-1)).all()), "the forced ones"
            ascending = rows[:, 1:] > rows[:, :-1]
            assert bool((ascending | ~present[:, 1:]).all()), "ascending, pads last"


def test_a_smooth_choice_changes_slowly(inputs):
    random, smooth = (blocks_of_4_neighbours(make_choice(name, inputs, GEOMETRY)) for name in ("random", "smooth"))
    assert smooth < random
