"""Bytes that launchers allocate on the meta device, against the profiler on a CPU; the kernels are left out."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trifocal.models.kernel_memory import kernel_memory
from trifocal.ops import Geometry

pytest.importorskip("triton")

HEADS, KV_HEADS, DIM, VALUE_DIM = 16, 2, 64, 32
GEOMETRY = Geometry(32, 16, 64, 4, 1, 1, 128)


def profiled(call):
    """Results, and bytes at the fullest moment of a call."""
    # Tensors of earlier tests may not be freed meanwhile.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        results = call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return results, most


# Backward reads all keys under a mask at the first length and goes through a sorted choice at the second; forward
# sorts at the third.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [128, 1024, 4096])
def test_the_meta_device_counts_what_a_cpu_allocates(length, dtype):
    from trifocal.ops.pipeline import Branches, run_backward
    from trifocal.ops.triton.launch import no_launches
    from trifocal.ops.triton.selected.forward import selected_forward

    q = torch.zeros(1, length, HEADS, DIM, dtype=dtype)
    k, k_cmp = (torch.zeros(1, n, KV_HEADS, DIM, dtype=dtype) for n in (length, length // 16 - 1))
    v, v_cmp = (torch.zeros(1, n, KV_HEADS, VALUE_DIM, dtype=dtype) for n in (length, length // 16 - 1))
    o, lse = torch.zeros(1, length, HEADS, VALUE_DIM, dtype=dtype), torch.zeros(1, length, HEADS)
    generator = torch.Generator().manual_seed(0)
    choice = torch.randint(0, length // 64, (1, length, KV_HEADS, 4), generator=generator, dtype=torch.int32)
    gates = torch.zeros(1, length, HEADS, 3)
    branches = Branches(k_cmp, v_cmp, k, v, k, v, gates, o, lse, o, lse, o, lse, choice)
    with no_launches():
        results, forward = profiled(lambda: selected_forward(q, k, v, choice, GEOMETRY, 0.1, None))
        _, backward = profiled(lambda: run_backward(o, q, branches, GEOMETRY, 0.1, None))
    found = kernel_memory(GEOMETRY, 1, length, HEADS, KV_HEADS, DIM, VALUE_DIM, dtype)
    assert found.backward == pytest.approx(backward, rel=0.1)
    # The window's output and the mixture come after the buffers of selected attention.
    later = 2 * o.nbytes + lse.nbytes
    buffers = forward - sum(result.nbytes for result in results)
    assert found.forward == pytest.approx(max(0, buffers - later), rel=0.1)


def test_it_takes_no_memory_and_leaves_kernels_as_they_were():
    """A million tokens of the paper's layer: more than any machine that runs this test has."""
    from trifocal.ops.triton.launch import Kernel

    launch = Kernel.__getitem__
    found = kernel_memory(Geometry(32, 16, 64, 16, 1, 2, 512), 1, 2**20, 64, 4, 192, 128, torch.bfloat16, True)
    assert found.backward > 30 * 2**30
    assert Kernel.__getitem__ is launch
