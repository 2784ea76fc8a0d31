"""The page about the kernels: work and limits of its table by formula, rules and bounds as the code has them."""

import pytest

from tests.docs.pages import ROOT, text_of
from trifocal import Geometry
from trifocal.ops import dispatch, support

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
    importance_gb = importance * GROUPS * 2 * 4 / 1e9
    return {
        "compressed, forward": (2 * compressed * product, None),
        "scoring, importance": (compressed * product, importance_gb),
        "scoring, choice": (None, importance_gb),
        "selected, forward": (2 * chosen * product, partial),
        "selected, reduction of o": (None, partial + TENSOR_GB),
        "window, forward": (2 * window * product, None),
        "combination, forward": (None, 4 * TENSOR_GB),
        "compressed, d_k and d_v": (4 * compressed * product, None),
        "compressed, d_q": (3 * compressed * product, None),
        "selected, backward": (5 * chosen * product, partial),
        "selected, reduction of d_q": (None, partial + TENSOR_GB),
        "window, d_k and d_v": (4 * window * product, None),
        "window, d_q": (3 * window * product, None),
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
        assert float(remains) == pytest.approx(float(measured) - float(limit), abs=0.006), part


def test_rules_and_buffers_are_those_of_the_code():
    spread, geometry = " ".join(PAGE.split()), Geometry()
    masked, backward = dispatch.MASKED_UP_TO, dispatch.MASKED_BACKWARD_UP_TO
    tokens = masked * geometry.num_selected_blocks * geometry.selection_block_size
    assert f"at most {masked} times `n` blocks ({tokens:,} tokens" in spread
    assert f"Backward changes at {backward} times `n` blocks ({tokens * backward // masked:,} tokens)" in spread
    assert f"so that there are about {dispatch.ENOUGH_PROGRAMS}" in spread
    few, tokens = 6 * 132, 2**20
    assert f"at most {few // 132} programs a multiprocessor" in spread
    assert dispatch.masked_part_queries(tokens, 16, few, 132) < tokens
    assert dispatch.masked_part_queries(tokens, 16, few + 1, 132) == tokens
    assert f"fewer than {dispatch.FEWEST_QUERIES_PER_BLOCK} queries" in spread
    buffer = dispatch.SELECTED_BUFFER_BYTES
    chunk = buffer // (HEADS * geometry.num_selected_blocks * DIM * 2) // 64 * 64
    assert f"fit {buffer >> 30} GiB: {chunk:,} queries at A" in spread
    assert dispatch.IMPORTANCE_BUFFER_BYTES == 2**30 // 4
    assert "a quarter of a GiB" in spread
    assert dispatch.ENOUGH_DECODE_PROGRAMS == 2 and "if there are two programs a multiprocessor" in spread
    assert f"`D` and `V` up to {support.WIDEST_HEAD}" in spread
    assert f"up to {support.MOST_HEADS_OF_A_GROUP} heads a group" in spread
    assert f"a multiple of {support.BLOCK_MULTIPLE};" in spread


def test_rules_that_the_page_names_exist():
    rules = (
        "selected_order",
        "interval_on_hopper",
        "importance_on_hopper",
        "choice_on_hopper",
        "selected_on_hopper",
        "masked_part_queries",
    )
    for name in rules:
        assert f"`{name}`" in PAGE
        assert callable(getattr(dispatch, name))
    assert f"from {dispatch.FEWEST_HEADS_OF_WARP_SPECIALIZED} heads a group on" in PAGE
