"""What is told about a trace of kernels."""

import pytest

from trifocal.bench.kernels import Kernel, busy_share, gap_table, kernel_table, short_name

MS = 1_000_000


def test_overlapping_kernels_count_once() -> None:
    kernels = [Kernel("b", 6 * MS, 8 * MS), Kernel("a", 0, 4 * MS), Kernel("c", 1 * MS, 2 * MS)]
    assert busy_share(kernels) == pytest.approx(6 / 8)
    assert busy_share([]) == 0.0


def test_table_adds_up_names_and_the_rest() -> None:
    kernels = [Kernel("a", 0, 4 * MS), Kernel("a", 5 * MS, 7 * MS), Kernel("b", 7 * MS, 8 * MS), Kernel("c", 8, 9)]
    first, rest = kernel_table(kernels, steps=2, rows=1)
    assert first == {"kernel": "a", "calls_a_step": 1.0, "ms_a_step": 3.0, "us_a_call": 3000.0}
    assert rest["kernel"] == "2 others" and rest["ms_a_step"] == pytest.approx(0.5, rel=1e-5)
    assert kernel_table(kernels[:2], steps=1, rows=5)[-1]["kernel"] == "a"


def test_gaps_lie_between_what_ends_last_and_what_begins_next() -> None:
    kernels = [
        Kernel("long", 0, 5 * MS),
        Kernel("inside", 1 * MS, 2 * MS),
        Kernel("next", 7 * MS, 8 * MS),
        Kernel("long", 8 * MS, 9 * MS),
        Kernel("next", 10 * MS, 11 * MS),
    ]
    assert gap_table(kernels, steps=1, rows=9) == [
        {"after": "long", "before": "next", "gaps_a_step": 2.0, "ms_a_step": 3.0, "longest_us": 2000.0}
    ]
    assert gap_table([], steps=1, rows=9) == []


def test_names_lose_their_arguments() -> None:
    assert short_name("void at::native::(anonymous namespace)::fill<int>(int*, long)") == "fill<int>"
    assert short_name("triton_poi_fused_0") == "triton_poi_fused_0"
