"""Shapes by name and free."""

import pytest

from lib.shapes import AttentionShape, free_shapes, named_shapes
from trifocal.errors import UserError


def test_names():
    assert named_shapes(["D"]) == [AttentionShape("D", 16, 2048, 12, 2, 64, 64)]
    paper = named_shapes(["P"])
    assert [shape.tokens for shape in paper] == [8192, 16384, 32768, 65536]
    assert {shape.kind for shape in paper} == {(64, 4, 192, 128)}
    with pytest.raises(UserError, match=r'unknown shape "P4k"; the nearest valid one is "P64k"'):
        named_shapes(["P4k"])


def test_every_pair_of_heads_at_every_length():
    shapes = free_shapes((100, 200), ("8/2", "4/4"), batch=3, head_dim=16, value_dim=8)
    assert [(s.tokens, s.heads, s.groups) for s in shapes] == [(100, 8, 2), (200, 8, 2), (100, 4, 4), (200, 4, 4)]
    assert {(s.batch, s.head_dim, s.value_dim) for s in shapes} == {(3, 16, 8)}


@pytest.mark.parametrize("heads", ["8", "8/", "/2", "a/b", "8/3", "8/0"])
def test_bad_heads_are_refused(heads):
    with pytest.raises(UserError, match=r"heads|groups"):
        free_shapes((10,), (heads,), batch=1, head_dim=8, value_dim=8)
