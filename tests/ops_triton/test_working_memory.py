"""The formula of the kernels' buffers against what their launchers allocate; the kernels themselves are left out."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trifocal.ops import Geometry, devices, dispatch
from trifocal.ops.triton import (
    choice_index,
    scoring,
    selected_backward,
    selected_backward_block_major,
    selected_backward_masked,
    selected_forward,
)
from trifocal.ops.triton.working_memory import MULTIPROCESSORS, backward_working_bytes, forward_working_bytes

BATCH, HEADS, GROUPS, DIM, VALUE_DIM = 1, 16, 2, 64, 32
GEOMETRY = Geometry(32, 16, 64, 4, 1, 1, 128)
# Up to 16 blocks the kernel goes through all of them; then through the keys of a sorted choice.
LENGTHS = {"masked": 1024, "block_major": 4096}
# Backward changes its order sooner. The shorter one has too few rows to be cut into parts.
BACKWARD = {"masked, whole": 128, "masked, in parts": 512, "block_major": 4096}


class NotRun:
    """Stands in for a kernel."""

    def __getitem__(self, grid):
        return lambda *arguments, **constants: None


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    for module in (choice_index, scoring, selected_forward, selected_backward_block_major, selected_backward_masked):
        for name in vars(module).copy():
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, NotRun())


def peak(call):
    # What earlier tests left behind must not be freed meanwhile.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, result


def inputs(length, dtype):
    generator = torch.Generator().manual_seed(0)
    q = torch.zeros(BATCH, length, HEADS, DIM, dtype=dtype)
    k = torch.zeros(BATCH, length, GROUPS, DIM, dtype=dtype)
    v = torch.zeros(BATCH, length, GROUPS, VALUE_DIM, dtype=dtype)
    choice = torch.randint(0, length // 64, (BATCH, length, GROUPS, 4), generator=generator, dtype=torch.int32)
    return q, k, v, choice


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("order", LENGTHS)
def test_selected_forward(order, dtype):
    length = LENGTHS[order]
    q, k, v, choice = inputs(length, dtype)
    assert dispatch.selected_order(length, length, 4, 64) == order
    most, results = peak(lambda: selected_forward.selected_forward(q, k, v, choice, GEOMETRY, 0.1, None))
    allocated = most - sum(result.nbytes for result in results)
    formula = forward_working_bytes(GEOMETRY, BATCH, length, HEADS, GROUPS, DIM, VALUE_DIM, q.element_size())
    if order == "masked":
        # Fewer blocks than the scoring's buffers, which are the larger ones there.
        assert allocated <= formula
    else:
        assert formula == pytest.approx(allocated, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", BACKWARD)
def test_selected_backward(case, dtype, monkeypatch):
    length = BACKWARD[case]
    monkeypatch.setattr(devices, "multiprocessors", lambda device: MULTIPROCESSORS)
    q, k, v, choice = inputs(length, dtype)
    o = torch.zeros(BATCH, length, HEADS, VALUE_DIM, dtype=dtype)
    lse = torch.zeros(BATCH, length, HEADS)
    most, (d_q, d_k, d_v) = peak(
        lambda: selected_backward.selected_backward(o, q, k, v, o, lse, choice, GEOMETRY, 0.1, None)
    )
    results = d_q.nbytes + (0 if case == "block_major" else d_k.nbytes + d_v.nbytes)
    formula = backward_working_bytes(GEOMETRY, BATCH, length, HEADS, GROUPS, DIM, VALUE_DIM, q.element_size())
    assert formula == pytest.approx(most - results, rel=0.1)


@pytest.mark.parametrize("length", LENGTHS.values())
def test_scoring(length):
    q, k, _, _ = inputs(length, torch.bfloat16)
    k_cmp = k[:, : GEOMETRY.num_compressed_blocks(length)]
    lse = torch.zeros(BATCH, length, HEADS)
    most, choice = peak(lambda: scoring.select_blocks_forward(q, k_cmp, lse, GEOMETRY, length, 0.1, None))
    formula = forward_working_bytes(GEOMETRY, BATCH, length, HEADS, GROUPS, DIM, VALUE_DIM, 2)
    assert most - choice.nbytes <= formula
    if length == LENGTHS["masked"]:
        assert formula == pytest.approx(most - choice.nbytes, rel=0.1)
