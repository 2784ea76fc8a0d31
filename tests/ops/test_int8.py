"""Weights in 8 bits: their errors by output, and weights of which nothing is left."""

from __future__ import annotations

import pytest
import torch

from trifocal.ops.decode.int8 import check_weights, dequantized, quantize


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_weight_errs_by_half_of_its_outputs_scale(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-30, 30, 61, dtype=torch.float64)[:, None]
    weight = (torch.randn(61, 500, generator=generator, dtype=torch.float64) * sizes).to(dtype)
    quantized = quantize(weight, dtype)
    assert quantized.values.dtype == torch.int8 and quantized.values.abs().amax(1).eq(127).all()
    scale = weight.double().abs().amax(1) / 127
    wrong = (quantized.dequantized().double() - weight).abs().amax(1)
    # Half of a scale, and two roundings of numbers that are up to 127 scales.
    assert (wrong <= scale * (0.5 + 2 * 127 * torch.finfo(dtype).eps)).all()
    # The scale is not larger than it must be: somewhere the error comes near to its bound.
    assert (wrong >= 0.45 * scale).all()


def test_outputs_keep_their_own_scales() -> None:
    weight = torch.tensor([[1.0, -0.5, 0.25], [1000.0, 3.0, -1000.0], [0.0, 0.0, 0.0]])
    quantized = quantize(weight, torch.float32)
    assert quantized.values.tolist() == [[127, -64, 32], [127, 0, -127], [0, 0, 0]]
    assert torch.equal(quantized[1:].dequantized(), quantized.dequantized()[1:])
    # Weights are divided by their scales.
    assert quantized.dequantized()[2].tolist() == [0, 0, 0] and quantized.scale.gt(0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_stay_so(bad: float) -> None:
    weight = torch.ones(2, 4)
    weight[1, 2] = bad
    assert dequantized(quantize(weight, torch.float32)).isfinite().all(1).tolist() == [True, False]


def test_products_in_half_precision_round_the_weights_once() -> None:
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    exact = quantize(weight, torch.float32)
    assert torch.equal(quantize(weight, torch.bfloat16).dequantized(), exact.dequantized().bfloat16())
    assert dequantized(weight) is weight


def test_an_unknown_kind_is_refused() -> None:
    check_weights("int8")
    with pytest.raises(ValueError, match="weights must be one of float, int8, got 'int9'"):
        check_weights("int9")
