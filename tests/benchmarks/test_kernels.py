"""The figures that `benchmarks/kernels.py` reads from a trace."""

import itertools

import pytest
import torch

from lib.kernel_trace import Kernel, busy_share
from lib.recorder import Recorder
from lib.shapes import AttentionShape
from tests.children import load_script
from trifocal.ops import Geometry

kernel_times = load_script("benchmarks/kernels.py")
MS = 1_000_000


def test_overlapping_kernels_count_once():
    kernels = [Kernel("b", 6 * MS, 8 * MS), Kernel("a", 0, 4 * MS), Kernel("c", 1 * MS, 2 * MS)]
    assert busy_share(kernels) == pytest.approx(6 / 8)
    assert busy_share([]) == 0.0


def test_each_kernel_of_both_directions_is_a_row(monkeypatch):
    """On the CPU, where the profiler sees nothing, made-up kernels stand for the GPU's."""
    monkeypatch.setattr(kernel_times, "named_shapes", lambda _: [AttentionShape("tiny", 1, 96, 4, 2, 16, 16)])
    monkeypatch.setattr(kernel_times.KernelsOptions, "torch_device", torch.device("cuda"))
    for name in ("check_parity", "check_index", "check_choice_parity"):
        monkeypatch.setattr(kernel_times, name, lambda *_: 0.5)
    make = kernel_times.make_inputs
    draw, index = kernel_times.ChoiceProblem.draw, kernel_times.random_index
    monkeypatch.setattr(kernel_times, "make_inputs", lambda s, g, _, t: make(s, g, torch.device("cpu"), t))
    monkeypatch.setattr(kernel_times, "random_index", lambda s, _, t: index(s, torch.device("cpu"), t))
    monkeypatch.setattr(
        kernel_times.ChoiceProblem, "draw", lambda s, g, _, *rest: draw(s, g, torch.device("cpu"), *rest)
    )
    ran = []

    def record(work, _):
        work()
        ran.append(work)
        return [Kernel("a", 0, 4 * MS), Kernel("b", 5 * MS, 6 * MS)]

    monkeypatch.setattr(kernel_times, "record_kernels", record)
    geometry = Geometry(16, 8, 32, 2, 1, 1, 32)
    options = kernel_times.KernelsOptions(
        shapes=("A",), geometry=geometry, choices=("random", "smooth", "real"), dtype="fp32", calls=2, teaching=8
    )
    recorder = Recorder(60.0, lambda _: None, lambda: None)
    kernel_times.bench_kernels(options, recorder)
    measured, reals = ([row for row in recorder.rows if (row["choices"] == "real") == real] for real in (False, True))
    calls = [*itertools.product(("random", "smooth"), ("whole", "one branch")), ("", "choice loss")]
    assert {row["status"] for row in measured} == {"ok"}
    assert [(row["choices"], row["row"], row["direction"], row["kernel"]) for row in measured] == [
        (*call, direction, kernel) for call in calls for direction in ("forward", "backward") for kernel in "ab"
    ]
    assert [row["status"].partition(":")[0] for row in reals] == ["not available"] * 2
    assert recorder.rows[0]["ms"] == 2.0 and recorder.rows[0]["launches"] == 0.5 and len(ran) == 10
