"""The measure of an error cannot be fooled: shapes, NaN and infinities count."""

import pytest
import torch

from trifocal.testing.tolerances import BRANCHES, allowed, assert_close, cost_in_torch, error


def test_error_is_relative_to_the_largest_value_or_to_1():
    assert error(torch.tensor([4.0, 9.0]), torch.tensor([4.0, 10.0])) == pytest.approx(0.1)
    assert error(torch.tensor([0.0]), torch.tensor([1e-3])) == pytest.approx(1e-3)
    assert error(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0


def test_nan_and_infinity_are_infinite_errors_unless_infinity_is_exact():
    inf, nan = torch.inf, torch.nan
    assert error(torch.tensor([1.0, -inf]), torch.tensor([1.0, -inf])) == 0.0
    for actual, exact in (([nan], [1.0]), ([inf], [1.0]), ([1.0], [inf]), ([inf], [-inf]), ([1.0], [nan])):
        assert error(torch.tensor(actual), torch.tensor(exact)) == inf, (actual, exact)
    # An infinite exact value does not make room for others.
    assert error(torch.tensor([2.0, inf]), torch.tensor([1.0, inf])) == 1.0


def test_another_shape_is_refused():
    with pytest.raises(AssertionError, match=r"shape \(2,\), expected \(1,\)"):
        error(torch.zeros(2), torch.zeros(1))


def test_bounds_grow_as_precision_falls():
    bounds = [allowed(dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)]
    assert bounds == sorted(bounds) and 0 < bounds[0] < 1e-13
    assert allowed(torch.float32) == BRANCHES * cost_in_torch(torch.float32)
    exact = torch.ones(3)
    assert_close("o", exact + bounds[1] / 2, exact, torch.float32)
    with pytest.raises(AssertionError, match=r"o in torch.float32: error .*, allowed"):
        assert_close("o", exact + 2 * bounds[1], exact, torch.float32)
