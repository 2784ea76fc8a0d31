"""The first call of a kind compiles all its kernels before it launches one, so that none is left for later."""

import sys
from collections import defaultdict

import pytest
import torch

from tests.ops_triton.problems import PAPER, documents_of, draw, large
from trifocal import nsa_attention
from trifocal.testing.inputs import cotangent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = (
    large("in the mask's order", PAPER, 640, 24, 2, 80, 96),
    large("block-major", PAPER, 9000, 16, 1, 128, 96),
    large("packed documents", PAPER, 900, 24, 2, 112, 80, lengths=(500, 17, 383)),
)
# In the names of the kernels of every call.
PARTS = ("interval_forward", "choice", "combine_forward", "combine_backward", "interval_d_q", "interval_dkdv")


def kernels():
    """Every kernel of the modules that are imported so far. The garbage collector's list lacks what is frozen."""
    from trifocal.ops.triton.launch import Kernel

    modules = [module for name, module in sys.modules.items() if name.startswith("trifocal.")]
    return {id(x): x for module in modules for x in vars(module).values() if type(x) is Kernel}.values()


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Kernels of other tests, and those that no widths tell apart, are as if this process had never met them."""
    monkeypatch.setattr("trifocal.ops.triton.precompile._compiled", set())
    for kernel in kernels():
        monkeypatch.setattr(kernel, "_kinds", {})
        monkeypatch.setattr(kernel.function, "device_caches", defaultdict(kernel.function.create_binder))


def compiled():
    """What is compiled: for how many kinds of arguments each kernel is, by name."""
    found = {k.__name__: sum(len(cache) for cache, *_ in k.function.device_caches.values()) for k in kernels()}
    return {name: count for name, count in found.items() if count}


def launched():
    """Names of the kernels that were launched, in one line."""
    return " ".join(kernel.__name__ for kernel in kernels() if kernel._kinds)


@pytest.mark.parametrize("case", CASES, ids=[case.why for case in CASES])
def test_nothing_is_left_to_compile(case):
    from trifocal.ops.pipeline import precompile_kernels

    leaves = draw(case, torch.bfloat16).leaves()
    assert not compiled() and not launched()
    scale = case.dim**-0.5
    precompile_kernels(leaves[0], tuple(leaves[1:7]), leaves[7], PAPER, scale, documents_of(case), None, backward=True)
    ready = compiled()
    assert ready and not launched()
    o = nsa_attention(*leaves, PAPER, cu_seqlens=documents_of(case), backend="triton")
    torch.autograd.grad(o, leaves, cotangent(o))
    assert all(part in launched() for part in PARTS), launched()
    assert compiled() == ready
