"""The choice of blocks: importance by hand, exact ties, forced blocks, and blocks that are never chosen."""

import pytest
import torch

from tests.ops import cases
from tests.ops.cases import geometry
from trifocal import Geometry, ops


def choose(probabilities, geometry, position, num_keys=None):
    """Blocks that the query at `position` chooses when compressed block i has the given probability.

    One head, one dim, q = 1, lse = 0: the probability of a block is the exponential of its key.
    """
    num_keys = position + 1 if num_keys is None else num_keys
    keys = torch.tensor(probabilities, dtype=torch.float64).log().view(1, -1, 1, 1)
    assert keys.shape[1] == geometry.num_compressed_blocks(num_keys)
    queries = num_keys - position
    q, lse = torch.ones(1, queries, 1, 1, dtype=torch.float64), torch.zeros(1, queries, 1, dtype=torch.float64)
    chosen = ops.select_blocks(q, keys, lse, geometry, num_keys=num_keys, scale=1.0)
    return [block for block in chosen[0, 0, 0].tolist() if block >= 0]


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [
        ((32, 16, 64), (1, 2, 2, 2, 1)),
        ((32, 32, 64), (1, 1)),
        ((16, 16, 16), (1,)),
        ((8, 2, 8), (1, 2, 3, 4, 3, 2, 1)),
        ((6, 3, 9), (1, 2, 2, 1)),
        ((12, 4, 20), (1, 2, 3, 3, 3, 2, 1)),
    ],
)
def test_importance_weights_by_hand(sizes, weights):
    """Block 5 is given one compressed block after the other; a rival of block 9 tells what each is worth."""
    size, stride, selection = sizes
    g = Geometry(size, stride, selection, 3, 1, 1, 8)
    position = 14 * selection - 1
    blocks = g.num_compressed_blocks(position + 1)
    inside_nine = 9 * selection // stride  # starts with block 9, so it lies wholly inside
    first = 5 * selection // stride - (size // stride - 1)
    for tap, weight in enumerate(weights):
        for factor, wins in ((1 + 1e-6, True), (1 - 1e-6, False)):
            p = [0.0] * blocks
            p[first + tap] = 1.0
            p[inside_nine] = weight / (size / stride) / factor
            scores = {5: weight, 9: weight / factor}
            # A compressed block across a border also feeds the neighbour; where it feeds it more, that one wins.
            rest = size / stride - weight
            if rest > 0:
                neighbour = 4 if tap < len(weights) // 2 else 6
                scores[neighbour] = scores.get(neighbour, 0) + rest
            best = max(sorted(scores), key=lambda j: scores[j])
            assert choose(p, g, position) == [0, best, 13]
            if rest < weight:
                assert (best == 5) == wins


