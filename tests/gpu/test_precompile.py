"""The first call of a kind compiles all its kernels before it launches one, so that none is left for later."""

import gc

import pytest
import torch

from tests.ops_triton.problems import PAPER, documents_of, draw, large
from trifocal import nsa_attention
from trifocal.testing.inputs import cotangent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Widths that no other test has, so that nothing is compiled yet.
CASES = (
    large("in the mask's order", PAPER, 640, 24, 2, 80, 96),
    large("block-major", PAPER, 9000, 16, 1, 128, 96),
    large("packed documents", PAPER, 900, 24, 2, 112, 80, lengths=(500, 17, 383)),
)


def compiled() -> int:
    """How many kernels this process has compiled."""
    from trifocal.ops.triton.launch import Kernel

    kernels = [found.function for found in gc.get_objects() if type(found) is Kernel]
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


@pytest.mark.parametrize("case", CASES, ids=[case.why for case in CASES])
def test_nothing_is_left_to_compile(case):
    from trifocal.ops.pipeline import precompile_kernels

    inputs = draw(case, torch.bfloat16)
    leaves = inputs.leaves()
    before = compiled()
    scale = case.dim**-0.5
    precompile_kernels(leaves[0], tuple(leaves[1:7]), leaves[7], PAPER, scale, documents_of(case), None, backward=True)
    ready = compiled()
    assert ready >= before + 10
    o = nsa_attention(*leaves, PAPER, cu_seqlens=documents_of(case), backend="triton")
    torch.autograd.grad(o, leaves, cotangent(o))
    assert compiled() == ready
