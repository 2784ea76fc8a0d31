"""A prompt's chunk by the kernel against the reference: the same bits in pages, in rings' ends and in what is read."""

import pytest
import torch

from trifocal.nn.rope import rotary_tables
from trifocal.ops.decode.api import append_chunk
from trifocal.ops.decode.caches import NewRows, Place

pytest.importorskip("triton")

PAGES, PAGE_ROWS, GROUPS, LONGEST = 9, 8, 2, 60
WIDTHS = {"k": 12, "v": 7, "q_idx": 6, "k_idx": 6}


def draw(device, *shape, dtype=torch.float32):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    # Few bits: products are exact, so that it does not matter whether they are rounded before they are added.
    return (numbers * 64).round().div(64).to(device, dtype)


def tables(device, width):
    rotary = rotary_tables(torch.arange(LONGEST), width, 10000.0, torch.float32)
    return tuple((table * 1024).round().div(1024).to(device) for table in rotary)


def rows_of(device, first, length, branches, pasts, dtype=torch.float32):
    """Rows of a layer: in wider tensors as of a joined projection, caches full of NaN where nothing was written."""
    rotary, rotary_index = tables(device, WIDTHS["k"]), tables(device, WIDTHS["k_idx"])
    made = {}
    for name in branches:
        width = WIDTHS.get(name, WIDTHS["v" if name[0] == "v" else "k"])
        heads = {"q": 6, "q_idx": 3, "k_idx": 1}.get(name, GROUPS)
        x = draw(device, 1, length, heads * width + 5, dtype=dtype)[..., 2:-3].unflatten(-1, (heads, width))
        tables_of = rotary_index if name.endswith("idx") else None if name[0] == "v" or "raw" in name else rotary
        if name in ("q", "q_idx"):
            made[name] = NewRows(x, first, tables_of)
        elif name in ("k", "v", "k_idx"):
            made[name] = NewRows(x, 0, tables_of, draw(device, PAGES, heads, PAGE_ROWS, width, dtype=dtype))
        else:
            size = {"win": 11, "raw": 5}[name[2:]]
            both = draw(device, 3, 4 + heads * size * width, dtype=dtype)
            ring, end = (
                both[:, 4:].unflatten(1, (heads, size, width)),
                torch.full((1, heads, size, width), torch.nan, dtype=dtype),
            )
            made[name] = NewRows(x, first - pasts[name[2:]], tables_of, ring=ring, ring_end=end.to(device))
    return made


# The interpreter has no bf16.
TYPES = (torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else []))
ALL = ("q", "k", "v", "k_win", "v_win", "k_raw", "v_raw", "q_idx", "k_idx")


@pytest.mark.parametrize(
    ("first", "length", "num_new", "branches", "pasts"),
    [
        (0, 21, 21, ALL, {"win": 0, "raw": 0}),
        (21, 30, 30, ALL, {"win": 10, "raw": 3}),
        (13, 16, 3, ALL, {"win": 10, "raw": 0}),
        (16, 1, 1, ALL[:-2], {"win": 0, "raw": 4}),
        (5, 16, 2, ALL[:3], {}),
        (9, 12, 12, ("q", "k", "v", "k_raw"), {"raw": 1}),
        (0, 16, 9, ("q", "k", "v", "q_idx", "k_idx"), {}),
        (13, 16, 3, ("q", "k_win", "v_win"), {"win": 10}),
    ],
    ids=["first", "past", "padding", "one token", "dense", "keys choose", "index alone", "window"],
)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_chunk_has_the_bits_of_the_reference(first, length, num_new, branches, pasts, dtype, device):
    numbers = torch.tensor([1, num_new, 4, 0, 8, 2, 6, 1, 3, 5], device=device)
    place, found = Place(numbers[:1], numbers[1:2], numbers[2:]), []
    for backend in ("triton", "reference"):
        rows = rows_of(device, first, length, branches, pasts, dtype)
        before = {name: new.ring.clone() for name, new in rows.items() if new.ring is not None}
        seen = append_chunk(rows, place, first, backend=backend)
        for name, ring in before.items():
            assert torch.equal(rows[name].ring, ring)
        kept = [x for new in rows.values() for x in (new.pages, new.ring_end) if x is not None]
        found.append([*seen.values(), *kept])
        assert list(seen) == list(branches)
        for name, new in rows.items():
            assert seen[name].shape == (1, first + length - new.begin, *new.x.shape[2:])
    torch.testing.assert_close(*found, rtol=0, atol=0)


# Blocks before the chunk, blocks that it ends, and whether there are values.
@pytest.mark.parametrize(("before", "new", "values"), [(0, 5, True), (9, 4, True), (9, 0, True), (3, 1, False)])
def test_compressed_blocks_have_the_bits_of_the_reference(before, new, values, device):
    """Rows of every fourth position, the first of which is the third row."""
    numbers, found = torch.tensor([1, 1, 4, 0, 8, 2, 6, 1, 3, 5], device=device), []
    place, zero = Place(numbers[:1], numbers[1:2], numbers[2:]), 2
    for backend in ("triton", "reference"):
        rows = rows_of(device, before + zero, new, ("k", "v") if values else ("k",), {})
        rows = {name: row._replace(begin=zero) for name, row in rows.items()}
        seen = append_chunk(rows, place, before + zero, zero=zero, stride=4, backend=backend)
        found.append([*seen.values(), *(row.pages for row in rows.values())])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_rows_past_tables_pages_and_rings_are_refused(device):
    numbers = torch.zeros(3, 1, dtype=torch.int64, device=device)
    place, rows = Place(*numbers), rows_of(device, 0, 9, ("q", "k", "v"), {})
    window = rows_of(device, 20, 9, ("k_win", "v_win"), {"win": 12})
    cut = tuple(table[:8] for table in rows["k"].rotary)
    for given, first, message in (
        ({"k": rows["k"], "q": rows["q"]._replace(rotary=cut)}, 0, "the pages of k must hold 9 rows, got 1"),
        ({"q": rows["q"]._replace(rotary=cut), "k": rows["k"]}, 0, "the tables of q must reach to position 8, got 8"),
        (window, 20, "k_win may begin at 9, as its ring reaches, got 8"),
    ):
        with pytest.raises(ValueError, match=message):
            append_chunk(given, place, first)


def test_every_row_has_the_position_of_the_chunk(device):
    """Rings and an index too, with rows of every second position, the first of which is the second row."""
    numbers, found = torch.tensor([1, 5, 4, 0, 8, 2], device=device), []
    place = Place(numbers[:1], numbers[1:2], numbers[2:])
    for backend in ("triton", "reference"):
        rows = rows_of(device, 9, 7, ALL, {"win": 4, "raw": 1})
        seen = append_chunk(rows, place, 9, zero=1, stride=2, backend=backend)
        kept = [x for row in rows.values() for x in (row.pages, row.ring_end) if x is not None]
        found.append([*seen.values(), *kept])
    torch.testing.assert_close(*found, rtol=0, atol=0)
