"""The figures of docs/kernels.md; drawn by `draw.py`. Choices of blocks are those of its invented text."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from torch import Tensor

from palette import COMPRESSED, DENSE, INK, PAST, QUIET, SELECTED, WINDOW
from trifocal import Geometry

GRAVE = "#a4adb8"


def draw_pipeline() -> Figure:
    """The stages of one call with their outputs, the tensors kept, and the backward pass behind one boundary."""
    figure, ax = _canvas(4.6, (0, 100), (0, 48))
    _group(ax, 13, 25.5, 71, 21.5, "forward: stages without gradients")
    _group(ax, 13, 1, 86, 17.5, "backward: all of it behind one boundary of autograd")
    stages = (
        (15, 35.5, "compressed\nattention", COMPRESSED),
        (33, 35.5, "scoring and\nexact top-n", SELECTED),
        (52.5, 35.5, "selected\nattention", SELECTED),
        (69, 35.5, "window\nattention", WINDOW),
    )
    for left, bottom, name, colour in stages:
        _box(ax, left, bottom, 13, 7, name, colour)
    _box(ax, 86, 34.5, 13, 9, "combination\nby gates", INK)
    for left, right, label in ((28.3, 32.7, "lse"), (46.3, 52.2, "choice")):
        _arrow(ax, (left, 39), (right, 39))
        ax.text((left + right) / 2, 39.8, label, ha="center", va="bottom", fontsize=8, color=QUIET)
    for left in (21.5, 59, 75.5):
        ax.plot((left, left, 84.5), (35.5, 31, 31), color=GRAVE, linewidth=1.1)
    _arrow(ax, (84.5, 31), (90, 34.5), style="angle,angleA=0,angleB=90,rad=3")
    ax.text(39.5, 29.2, "o of each branch", color=QUIET, fontsize=8, ha="center", va="center")
    _box(ax, 0.5, 32.5, 10, 11.5, "q\nkeys, values\ngates", DENSE)
    _arrow(ax, (10.8, 38.5), (14.8, 38.5))
    _arrow(ax, (99.2, 39), (99.2, 18.9), colour=INK)
    ax.text(98.2, 29.5, "o out", ha="right", va="center", fontsize=8.5)
    ax.text(98.2, 21.5, "d_o back in", ha="right", va="center", fontsize=8.5)
    ax.text(15, 22, "kept: inputs, three o and lse, the choice", va="center", fontsize=8.5, color=INK)
    _arrow(ax, (13.9, 25.3), (13.9, 18.8), colour=INK)
    back = (
        (81.5, "gates:\nd_gates, delta", INK),
        (61, "selected:\nd_q, d_k, d_v", SELECTED),
        (38, "compressed:\nadds to d_q; d_k, d_v", COMPRESSED),
        (15, "window:\nadds to d_q; d_k, d_v", WINDOW),
    )
    widths = (16, 17, 19.5, 19.5)
    for (left, name, colour), width in zip(back, widths, strict=True):
        _box(ax, left, 5, width, 7.5, name, colour)
    for start, end in ((81.2, 78.3), (60.7, 57.8), (37.7, 34.8)):
        _arrow(ax, (start, 8.8), (end, 8.8))
    return figure


def draw_rows() -> Figure:
    """A tile's rows are (query, head of the group) pairs, and one tile of keys serves them all."""
    figure, ax = _canvas(3.5, (0, 100), (-2, 35))
    heads, shades = 4, _shades(COMPRESSED, 4)
    for left, title, queries in (
        (3, "window, compressed: queries side by side", (40, 41, 42, 43)),
        (53, "selected, block-major: those that chose the block", (17, 41, 58, 59)),
    ):
        ax.text(left, 33, title, fontweight="bold", color=INK, va="center")
        for number, query in enumerate(queries):
            top = 26.5 - number * 6
            ax.text(left + 6.7, top - 2, f"query {query}", ha="right", va="center", fontsize=8.5)
            for head in range(heads):
                y = top - head * 1.25
                ax.add_patch(Rectangle((left + 7.5, y - 1.1), 12, 1.1, facecolor=shades[number], edgecolor="none"))
                if number == 0:
                    ax.text(left + 20.2, y - 0.6, f"head {head}", va="center", fontsize=6.5, color=QUIET)
        ax.text(left + 13.5, 28.5, "rows of q", ha="center", va="center", fontsize=8.5, color=COMPRESSED)
        ax.text(left + 27.5, 15, "\N{MULTIPLICATION SIGN}", ha="center", va="center", fontsize=15, color=QUIET)
        for column in range(8):
            ax.add_patch(Rectangle((left + 31 + column * 1.35, 10), 1.15, 10, facecolor=SELECTED, alpha=0.8))
        ax.text(left + 36.3, 22.2, "one tile of keys", ha="center", va="center", fontsize=8.5, color=SELECTED)
        ax.text(left + 36.3, 7.6, "loaded once\nfor all rows", ha="center", va="top", fontsize=8, color=QUIET)
    ax.plot((49.5, 49.5), (-1, 33), color=PAST, linewidth=1.2)
    return figure


