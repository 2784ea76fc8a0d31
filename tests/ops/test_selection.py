"""The choice of blocks: importance by hand, exact ties, forced blocks, and blocks that are never chosen."""

import pytest
import torch

from tests.ops import cases
from tests.ops.cases import geometry
from trifocal import ops


def test_ties_of_zero_take_the_lower_index():
    """lse so large that every probability underflows to 0: nothing is more important than anything."""
    g = cases.ONE_SIZE
    q, k = torch.ones(1, 40, 2, 4), torch.ones(1, 10, 1, 4)
    chosen = ops.select_blocks(q, k, torch.full((1, 40, 2), 1e9), g)
    assert chosen[0, 39, 0].tolist() == [0, 1, 8, 9]


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("heads", [9, 16])
def test_many_heads_tie_exactly_at_every_length(dtype, heads):
    """Zero queries after a real softmax, whose 1/C is rounded: the heads' sum must be the same up to the last block."""
    g = geometry(4, 2, 8, 4, 1, 0, 8)
    for num_keys in (118, 333):
        q = torch.zeros(1, 1, heads, 4, dtype=dtype)
        k = torch.ones(1, g.num_compressed_blocks(num_keys), 1, 4, dtype=dtype)
        _, lse = ops.compressed_attention(q, k, k, g, num_keys=num_keys)
        chosen = ops.select_blocks(q, k, lse, g, num_keys=num_keys)
        # Block 0 is forced; it and the last one overlap fewer compressed blocks than those between.
        assert chosen.flatten().tolist() == [0, 1, 2, 3], num_keys


def test_order_and_repetition_of_the_choice_do_not_matter():
    case = cases.named("odd length")
    inputs = cases.draw(case)
    ordered = torch.tensor([0, 1, -1]).expand(2, 37, 2, 3)
    shuffled = torch.tensor([1, -1, 0, 1, 0]).expand(2, 37, 2, 5)
    results = [
        ops.selected_attention(inputs.q, inputs.k_slc, inputs.v_slc, choice, case.geometry)
        for choice in (ordered, shuffled, shuffled.int())
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
