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
