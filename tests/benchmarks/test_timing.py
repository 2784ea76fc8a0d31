"""The summary of times; every benchmark exercises the timing itself."""

from lib.timing import Timing


def test_summary_is_median_and_fifths():
    assert Timing.of([5.0]) == (5.0, 5.0, 5.0, 1, 0.0)
    timing = Timing.of([float(x) for x in (9, 1, 2, 3, 4, 5, 6, 7, 8, 10, 0)])
    assert timing == (5.0, 2.0, 8.0, 11, 0.0)
