"""Choices of blocks: valid for every query, and as alike between neighbours as their names say; and what takes them."""

import pytest
import torch

from lib.block_choices import blocks_of_neighbours, make_choice, one_branch_call, scored_choice, whole_call
from lib.choice_problem import random_index
from lib.shapes import AttentionShape, make_inputs
from trifocal.ops import Geometry, nsa_attention, select_blocks_by_index, selected_attention

SHAPE = AttentionShape("", 2, 203, 4, 2, 16, 8)
CPU = torch.device("cpu")
GEOMETRY = Geometry(8, 4, 16, 4, 1, 1, 16)


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(SHAPE, GEOMETRY, CPU, torch.float32)


def check(chosen, geometry):
    """As many blocks as there are, up to n; none ahead; the forced ones; ascending."""
    tokens, slots = chosen.shape[1], chosen.shape[3]
    own = torch.arange(tokens)[:, None] // geometry.selection_block_size
    assert chosen.dtype == torch.int32 and slots == geometry.num_selected_blocks
    for rows in chosen.transpose(1, 2).flatten(0, 1):
        present = rows >= 0
        assert torch.equal(present.sum(-1), (own[:, 0] + 1).clamp(max=slots)), "as many as there are candidates"
        assert bool((rows <= own).all()), "nothing ahead"
        assert bool(((rows == 0).any(-1) & (rows == own).any(-1)).all()), "the forced ones"
        ascending = rows[:, 1:] > rows[:, :-1]
        assert bool((ascending | ~present[:, 1:]).all()), "ascending, pads last"


@pytest.mark.parametrize("choices", ["random", "smooth"])
def test_choices_are_valid(inputs, choices):
    given = make_choice(choices, inputs, GEOMETRY)
    assert (given is None) == (choices == "random"), "random ones are the attention's own"
    chosen = scored_choice(inputs, GEOMETRY)() if given is None else given
    assert chosen.shape == (2, 203, 2, 4)
    check(chosen, GEOMETRY)


def test_a_smooth_choice_changes_slowly(inputs):
    random = blocks_of_neighbours(scored_choice(inputs, GEOMETRY)())
    assert 1 <= blocks_of_neighbours(make_choice("smooth", inputs, GEOMETRY)) < random


def test_real_choices_are_those_of_a_model():
    """In a row of 8,192 tokens, whose first half is a shorter row's; more groups than there are heads."""
    whole, half = (
        make_choice("real", make_inputs(AttentionShape("", *sizes, 8, 8), Geometry(), CPU, torch.float32), Geometry())
        for sizes in ((1, 8192, 4, 4), (2, 4100, 3, 3))
    )
    check(whole, Geometry())
    assert torch.equal(
        half.transpose(1, 2).flatten(0, 1)[[0, 1, 2, 3, 4]], whole[0, :4100].transpose(0, 1)[[0, 1, 2, 3, 0]]
    )
    unions = [blocks_of_neighbours(whole[:, 2048:, [head]]) for head in range(4)]
    assert unions == pytest.approx([1.38, 1.21, 1.98, 1.50], abs=0.005)


def test_blocks_of_neighbours_counts_each_once():
    chosen = torch.tensor([[0, 1, -1]] * 8 + [[0, 1, 2]] * 4 + [[0, 2, 3]] * 4 + [[0, 5, 6]] * 3).view(1, -1, 1, 3)
    assert blocks_of_neighbours(chosen) == pytest.approx(4 / 3), "the first tile is not full, the last too short"
    assert blocks_of_neighbours(chosen[:, :8]) is None


def test_calls_take_the_given_blocks_or_their_own(inputs):
    index = random_index(SHAPE, CPU, torch.float32)
    given, branch = make_choice("smooth", inputs, GEOMETRY), (inputs.q, inputs.k_slc, inputs.v_slc)
    by_index = select_blocks_by_index(*index, GEOMETRY)
    for choice in (None, given):
        expected = nsa_attention(*inputs, GEOMETRY, selected_blocks=choice)
        assert torch.equal(whole_call(inputs, GEOMETRY, choice)(*inputs), expected)
        expected = selected_attention(*branch, by_index if choice is None else choice, GEOMETRY)
        assert torch.equal(one_branch_call(index, GEOMETRY, choice)(*branch), expected)
