"""Before a first call every kernel of it is compiled, and none is launched."""

import json
import sys
from collections import defaultdict

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.devices import needs_gpu
from tests.ops_triton.compilation import _record, run_module
from tests.ops_triton.decode_calls import empty, meta_documents, num_compressed
from tests.ops_triton.problems import PAPER, documents_of, draw, large
from trifocal import nsa_attention
from trifocal.ops import Geometry, pipeline
from trifocal.testing.inputs import cotangent

CASES = {
    "in the mask's order": (512, 2, False, False),
    "tiles": (16384, 2, False, False),
    "block-major": (16384, 8, False, False),
    "packed documents": (1024, 2, True, False),
    "a given choice": (512, 2, False, True),
}
# In the names of the kernels of every call.
PARTS = ("interval_forward", "combine_forward", "combine_backward", "interval_d_q", "interval_dkdv")


def asked_for(length, groups, packed, given):
    """Names of the kernels that are asked for on a Hopper GPU that need not be there, and whether to be compiled."""
    from unittest import mock

    from triton.runtime.jit import JITFunction

    from trifocal.ops.pipeline import precompile_kernels

    geometry = Geometry()
    q, keys = empty(1, length, 32, 128), empty(1, length, groups, 128)
    size = num_compressed(geometry, length, packed)
    branches = (*(empty(1, size, groups, 128) for _ in range(2)), keys, keys, keys, keys)
    documents = meta_documents(length, packed)
    choice = empty(1, length, groups, 16, dtype=torch.int32) if given else None
    found = []

    def call():
        # The stand-in of `_record`, with a note of `warmup`, which it drops.
        recorded = JITFunction.run

        def run(self, *args, warmup, **options):
            found.append((self.__name__, warmup))
            return recorded(self, *args, warmup=warmup, **options)

        with mock.patch.object(JITFunction, "run", run):
            for _ in range(2):
                precompile_kernels(
                    q, branches, empty(1, length, 32, 3), geometry, 0.1, documents, choice, backward=True
                )

    _record("hopper", call)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    [names] = run_module("tests.ops_triton.test_precompile", folder=tmp_path_factory.mktemp("precompile"))
    return names


@pytest.mark.parametrize("case", CASES)
def test_all_are_compiled_and_none_is_launched(found, case):
    names = [name for name, _ in found[case]]
    assert all(only_compiled for _, only_compiled in found[case])
    for part in PARTS:
        assert any(part in name for name in names), (part, names)
    assert any(name.startswith("choice") for name in names) == (case != "a given choice")
    assert any("tile_d_q" in name for name in names) == (case == "tiles")
    assert any("block_major_forward" in name for name in names) == (case == "block-major")
    # The second call is of a kind that is ready.
    assert sum("combine_forward" in name for name in names) == 1


def test_fake_tensors_compile_nothing(monkeypatch):
    asked = []
    monkeypatch.setattr(pipeline, "precompile_kernels", lambda *call, backward: asked.append(call))
    with FakeTensorMode():
        sizes = (512, 8, 64), (31, 2, 64), (512, 2, 64), (512, 8, 3)
        q, k_cmp, keys, gates = (torch.empty(1, *size, device="cuda") for size in sizes)
        o = pipeline.nsa_attention(q, (k_cmp, k_cmp, *[keys] * 4), gates, Geometry(), 0.1, None, None)
    assert o.shape == q.shape and o.is_cuda and not asked


GPU_CASES = (
    large("in the mask's order", PAPER, 640, 24, 2, 80, 96),
    large("tiles", PAPER, 9000, 16, 1, 128, 96),
    large("block-major", PAPER, 9000, 4, 1, 128, 96),
    large("packed documents", PAPER, 900, 24, 2, 112, 80, lengths=(500, 17, 383)),
)


def kernels():
    """Every kernel of the modules that are imported so far. The garbage collector's list lacks what is frozen."""
    from trifocal.ops.triton.launch import Kernel

    modules = [module for name, module in sys.modules.items() if name.startswith("trifocal.")]
    return {id(x): x for module in modules for x in vars(module).values() if type(x) is Kernel}.values()


@pytest.fixture
def nothing_is_compiled(monkeypatch):
    """Kernels of other tests, and those that no widths tell apart, are as if this process had never met them."""
    monkeypatch.setattr("trifocal.ops.pipeline._compiled", set())
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


@needs_gpu
@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("case", GPU_CASES, ids=[case.why for case in GPU_CASES])
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
    assert all(part in launched() for part in (*PARTS, "choice")), launched()
    assert compiled() == ready


if __name__ == "__main__":
    print(json.dumps({name: asked_for(*case) for name, case in CASES.items()}))
