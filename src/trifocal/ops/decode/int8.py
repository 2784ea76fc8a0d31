"""Weights in 8 bits: whole numbers from -127 to 127, with one scale for each output of a linear layer.

An output's largest weight is 127 times its scale (symmetric, by the largest absolute value), so that a weight errs by
at most half of a scale.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

LARGEST = 127
WeightType = Literal["float", "int8"]
"""How the weights of linear layers are held: in the type of the products, or in 8 bits."""


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """A linear layer's weight, `values * scale`.

    Attributes:
        values: [N, K], int8.
        scale: [N], fp32 (fp64 for products in fp64).
        dtype: Type of the products.
    """

    values: Tensor
    scale: Tensor
    dtype: torch.dtype

    def dequantized(self) -> Tensor:
        """The weight in the type of the products, to which it is rounded, [N, K]."""
        # A GPU rounds as it writes, without a tensor in fp32 between.
        out = torch.empty(self.values.shape, dtype=self.dtype, device=self.values.device)
        return torch.mul(self.values, self.scale[:, None], out=out)

    def __getitem__(self, outputs: slice) -> "Int8Weight":
        return Int8Weight(self.values[outputs], self.scale[outputs], self.dtype)


Weight = Tensor | Int8Weight
"""A linear layer's weight, [N, K]: a tensor in the type of the products, or one in 8 bits."""


def quantize(weight: Tensor, dtype: torch.dtype) -> Int8Weight:
    """The nearest weight in 8 bits.

    Args:
        weight: [N, K]. An output whose weights are not finite keeps an output that is not finite.
        dtype: Type of the products.
    """
    weight = weight.to(torch.promote_types(dtype, torch.float32))
    # Above 0, also for an output of zeros.
    scale = (weight.abs().amax(1) / LARGEST).clamp(min=torch.finfo(weight.dtype).tiny)
    values = (weight / scale[:, None]).round().clamp(-LARGEST, LARGEST)
    return Int8Weight(values.to(torch.int8).contiguous(), scale, dtype)


def check_weights(weights: str) -> None:
    """Raise ValueError unless the kind of weights is known."""
    if weights not in get_args(WeightType):
        raise ValueError(f"weights must be one of {', '.join(get_args(WeightType))}, got {weights!r}")


def dequantized(weight: Weight) -> Tensor:
    """The weight in the type of the products, [N, K]; a tensor as it is."""
    return weight if isinstance(weight, Tensor) else weight.dequantized()
