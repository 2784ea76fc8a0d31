"""The gated combination's kernels, interpreted, against the same sums in float64."""

import pytest
import torch

from tests.ops_triton.problems import compare
from trifocal.ops.triton.combine import combine_backward, combine_forward, row_sums

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on a GPU")


@pytest.mark.parametrize("shape", [(2, 5, 3, 20), (1, 37, 4, 16), (1, 1, 1, 1)], ids=str)
def test_values_and_gradients(shape):
    generator = torch.Generator().manual_seed(0)
    branches = [torch.randn(shape, generator=generator) for _ in range(3)]
    # Neither the gates nor the gradient are contiguous.
    gates = torch.rand(3, *shape[:3], generator=generator).permute(1, 2, 3, 0)
    d_o = torch.randn(shape[1], shape[0], *shape[2:], generator=generator).transpose(0, 1)
    exact = sum(gates[..., i, None].double() * branches[i].double() for i in range(3))
    exact_rows = torch.stack([(d_o.double() * o.double()).sum(-1) for o in branches], -1)
    d_gates, delta = combine_backward(d_o, *branches, torch.float32)
    actual = (combine_forward(*branches, gates), d_gates, delta.permute(1, 2, 3, 0))
    compare("o d_gates delta", actual, (exact, exact_rows, exact_rows))


def test_row_sums_less_the_gradient_of_lse():
    generator = torch.Generator().manual_seed(0)
    o, d_o = (torch.randn(2, 5, 3, 20, generator=generator) for _ in range(2))
    d_lse = torch.randn(3, 5, 2, generator=generator).transpose(0, 2)
    exact = (d_o.double() * o.double()).sum(-1) - d_lse.double()
    compare("delta", (row_sums(d_o, o, d_lse),), (exact,))
