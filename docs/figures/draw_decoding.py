"""The figure of docs/inference.md; drawn by `draw.py`. The choice of blocks is that of its invented text."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from palette import COMPRESSED, INK, PAST, QUIET, SELECTED, WINDOW
from trifocal import Geometry

PAGE = 32
"""Tokens of a page here; those of the engine have 256."""
# Where the pages of the sequence happen to lie among all pages.
NUM_PAGES = 10


def draw_decoding(geometry: Geometry, selected_blocks: Tensor, position: int) -> Figure:
    """The parts of the caches that one new token reads: pages of keys, pages of compressed keys, the window's ring."""
    figure = Figure(figsize=(9.5, 4.6), facecolor="white", layout="constrained")
    ax = figure.subplots()
    chosen = sorted(int(block) for block in selected_blocks[position] if block >= 0)
    tokens, stride = position + 1, geometry.compression_stride
    columns = -(-tokens // PAGE)
    order = [(3 * column + 2) % NUM_PAGES for column in range(columns)]

    _title(ax, 9.4, "the sequence, and its block table: which page holds which tokens")
    for column, page in enumerate(order):
        width = min(PAGE, tokens - column * PAGE)
        ax.add_patch(Rectangle((column * PAGE, 8.1), width, 0.8, facecolor=PAST, edgecolor="white", linewidth=1.5))
        ax.text(column * PAGE + width / 2, 8.5, f"page {page}", ha="center", va="center", fontsize=8.5, color=INK)
    ax.annotate(
        "new token", (tokens - 0.5, 8.95), (tokens + 8, 9.4), fontsize=9, va="center",
        arrowprops={"arrowstyle": "->", "color": INK},
    )  # fmt: skip

    _title(ax, 7.3, "pages of keys and values, one layer: the chosen blocks are read", SELECTED)
    _title(ax, 4.9, "pages of compressed keys and values: all blocks so far are read, and scored", COMPRESSED)
    gap = 2
    for page in range(NUM_PAGES):
        left = page * (PAGE + gap)
        mine = page in order
        for bottom in (5.75, 3.35):
            ax.add_patch(Rectangle((left, bottom), PAGE, 0.9, facecolor=PAST if mine else "none", edgecolor="#c5ccd3"))
        ax.text(left + PAGE / 2, 5.45, str(page), ha="center", va="center", fontsize=8, color=QUIET)
        if not mine:
            continue
        first = order.index(page) * PAGE
        for block in chosen:
            begin = block * geometry.selection_block_size
            if first <= begin < first + PAGE:
                size = min(geometry.selection_block_size, tokens - begin)
                ax.add_patch(Rectangle((left + begin - first, 5.75), size, 0.9, facecolor=SELECTED, edgecolor="white"))
        for number in range(geometry.num_compressed_blocks(tokens)):
            # A block lies where its last tokens do.
            last = number * stride + geometry.compression_block_size - stride
            if first <= last < first + PAGE:
                ax.add_patch(
                    Rectangle(
                        (left + last - first + 0.4, 3.5), stride - 0.8, 0.6, facecolor=COMPRESSED, edgecolor="none"
                    )
                )

    _title(ax, 2.5, "ring of the window: its last tokens, each in the place of one that left", WINDOW)
    for place in range(geometry.window_size):
        newest = place == position % geometry.window_size
        ax.add_patch(
            Rectangle((place * 4, 1.0), 3.5, 0.9, facecolor=WINDOW, alpha=1.0 if newest else 0.6, edgecolor="none")
        )
    ax.text(geometry.window_size * 4 + 4, 1.45, "dark: the new token", va="center", fontsize=8.5, color=QUIET)
    reads = geometry.keys_read_per_step(position)
    ax.text(0, 0.1, f"{reads} keys are read of {tokens} tokens here; at 65,536 tokens of the paper's sizes "
            f"{Geometry().keys_read_per_step(65535):,}.", fontsize=9, color=INK, va="center")  # fmt: skip
    ax.set(xlim=(-1, NUM_PAGES * (PAGE + gap)), ylim=(-0.3, 9.8))
    ax.axis("off")
    return figure


def _title(ax: Axes, y: float, text: str, colour: str = INK) -> None:
    ax.text(0, y, text, fontsize=10, color=colour, fontweight="bold", va="center")