def draw_orders(selected_blocks: Tensor) -> Figure:
    """Queries by blocks, chosen ones in colour: the cells that one program holds, and the direction of its loop."""
    figure = Figure(figsize=(9.5, 4.3), facecolor="white", layout="constrained")
    first, count, blocks = 208, 24, 16
    chosen = np.zeros((count, blocks), dtype=bool)
    for row, choice in enumerate(selected_blocks[first : first + count]):
        chosen[row, [int(block) for block in choice if block >= 0]] = True
    own = (first + np.arange(count)) // 16
    titles = (
        ("tiles", "holds a tile of queries,\npasses the blocks that any of them chose", "the usual"),
        ("masked", "holds a tile of queries,\npasses all blocks, masks row by row", "short pasts"),
        ("block-major", "holds one block,\npasses the queries that chose it", "small groups"),
    )
    for ax, (name, what, when) in zip(figure.subplots(1, 3), titles, strict=True):
        image = np.full((count, blocks, 3), 1.0)
        image[np.arange(blocks)[None, :] <= own[:, None]] = to_rgb(PAST)
        image[chosen] = np.array(to_rgb(SELECTED)) * 0.45 + 0.55
        ax.imshow(image.repeat(8, 0).repeat(8, 1), extent=(0, blocks, count, 0), interpolation="none", aspect="auto")
        for line in range(1, blocks):
            ax.axvline(line, color="white", linewidth=0.8)
        for line in range(1, count):
            ax.axhline(line, color="white", linewidth=0.8)
        if name == "block-major":
            block = int(chosen[:, 1:12].sum(0).argmax()) + 1
            rows = np.flatnonzero(chosen[:, block])
            _hold(ax, block, 0, 1, count, [(block, row) for row in rows])
            _path(ax, (block + 0.5, rows[0] + 0.5), (block + 0.5, rows[-1] + 0.5))
        elif name == "masked":
            _hold(ax, 0, 12, own[15] + 1, 4, [(b, r) for r in range(12, 16) for b in np.flatnonzero(chosen[r])])
            _path(ax, (0.5, 14), (own[15] + 0.5, 14))
        else:
            places = np.flatnonzero(chosen[12:16].any(0))
            for block in places:
                _hold(ax, block, 12, 1, 4, [(block, r) for r in range(12, 16) if chosen[r, block]])
            _path(ax, (places[-1] + 0.5, 14), (places[0] + 0.5, 14))
        ax.set_title(name, color=SELECTED, fontweight="bold", pad=34)
        ax.text(0.5, 1.025, what, transform=ax.transAxes, ha="center", va="bottom", fontsize=8.5, color=QUIET)
        ax.set(xticks=[], yticks=[], xlabel="blocks of keys")
        ax.text(0.5, -0.115, when, transform=ax.transAxes, ha="center", va="top", fontsize=9, fontweight="bold")
        ax.spines[:].set_visible(False)
    figure.axes[0].set_ylabel("queries")
    return figure


def draw_index(selected_blocks: Tensor) -> Figure:
    """Slots in the order of queries, the same sorted by block, and blocks cut into pieces."""
    figure, ax = _canvas(4.5, (0, 100), (-3, 46))
    # Pairs of neighbours from four places: enough different choices to see, few enough to read.
    queries = [196, 197, 212, 213, 228, 229, 244, 245]
    choices = [[int(block) for block in selected_blocks[query]] for query in queries]
    blocks = sorted({block for choice in choices for block in choice})
    colour = dict(zip(blocks, _palette(len(blocks)), strict=True))
    ax.text(1, 44, "the choice: a slot is one place", fontweight="bold", va="center")
    for row, choice in enumerate(choices):
        y = 37.5 - row * 4.6
        ax.text(10, y, f"query {row}", ha="right", va="center", fontsize=8.5)
        for place, block in enumerate(choice):
            _cell(ax, 11.5 + place * 4.2, y, str(block), colour[block])
    ax.text(11.5, 0.2, "block numbers", fontsize=8, color=QUIET, va="center")
    _arrow(ax, (35, 22), (44, 22), colour=INK)
    ax.text(39.5, 23.5, "stable sort\nby block", ha="center", va="bottom", fontsize=8.5)
    ax.text(
        46,
        44,
        "the index: the queries of each block, in pieces of at most 4 slots",
        fontweight="bold",
        va="center",
    )
    top = 39.5
    for block in blocks:
        sharers = [row for row, choice in enumerate(choices) if block in choice]
        y = top - blocks.index(block) * (37.5 / len(blocks))
        ax.text(53, y - 1.5, f"block {block}", ha="right", va="center", fontsize=8.5)
        x = 54.5
        for piece in range(0, len(sharers), 4):
            members = sharers[piece : piece + 4]
            ax.add_patch(
                Rectangle((x - 0.4, y - 2.85), len(members) * 4.0 + 0.5, 2.7, facecolor="none", edgecolor=INK, lw=0.9)
            )
            for row in members:
                _cell(ax, x, y - 1.5, str(row), colour[block], height=2.1)
                x += 4.0
            x += 1.6
    ax.text(54.5, -1.2, "query numbers; each frame is one program's work", fontsize=8, color=QUIET, va="center")
    return figure


