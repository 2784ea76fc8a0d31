"""The page about the kernels: work and limits of its table are those of the formula."""

import pytest

from tests.docs.pages import ROOT, text_of
from trifocal import Geometry

PAGE = text_of(ROOT / "docs/kernels.md")
TOKENS, HEADS, GROUPS, DIM = 65536, 64, 4, 128
TENSOR_GB = TOKENS * HEADS * DIM * 2 / 1e9


@pytest.fixture(scope="module")
def work():
    """TFLOP and GB of each part: products of [rows, keys] with the head dim, two operations a pair and column."""
    geometry = Geometry()
    stride, block = geometry.compression_stride, geometry.selection_block_size
    places = geometry.num_selected_blocks
    slots = compressed = window = chosen = importance = 0
    for position in range(TOKENS):
        blocks = position // block + 1
        taken = min(blocks, places)
        slots += taken
        compressed += max(position + 1 - geometry.compression_block_size + stride, 0) // stride
        chosen += (taken - 1) * block + position % block + 1
        window += min(position + 1, geometry.window_size)
        importance += blocks
    product = HEADS * DIM * 2 / 1e12
    partial = slots * HEADS * DIM * 2 / 1e9
    bytes_of_pair = HEADS * 2 / 1e9
    importance_gb = importance * GROUPS * 2 * 4 / 1e9
    return {
        "compressed, forward": (2 * compressed * product, None),
        "scoring, importance": (compressed * product, importance_gb),
        "scoring, choice": (None, importance_gb),
        "selected, forward": (2 * chosen * product, partial),
        "selected, reduction of o": (None, partial + TENSOR_GB),
        "window, forward": (2 * window * product, None),
        "combination, forward": (None, 4 * TENSOR_GB),
        "compressed, d_k and d_v": (4 * compressed * product, compressed * bytes_of_pair),
        "selected, backward": (5 * chosen * product, partial),
        "selected, reduction of d_q": (None, partial + TENSOR_GB),
        "window, d_k and d_v": (4 * window * product, window * bytes_of_pair),
        "compressed and window, d_q": (
            (compressed + window) * product,
            (compressed + window) * bytes_of_pair + 2 * TENSOR_GB,
        ),
        "combination, backward": (None, 4 * TENSOR_GB),
    }


def table() -> dict[str, list[str]]:
    body = PAGE[PAGE.index("| part | TFLOP |") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def test_work_and_limits_are_those_of_the_formula(work):
    rows = table()
    assert rows.keys() == work.keys()
    for part, (tflop, gigabytes, limit, measured, remains) in rows.items():
        for shown, exact in zip((tflop, gigabytes), work[part], strict=True):
            assert shown == ("" if exact is None else f"{exact:.2f}"), part
        exact_tflop, exact_gigabytes = (amount or 0.0 for amount in work[part])
        assert limit == f"{max(exact_tflop / 0.750, exact_gigabytes / 4.2):.2f}", part
        if measured == remains == "":
            continue
        assert float(remains) == pytest.approx(float(measured) - float(limit), abs=0.006), part
