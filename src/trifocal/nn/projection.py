"""Several linear maps of one input as one product."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# On a GPU the joint weight's rows are padded to a multiple of this: whole memory lines in every row of its output.
ALIGNMENT = 64


def project(x: Tensor, linears: Sequence[nn.Linear], parts: Sequence[int] | None = None) -> list[Tensor]:
    """Apply linear maps to the same input.

    In training they are one product: it reads x once, and x has one gradient from it instead of a sum of several, each
    of them written and read again. The outputs are then columns of one tensor. Without gradients each map is applied
    by itself, because decoding would copy the weights for every token; and so is each if one of them is not PyTorch's
    own `Linear`: an adapter around it computes more than a product with its weight.

    Args:
        x: [..., inputs].
        linears: Maps of `inputs` to any numbers of outputs.
        parts: Into how many equal parts the outputs of each map are cut; 1 where not given.

    Returns:
        The outputs' parts, map after map, [..., outputs / parts] each.
    """
    parts = parts or [1] * len(linears)
    if not torch.is_grad_enabled() or any(type(linear) is not nn.Linear for linear in linears):
        return [part for linear, count in zip(linears, parts, strict=True) for part in linear(x).chunk(count, dim=-1)]
    sizes = [linear.out_features // count for linear, count in zip(linears, parts, strict=True) for _ in range(count)]
    # Autocast would do the same, after the copy.
    weights = [linear.weight.to(x.dtype) for linear in linears]
    padding = -sum(sizes) % ALIGNMENT if x.is_cuda else 0
    if padding:
        weights.append(x.new_zeros(padding, x.shape[-1]))
    outputs = nn.functional.linear(x, torch.cat(weights)).split([*sizes, padding] if padding else sizes, dim=-1)
    biases = [
        bias
        for linear, count in zip(linears, parts, strict=True)
        for bias in ([None] * count if linear.bias is None else linear.bias.chunk(count))
    ]
    return [
        output if bias is None else output + bias.to(output.dtype)
        for output, bias in zip(outputs, biases, strict=False)
    ]
