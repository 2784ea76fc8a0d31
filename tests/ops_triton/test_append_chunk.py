"""A prompt's chunk by the kernel against the reference: the same bits in pages, in rings' ends and in what is read."""

import pytest
import torch

from trifocal.nn.rope import rotary_tables
from trifocal.ops import append_chunk
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
    for given, expected in zip(*found, strict=True):
        assert torch.equal(given, expected)


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
    for given, expected in zip(*found, strict=True):
        assert torch.equal(given, expected)


def test_what_does_not_fit_is_refused(device):
    numbers = torch.zeros(3, 1, dtype=torch.int64, device=device)
    place, rows = Place(*numbers), rows_of(device, 0, 4, ("q", "k", "v"), {})
    window = rows_of(device, 0, 4, ("k_win", "v_win"), {"win": 0})
    k_win, v_win = window["k_win"]._replace(rotary=rows["k"].rotary), window["v_win"]
    for changed, message in (
        ({"w": rows["v"]}, "a chunk's rows must be among q, k, .* got w"),
        (
            {"q": rows["q"]._replace(x=rows["q"].x[0])},
            r"q must have the shape \[1, n, heads, width\], got \[4, 6, 12\]",
        ),
        ({"v": rows["v"]._replace(pages=rows["k"].pages)}, r"cache of v must be .*, 2, 8, 7\] .* got \[9, 2, 8, 12\]"),
        ({"v": rows["v"]._replace(rotary=rows["k"].rotary)}, "v must have pages, and nothing else"),
        ({"v_win": rows["v"]}, "must have k_win too"),
        ({"v": rows["v"]._replace(x=rows["v"].x[:, 1:])}, r"v must have .* = \(4, 0, 8\), got \(3, 0, 8\)"),
        ({"q": rows["q"]._replace(rotary=tables(device, 12))}, "q must have the same tables"),
        ({"v": rows["v"]._replace(pages=rows["v"].pages.repeat(2, 1, 1, 1)[::2])}, "cache of v must be contiguous"),
        ({"k_win": k_win, "v_win": v_win._replace(x=v_win.x[..., 1:])}, r"v_win must have .* = \[1, 4, 2, 7\], got"),
        (
            {"k_win": k_win._replace(ring_end=k_win.ring_end[:, :, 1:].clone()), "v_win": v_win},
            r"cache of k_win must be .* 2, 11, 12\] .* got \[1, 2, 10, 12\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            append_chunk(rows | changed, place, 0)
    cut = tuple(table[:3] for table in rows["k"].rotary)
    short = {name: row._replace(rotary=row.rotary and cut) for name, row in rows.items()}
    tokens = rows_of(device, 0, 9, ("k", "v"), {})
    for given, where, message in (
        (short, place, "the tables of q must reach to position 3, got 3"),
        (tokens, place, "the pages of k must hold 9 rows, got 1"),
        (rows, place._replace(row=place.row.int()), "row of a place must be .* int64 and contiguous, got torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            append_chunk(given, where, 0)
    with pytest.raises(ValueError, match="a chunk with k, k_win, v_win must have v too"):
        append_chunk({"k": rows["k"], "k_win": k_win, "v_win": v_win}, place, 0)
    late = {name: row._replace(begin=20) for name, row in {**rows, "k_win": k_win, "v_win": v_win}.items()}
    late = {name: row._replace(begin=8) if "win" in name else row for name, row in late.items()}
    with pytest.raises(ValueError, match="k_win must begin at 9 to 20, as its cache reaches, got 8"):
        append_chunk(late, place._replace(pages=numbers.flatten()), 20)


def test_every_row_has_the_position_of_the_chunk(device):
    """Rings and an index too, with rows of every second position, the first of which is the second row."""
    numbers, found = torch.tensor([1, 5, 4, 0, 8, 2], device=device), []
    place = Place(numbers[:1], numbers[1:2], numbers[2:])
    for backend in ("triton", "reference"):
        rows = rows_of(device, 9, 7, ALL, {"win": 4, "raw": 1})
        seen = append_chunk(rows, place, 9, zero=1, stride=2, backend=backend)
        kept = [x for row in rows.values() for x in (row.pages, row.ring_end) if x is not None]
        found.append([*seen.values(), *kept])
    for given, expected in zip(*found, strict=True):
        assert torch.equal(given, expected)
