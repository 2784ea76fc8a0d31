"""Formulas against counting, and against the table of limits for the longest named shape."""

import pytest

from lib.formulas import attention_work, branch_work
from lib.shapes import NAMED, AttentionShape
from trifocal.ops import Geometry


def test_operations_of_one_attention():
    shape = AttentionShape("", 2, 5, 4, 2, 6, 3)
    work = attention_work(shape, keys=15, key_slots=5, element_bytes=2)
    # Two products forward, five backward, two operations an element pair.
    assert work.forward_flops == 2 * 2 * 4 * 15 * (6 + 3)
    assert work.backward_flops == 2 * 2 * 4 * 15 * (6 + 6 + 6 + 3 + 3)
    q, k, v, o = 2 * 5 * 4 * 6, 2 * 5 * 2 * 6, 2 * 5 * 2 * 3, 2 * 5 * 4 * 3
    assert work.forward_bytes == 2 * (q + k + v + o)
    assert work.backward_bytes == 2 * (2 * (q + k + v) + 2 * o)


def test_the_long_shape_has_the_known_terms():
    """TFLOP at 65,536 tokens, 64/4 heads of 128: compressed 4.4 and 11, scoring 2.2, selected 2.2 and 5.5, window 1.1
    and 2.75."""
    work = branch_work(NAMED["A"], Geometry(), 2)
    found = {name: (part.forward_flops / 1e12, part.backward_flops / 1e12) for name, part in work.items()}
    assert found["compressed"] == pytest.approx((4.4, 11), rel=0.01)
    assert found["scoring"] == pytest.approx((2.2, 0), rel=0.01)
    assert found["selected"] == pytest.approx((2.2, 5.5), rel=0.05)
    assert found["window"] == pytest.approx((1.1, 2.75), rel=0.01)
    assert found["whole"] == pytest.approx((9.9, 19.3), rel=0.02)
    assert work["whole"].forward_bytes > work["selected"].forward_bytes