def draw_scoring() -> Figure:
    """Left: the direct and the overflow part of a block's importance. Right: halving the threshold."""
    geometry = Geometry()
    figure = Figure(figsize=(9.5, 3.7), facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    taps = geometry.selection_block_size // geometry.compression_stride
    for block in (0, 1):
        x = block * taps
        left.add_patch(Rectangle((x + 0.04, 0), taps - 0.08, 0.7, facecolor=SELECTED, edgecolor="none"))
        left.text(x + taps / 2, 0.35, f"block j{' + 1' if block else ''}", ha="center", va="center", color="white")
        for tap in range(taps):
            level = 1.2 + (tap % 2) * 0.85
            direct = geometry.overlap_tokens(x + tap, block) / geometry.compression_stride
            overflow = geometry.compression_block_size / geometry.compression_stride - direct
            for start, weight, alpha in ((x + tap, direct, 0.95), (x + tap + direct, overflow, 0.45))[
                : 2 if overflow else 1
            ]:
                left.add_patch(Rectangle((start + 0.03, level), weight - 0.06, 0.7, facecolor=COMPRESSED, alpha=alpha))
            left.text(x + tap + direct / 2, level + 0.35, f"{direct:g}", ha="center", va="center", color="white")
            if overflow:
                left.text(x + tap + 1.5, level + 0.35, f"{overflow:g}", ha="center", va="center", color=INK)
    left.annotate(
        "", (taps + 0.75, 0.75), (taps + 0.5, 2.0), arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 1.3}
    )
    left.axvline(taps, color=INK, linewidth=0.9, linestyle=(0, (3, 3)), ymin=0.02, ymax=0.8)
    left.text(0.05, 3.25, "direct: to the block that it starts in", color=COMPRESSED, fontsize=9)
    left.text(taps + 0.15, 3.25, "overflow: to the next", color=COMPRESSED, alpha=0.7, fontsize=9)
    left.set(xlim=(-0.1, 2 * taps + 1.15), ylim=(-0.2, 3.7), xticks=[], yticks=[])
    left.set_title("Overlap in two parts", loc="left", fontweight="bold")
    left.spines[:].set_visible(False)

    values = np.random.default_rng(5).gamma(1.3, 0.8, 26).astype(np.float32)
    wanted, bits = 6, values.view(np.int32)
    low, high = 0, int(bits.max()) + 1
    steps = []
    reach = len(values)
    while reach != wanted:
        middle = low + (high - low) // 2
        reach = int((bits >= middle).sum())
        low, high = (middle, high) if reach > wanted else (low, middle)
        steps.append((float(np.int32(middle).view(np.float32)), reach))
    chosen = bits >= middle
    right.bar(range(len(values)), values, width=0.78, color=[SELECTED if taken else "#d3d9e0" for taken in chosen])
    tried = [step for step in steps if step[0] > values.max() / 50]
    places = np.linspace(0.03, 0.8, len(tried)) * values.max()
    for place, (level, reach) in zip(places, sorted(tried), strict=True):
        found = reach == wanted
        look = {"color": INK if found else QUIET, "linewidth": 1.7 if found else 0.8}
        right.plot((-0.6, 25.8, 28), (level, level, place), **look)
        right.text(
            28.4, place, f"{steps.index((level, reach)) + 1}.  {reach} reach it", va="center", fontsize=8,
            color=look["color"], fontweight="bold" if found else "normal",
        )  # fmt: skip
    right.set(xlim=(-0.7, 38), xticks=[], yticks=[], xlabel="free blocks of one query")
    right.xaxis.set_label_coords(0.4, -0.03)
    right.set_title(f"The threshold that {wanted} blocks reach, by halving", loc="left", fontweight="bold")
    right.spines[:].set_visible(False)
    return figure


