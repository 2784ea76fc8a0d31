"""Block sizes: valid ones, and the counts that follow from them, against brute force."""

import dataclasses
import random

import pytest

from tests.ops import cases
from trifocal import Geometry
from trifocal.testing import oracle

GEOMETRIES = (
    cases.USUAL,
    cases.PAPER,
    cases.ODD,
    cases.ONE_SIZE,
    cases.NO_LOCAL,
    cases.ALL_FORCED,
    cases.NO_OVERLAP,
    cases.STRIDE_ONE,
    cases.ONE_TOKEN_BLOCKS,
)


def test_defaults_are_the_papers():
    assert dataclasses.astuple(Geometry()) == (32, 16, 64, 16, 1, 2, 512)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compression_block_size": 0}, "compression_block_size must be at least 1, got 0"),
        ({"num_initial_blocks": -1}, "num_initial_blocks must be at least 0, got -1"),
        ({"window_size": 2**31}, "window_size may be at most 2147483647, got 2147483648"),
        ({"window_size": 512.0}, "window_size must be an integer, got 512.0"),
        ({"compression_block_size": 24}, "compression_block_size must be a multiple of compression_stride, got 24"),
        ({"selection_block_size": 40}, "selection_block_size must be a multiple of compression_stride, got 40"),
        ({"selection_block_size": 16}, "compression_block_size may not exceed selection_block_size, got 32 and 16"),
        ({"num_initial_blocks": 0, "num_local_blocks": 0}, "between 1 and num_selected_blocks, got 0 + 0 of 16"),
        ({"num_selected_blocks": 2}, "between 1 and num_selected_blocks, got 1 + 2 of 2"),
    ],
)
def test_invalid_sizes_are_named(fields, message):
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        Geometry(**fields)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_counts_of_blocks(geometry):
    for num_keys in range(1, 3 * geometry.selection_block_size + 2):
        assert geometry.num_compressed_blocks(num_keys) == len(oracle.compression_spans(geometry, num_keys))
        touched = {token // geometry.selection_block_size for token in range(num_keys)}
        assert geometry.num_selection_blocks(num_keys) == len(touched)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_overlaps_are_intersections(geometry):
    size = geometry.selection_block_size
    for i, span in enumerate(oracle.compression_spans(geometry, 3 * size + geometry.compression_block_size)):
        for j in range(5):
            expected = len(set(span.tokens) & set(range(j * size, (j + 1) * size)))
            assert geometry.overlap_tokens(i, j) == expected


@pytest.mark.parametrize(
    ("sizes", "first", "weights"),
    [
        # Equation 9 by hand: block j of l' tokens, the first compressed block that it touches at j = 2, the weights.
        ((32, 16, 64), 7, (1, 2, 2, 2, 1)),
        ((16, 16, 16), 2, (1,)),
        ((8, 2, 8), 5, (1, 2, 3, 4, 3, 2, 1)),
        ((6, 3, 9), 5, (1, 2, 2, 1)),
        ((12, 4, 20), 8, (1, 2, 3, 3, 3, 2, 1)),
    ],
)
def test_overlap_stencil_by_hand(sizes, first, weights):
    block, stride, selection = sizes
    geometry = Geometry(block, stride, selection)
    assert geometry.overlap_stencil() == weights
    counted = [geometry.overlap_tokens(first + tap, 2) / stride for tap in range(-1, len(weights) + 1)]
    assert counted == [0, *weights, 0]


@pytest.mark.parametrize("geometry", [g for g in GEOMETRIES if g.num_local_blocks])
def test_keys_read_per_step_by_counting(geometry):
    rng = random.Random(0)
    size = geometry.selection_block_size
    for position in range(size * (geometry.num_selected_blocks + 2) + 3):
        compressed = sum(span.end - 1 <= position for span in oracle.compression_spans(geometry, position + 1))
        chosen = oracle.choose([rng.random() for _ in range(position // size + 1)], position, geometry)
        selected = sum(token // size in chosen for token in range(position + 1))
        window = min(position + 1, geometry.window_size)
        assert geometry.keys_read_per_step(position) == compressed + selected + window