def test_heads_of_a_group_share_one_choice_and_groups_do_not():
    """Head 0 likes block 1 a little, head 1 likes block 2 a lot: the sum decides. The other group likes block 3."""
    g = geometry(4, 4, 4, 3, 1, 1, 4)
    k = torch.zeros(1, 6, 2, 3, dtype=torch.float64)
    k[0, 1, 0, 0] = k[0, 2, 0, 1] = k[0, 3, 1, 2] = 1.0
    q = torch.zeros(1, 1, 4, 3, dtype=torch.float64)
    q[0, 0, 0, 0], q[0, 0, 1, 1], q[0, 0, 2:, 2] = 1.0, 3.0, 1.0
    chosen = ops.select_blocks(q, k, torch.zeros(1, 1, 4).double(), g, num_keys=24, scale=1.0)
    assert chosen[0, 0].tolist() == [[0, 2, 5], [0, 3, 5]]


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_exact_ties_take_the_lower_index(dtype, heads):
    """Zero queries and lse = 0: every visible block has probability exactly 1, every inner block the same sum."""
    g = geometry(32, 16, 64, 5, 1, 2, 512)
    q = torch.zeros(2, 1, heads, 4, dtype=dtype)
    k = torch.randn(2, g.num_compressed_blocks(704), 1, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    chosen = ops.select_blocks(q, k, torch.zeros(2, 1, heads), g, num_keys=704)
    assert chosen[:, 0, 0].tolist() == [[0, 1, 2, 9, 10]] * 2


def test_ties_of_zero_take_the_lower_index():
    """lse so large that every probability underflows to 0: nothing is more important than anything."""
    g = cases.ONE_SIZE
    q, k = torch.ones(1, 40, 2, 4), torch.ones(1, 10, 1, 4)
    chosen = ops.select_blocks(q, k, torch.full((1, 40, 2), 1e9), g)
    assert chosen[0, 39, 0].tolist() == [0, 1, 8, 9]


def test_equal_compressed_blocks_tie_after_a_real_softmax():
    """Repeated keys give exactly equal importance, for any values."""
    g = geometry(8, 4, 16, 4, 1, 1, 8)
    generator = torch.Generator().manual_seed(3)
    period = torch.randn(1, 4, 1, 16, generator=generator)
    k = period.repeat(1, 40, 1, 1)[:, : g.num_compressed_blocks(640)]
    q = torch.randn(1, 640, 6, 16, generator=generator)
    _, lse = ops.compressed_attention(q, k, k, g)
    chosen = ops.select_blocks(q, k, lse, g)
    last = chosen[0, 639, 0].tolist()
    assert last == [0, 1, 2, 39]


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("heads", [9, 12, 16])
def test_many_heads_tie_exactly_at_every_length(dtype, heads):
    """Zero queries after a real softmax, whose 1/C is rounded: the heads' sum must be the same up to the last block."""
    g = geometry(4, 2, 8, 4, 1, 0, 8)
    for num_keys in (100, 118, 333, 512):
        q = torch.zeros(1, 1, heads, 4, dtype=dtype)
        k = torch.ones(1, g.num_compressed_blocks(num_keys), 1, 4, dtype=dtype)
        _, lse = ops.compressed_attention(q, k, k, g, num_keys=num_keys)
        chosen = ops.select_blocks(q, k, lse, g, num_keys=num_keys)
        # Block 0 is forced; it and the last one overlap fewer compressed blocks than those between.
        assert chosen.flatten().tolist() == [0, 1, 2, 3], num_keys


def test_forced_blocks_near_the_start():
    """l' = 4, n = 4, 1 + 2 forced; the free slot goes to the best of the rest, and duplicates count once."""
    g = geometry(4, 4, 4, 4, 1, 2, 4)
    k = torch.tensor([0.0, 1, 2, 9, 3, 4, 5]).view(1, 7, 1, 1)
    q, lse = torch.ones(1, 28, 1, 1), torch.zeros(1, 28, 1)
    chosen = ops.select_blocks(q, k, lse, g, scale=1.0)[0, :, 0].tolist()
    by_block = [[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3]]
    assert chosen[:16] == [row for row in by_block for _ in range(4)]
    assert chosen[16:20] == [[0, 2, 3, 4]] * 4  # own 4, before it 3; 2 beats 1
    assert chosen[20:24] == [[0, 3, 4, 5]] * 4
    assert chosen[24:28] == [[0, 3, 5, 6]] * 4


def test_without_forced_local_blocks_the_own_block_has_to_earn_its_place():
    g = geometry(4, 4, 4, 2, 1, 0, 4)
    k = torch.tensor([0.0, 5, 1, 1]).view(1, 4, 1, 1)
    q, lse = torch.ones(1, 16, 1, 1), torch.zeros(1, 16, 1)
    chosen = ops.select_blocks(q, k, lse, g, scale=1.0)[0, :, 0].tolist()
    assert chosen[:4] == [[0, -1]] * 4
    assert chosen[4:8] == [[0, 1]] * 4  # all candidates, though the own block's compressed block is not visible yet
    assert chosen[8:] == [[0, 1]] * 8


def test_more_forced_initial_blocks_than_candidates():
    g = geometry(4, 4, 4, 5, 3, 2, 4)
    q, lse = torch.ones(1, 6, 1, 1), torch.zeros(1, 6, 1)
    chosen = ops.select_blocks(q, torch.ones(1, 1, 1, 1), lse, g)[0, :, 0].tolist()
    assert chosen == [[0, -1, -1, -1, -1]] * 4 + [[0, 1, -1, -1, -1]] * 2


def test_only_the_first_visible_compressed_blocks_count():
    """At position 22 the block of tokens 16-23 (i = 4) is not complete: its huge score must not be felt."""
    g = geometry(8, 4, 8, 3, 1, 1, 4)
    p = [1.0, 1.0, 3.0, 1.0, 1e30]
    # Selection block 1 (tokens 8-15) against nobody else: blocks 0, 1, 2 are all there are.
    assert choose(p, g, 22, num_keys=24) == [0, 1, 2]
    p = [1.0, 1.0, 1.0, 1.0, 1.0, 1e30, 1.0, 1.0, 1.0]
    assert choose(p, g, 26, num_keys=40) == [0, 1, 3]  # i = 5 covers 20-27; it would lift block 2 over block 1


def test_choice_is_ascending_unique_and_padded_behind():
    g = cases.USUAL
    case = cases.named("odd length")
    inputs = cases.draw(case)
    _, lse = ops.compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, g)
    chosen = ops.select_blocks(inputs.q, inputs.k_cmp, lse, g)
    assert chosen.shape == (2, 37, 2, g.num_selected_blocks)
    for row in chosen.flatten(0, 2).tolist():
        blocks = [block for block in row if block >= 0]
        assert blocks == sorted(set(blocks))
        assert row == blocks + [-1] * (len(row) - len(blocks))


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


def test_blocks_beyond_the_sequence_hold_nothing():
    case = cases.named("odd length")
    inputs = cases.draw(case)
    some, beyond = (torch.tensor(row).expand(2, 37, 2, 3) for row in ([0, -1, -1], [0, 7, 2_000_000_000]))
    results = [
        ops.selected_attention(inputs.q, inputs.k_slc, inputs.v_slc, choice, case.geometry) for choice in (some, beyond)
    ]
    assert torch.equal(*results)