def draw_roles() -> Figure:
    """The order of work: a portable program's turns, and the three parts of a Hopper program side by side."""
    figure, ax = _canvas(3.6, (-1, 102), (-1, 36))
    kinds = {"copy": DENSE, "multiply": COMPRESSED, "softmax": WINDOW, "wait": "#f3f4f6"}
    ax.text(0, 33.6, "portable: one program, its steps by turns", fontweight="bold", va="center")
    _strip(ax, 28, 10, [("wait", 4), ("multiply", 5), ("softmax", 6), ("multiply", 5)] * 4)
    ax.text(9, 29.5, "warps", ha="right", va="center", fontsize=8.5)
    ax.text(0, 23, "Hopper: three parts of one program side by side", fontweight="bold", va="center")
    for y, name, start, work in (
        (17, "loader", 10, [("copy", 3), ("wait", 4)] * 9),
        (12, "rows 0-63", 13, [("multiply", 5), ("softmax", 6)] * 6),
        (7, "rows 64-127", 18.5, [("multiply", 5), ("softmax", 6)] * 6),
    ):
        ax.text(9, y + 1.5, name, ha="right", va="center", fontsize=8.5)
        _strip(ax, y, start, work)
    x = 10.0
    for name, words in (
        ("copy", "copies to shared memory"),
        ("multiply", "products on the matrix units"),
        ("softmax", "exponentials and sums"),
        ("wait", "waiting"),
    ):
        ax.add_patch(Rectangle((x, 1), 2.4, 2.2, facecolor=kinds[name], edgecolor=GRAVE, linewidth=0.4))
        ax.text(x + 3.2, 2.1, words, va="center", fontsize=8.5)
        x += {"copy": 24, "multiply": 28, "softmax": 23, "wait": 12}[name]
    _arrow(ax, (82, 5), (100, 5), colour=QUIET)
    ax.text(101, 6.3, "time", ha="right", va="bottom", fontsize=8.5, color=QUIET)
    return figure


def _strip(ax: Axes, bottom: float, start: float, work: Sequence[tuple[str, float]]) -> None:
    """Spans of work, one after the other."""
    colours = {"copy": DENSE, "multiply": COMPRESSED, "softmax": WINDOW, "wait": "#f3f4f6"}
    for kind, length in work:
        ax.add_patch(Rectangle((start, bottom), length, 3, facecolor=colours[kind], edgecolor="white", linewidth=1.2))
        start += length


def _canvas(height: float, x: tuple[float, float], y: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9.5, height), facecolor="white", layout="constrained")
    ax = figure.subplots()
    ax.set(xlim=x, ylim=y)
    ax.axis("off")
    return figure, ax


def _box(ax: Axes, left: float, bottom: float, width: float, height: float, label: str, colour: str) -> None:
    shape = "round,pad=0,rounding_size=1.2"
    ax.add_patch(FancyBboxPatch((left, bottom), width, height, shape, facecolor=colour, edgecolor="none"))
    ax.text(left + width / 2, bottom + height / 2, label, ha="center", va="center", color="white", fontsize=9)


def _group(ax: Axes, left: float, bottom: float, width: float, height: float, label: str) -> None:
    shape = "round,pad=0,rounding_size=1.2"
    ax.add_patch(FancyBboxPatch((left, bottom), width, height, shape, facecolor="#f6f8fa", edgecolor="#dde3e9"))
    ax.text(left + 2, bottom + height - 1.7, label, va="center", fontsize=8.5, color=QUIET)


def _arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], *, colour: str = GRAVE, style: str = "arc3"
) -> None:
    look = {"arrowstyle": "->", "color": colour, "linewidth": 1.3, "connectionstyle": style}
    ax.annotate("", end, start, arrowprops={**look, "shrinkA": 0, "shrinkB": 0})


def _hold(ax: Axes, left: int, top: int, width: int, height: int, cells: Sequence[tuple[int, int]]) -> None:
    """Frame the cells that a program holds or passes, and fill those that it works on."""
    for block, row in cells:
        ax.add_patch(Rectangle((block + 0.04, row + 0.04), 0.92, 0.92, facecolor=SELECTED, edgecolor="none"))
    ax.add_patch(Rectangle((left, top), width, height, facecolor="none", edgecolor=INK, linewidth=1.7, zorder=5))


def _path(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.4})


def _cell(ax: Axes, left: float, middle: float, label: str, colour: str, height: float = 3.6) -> None:
    ax.add_patch(Rectangle((left, middle - height / 2), 3.7, height, facecolor=colour, edgecolor="none"))
    ax.text(left + 1.85, middle, label, ha="center", va="center", fontsize=8.5, color=INK)


def _shades(colour: str, count: int) -> list[tuple[float, ...]]:
    full = np.array(to_rgb(colour))
    return [tuple(1 - (1 - full) * strength) for strength in np.linspace(0.95, 0.45, count)]


def _palette(count: int) -> list[str]:
    tints = ("#bcd7ee", "#ffd9a8", "#b6e2d3", "#e2c8ec", "#f6c6c6", "#d9dde2", "#e9e3a6", "#c9cdf4", "#cfe8b0")
    return [tints[number % len(tints)] for number in range(count)]
