"""Draw the figures of the docs from the library's own functions: `python docs/figures/draw.py [FOLDER]`.

Nothing in them is drawn by hand: choices come from `select_blocks`, overlaps and counts from `Geometry`. The folder
is this one unless given, and then the tables of docs/quality.md are written too, from the results of
benchmarks/quality.py. Needs matplotlib, which `pip install 'trifocal[docs]'` brings.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import Tensor

from trifocal import Geometry
from trifocal.ops import compressed_attention, mean_compress, select_blocks

# The modules beside this one, also where a test loads it by its path.
sys.path.insert(0, str(Path(__file__).parent))
import draw_choice
import draw_context
import draw_decoding
import draw_kernels
import draw_quality
from palette import COMPRESSED, DARK, DENSE, INK, PAST, QUIET, SELECTED, STYLE, WINDOW

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MINUS = "\N{MINUS SIGN}"
# The paper's proportions at a quarter of its size, so that single tokens can be seen.
SMALL = Geometry(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=16,
    num_selected_blocks=5,
    num_initial_blocks=1,
    num_local_blocks=2,
    window_size=32,
)
TOPICS = (("A", 38), ("B", 42), ("C", 40), ("A", 34), ("B", 30), ("D", 32), ("C", 40))
NUM_TOKENS = sum(length for _, length in TOPICS)


class Scene(NamedTuple):
    """The attention of four heads of one group on an invented text with recurring topics.

    Attributes:
        probabilities: p_cmp of each query, mean over the heads, [T, C].
        selected_blocks: From `select_blocks`, [T, N], -1 pads.
    """

    probabilities: Tensor
    selected_blocks: Tensor


def make_tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Meanings [T, E], queries [T, H, D] and keys [T, 1, D]: tokens of a topic share a direction, the rest is noise."""
    generator = torch.Generator().manual_seed(7)
    heads, dim = 4, 32
    directions = torch.linalg.qr(torch.randn(dim, 4, generator=generator)).Q.T
    topic = torch.cat([torch.full((length,), "ABCD".index(name)) for name, length in TOPICS])
    meaning = directions[topic] * 5.0
    q = meaning[:, None] + torch.randn(NUM_TOKENS, heads, dim, generator=generator) * 0.7
    k = meaning[:, None] + torch.randn(NUM_TOKENS, 1, dim, generator=generator) * 0.7
    return meaning, q, k


def make_scene() -> Scene:
    """The choice of four heads on the tokens of `make_tokens`."""
    _, q, k = make_tokens()
    dim = q.shape[-1]
    k_cmp = mean_compress(k[None], SMALL)
    _, lse = compressed_attention(q[None], k_cmp, k_cmp, SMALL)
    selected = select_blocks(q[None], k_cmp, lse, SMALL)
    scores = torch.einsum("thd,cd->thc", q, k_cmp[0, :, 0]) / dim**0.5
    last_token = torch.arange(k_cmp.shape[1]) * SMALL.compression_stride + SMALL.compression_block_size - 1
    visible = last_token <= torch.arange(NUM_TOKENS)[:, None, None]
    probabilities = torch.where(visible, (scores - lse[0, :, :, None]).exp(), 0.0).mean(1)
    return Scene(probabilities, selected[0, :, 0])


def reads_of_compressed(scene: Scene) -> np.ndarray:
    """Weight of each token for each query through compressed blocks, [T, S]; 0 where no block is visible."""
    tokens = torch.arange(NUM_TOKENS)
    start = torch.arange(scene.probabilities.shape[1])[:, None] * SMALL.compression_stride
    inside = (start <= tokens) & (tokens < start + SMALL.compression_block_size)
    return (scene.probabilities @ inside.float()).numpy()


def reads_of_selected(scene: Scene) -> np.ndarray:
    """Tokens that each query reads in its selected blocks, [T, S], boolean."""
    tokens = torch.arange(NUM_TOKENS)
    chosen = (scene.selected_blocks[:, :, None] == tokens // SMALL.selection_block_size).any(1)
    return (chosen & (tokens <= tokens[:, None])).numpy()


def reads_of_window() -> np.ndarray:
    """Tokens that each query reads in its window, [T, S], boolean."""
    distance = np.arange(NUM_TOKENS)[:, None] - np.arange(NUM_TOKENS)
    return (distance >= 0) & (distance < SMALL.window_size)


def importance(scene: Scene, position: int) -> np.ndarray:
    """Eq. 9 for one query: the probability of each selection block by overlap, [J]."""
    blocks = SMALL.num_selection_blocks(NUM_TOKENS)
    overlap = [
        [SMALL.overlap_tokens(i, j) / SMALL.compression_stride for i in range(scene.probabilities.shape[1])]
        for j in range(blocks)
    ]
    return np.array(overlap) @ scene.probabilities[position].numpy()


def draw_reads() -> Figure:
    """Keys that every query reads: dense attention, then the three branches."""
    scene = make_scene()
    causal = np.tril(np.ones((NUM_TOKENS, NUM_TOKENS), dtype=bool))
    compressed, selected, window = reads_of_compressed(scene), reads_of_selected(scene), reads_of_window()
    # Attention varies by orders of magnitude; the root keeps the faint blocks in sight.
    heat = np.sqrt(compressed / compressed.max(axis=1, keepdims=True).clip(min=1e-9))
    blocks = np.mean([SMALL.num_compressed_blocks(t + 1) for t in range(NUM_TOKENS)])
    panels = (
        ("dense", "the whole past", DENSE, causal * 0.75, _mean(causal)),
        ("compressed", f"{SMALL.compression_block_size} tokens in one key", COMPRESSED, heat, blocks),
        ("selected", f"{SMALL.num_selected_blocks} blocks in full detail", SELECTED, selected * 0.85, _mean(selected)),
        ("window", f"the last {SMALL.window_size} tokens", WINDOW, window * 0.85, _mean(window)),
    )
    figure = Figure(figsize=(9.5, 3.5), facecolor="white", layout="constrained")
    axes = figure.subplots(1, 4, sharey=True)
    for ax, (name, what, colour, strength, mean) in zip(axes, panels, strict=True):
        seen = strength > 0 if name != "compressed" else compressed > 0
        _draw_map(ax, causal, np.where(seen, 0.18 + 0.82 * strength, 0.0), colour)
        ax.set_title(name, color=colour, fontweight="bold", pad=31)
        caption = f"{what}\n{mean:.0f} keys a query"
        ax.text(0.5, 1.03, caption, transform=ax.transAxes, ha="center", va="bottom", fontsize=9, color=QUIET)
        ax.set_xlabel("key", labelpad=15, color=QUIET)
        _mark_topics(ax)
    axes[0].set_ylabel("query", labelpad=15, color=QUIET)
    return figure


def _mean(reads: np.ndarray) -> float:
    """Keys that a query reads, mean over the queries."""
    return float(reads.sum(1).mean())


def _draw_map(ax: Axes, causal: np.ndarray, strength: np.ndarray, colour: str) -> None:
    """Paint [T, S]: white ahead, grey behind, colour where something is read."""
    white, past, full = (np.array(to_rgb(c)) for c in ("white", PAST, colour))
    image = np.where(causal[..., None], past, white)
    image = np.where(strength[..., None] > 0, white + strength[..., None] * (full - white), image)
    # Four pixels a token: viewers that smooth a small image would blur the edges of tokens.
    ax.imshow(image.repeat(4, 0).repeat(4, 1), extent=(0, NUM_TOKENS, NUM_TOKENS, 0), interpolation="none")
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def _mark_topics(ax: Axes) -> None:
    """Name the topics along both axes of a map."""
    start = 0
    for name, length in TOPICS:
        middle = start + length / 2
        ax.text(middle, NUM_TOKENS + 3, name, ha="center", va="top", fontsize=8, color=QUIET)
        ax.text(-4, middle, name, ha="right", va="center", fontsize=8, color=QUIET)
        start += length
        for line in (ax.axhline, ax.axvline):
            line(start, color="white", linewidth=0.6, alpha=0.7)


def draw_one_query(position: int = 234) -> Figure:
    """One query: compressed probabilities, the importance that follows, and the keys that the three branches read."""
    scene = make_scene()
    figure = Figure(figsize=(9.5, 5.2), facecolor="white", layout="constrained")
    upper, middle, lower = figure.subplots(3, 1, sharex=True, height_ratios=[1, 1, 1.05])
    stride, block = SMALL.compression_stride, SMALL.selection_block_size

    count = SMALL.num_compressed_blocks(position + 1)
    p_cmp = scene.probabilities[position, :count].numpy()
    centres = np.arange(count) * stride + SMALL.compression_block_size / 2
    upper.bar(centres, p_cmp, width=stride * 0.8, color=COMPRESSED)
    _caption(upper, "1  Attend to compressed blocks: a probability each", COMPRESSED)

    chosen = {int(j) for j in scene.selected_blocks[position] if j >= 0}
    own = position // block
    forced = {j for j in chosen if j < SMALL.num_initial_blocks or j > own - SMALL.num_local_blocks}
    scores = importance(scene, position)[: own + 1]
    for j, score in enumerate(scores):
        colour = SELECTED if j in chosen else "#d3d9e0"
        middle.bar((j + 0.5) * block, score, width=block * 0.86, color=colour, alpha=0.45 if j in forced else 1.0)
        label = "forced" if j in forced else "chosen" if j in chosen else ""
        middle.text((j + 0.5) * block, score + scores.max() * 0.05, label, ha="center", fontsize=8, color=SELECTED)
    middle.set_ylim(0, scores.max() * 1.3)
    _caption(middle, "2  Spread it over selection blocks by overlap: keep the most important", SELECTED)

    for row, (name, colour) in enumerate((("window", WINDOW), ("selected", SELECTED), ("compressed", COMPRESSED))):
        spans: list[tuple[float, float]] = [(0, position + 1)]
        _strip(lower, row, spans, PAST)
        if name == "compressed":
            spans = [(i * stride + 0.4, stride - 0.8) for i in range(count)]
        elif name == "selected":
            spans = [(j * block + 0.4, min(block, position + 1 - j * block) - 0.8) for j in sorted(chosen)]
        else:
            spans = [(position + 1 - SMALL.window_size, SMALL.window_size)]
        _strip(lower, row, spans, colour)
        lower.text(-3, row, name, ha="right", va="center", fontsize=9.5, color=colour, fontweight="bold")
    lower.axvline(position + 0.5, color=INK, linewidth=1.1)
    lower.text(position + 2.5, 2.62, "the query", va="center", fontsize=9, color=INK)
    lower.set(ylim=(-0.6, 2.95), xlim=(-1, NUM_TOKENS))
    _caption(lower, "3  Read: three branches, mixed by gates", INK)
    start = 0
    for name, length in TOPICS:
        lower.text(start + length / 2, -0.95, name, ha="center", va="center", color=QUIET)
        start += length
        for ax in (upper, middle, lower):
            ax.axvline(start, color="#c5ccd3", linewidth=0.7, linestyle=(0, (2, 3)), zorder=0)
    lower.set_xlabel("topics of the text, from its first token to its last", labelpad=16, color=QUIET)
    for ax in (upper, middle, lower):
        ax.set(yticks=[], xticks=[])
        ax.spines[["left", "right", "top"]].set_visible(False)
        ax.spines.bottom.set_visible(ax is not lower)
    return figure


def _caption(ax: Axes, text: str, colour: str) -> None:
    ax.set_title(text, loc="left", fontsize=10.5, color=colour, fontweight="bold")


def _strip(ax: Axes, row: float, spans: list[tuple[float, float]], colour: str) -> None:
    ax.broken_barh(spans, (row - 0.33, 0.66), facecolors=colour, edgecolors="none")


def draw_overlap() -> Figure:
    """Eq. 9 for the paper's sizes: the compressed blocks that a selection block takes, and their weights."""
    geometry, j = Geometry(), 1
    stride, size = geometry.compression_stride, geometry.compression_block_size
    figure = Figure(figsize=(9.5, 3.4), facecolor="white", layout="constrained")
    ax = figure.subplots()
    shades = LinearSegmentedColormap.from_list("overlap", ["#cfe0f0", COMPRESSED])
    first, last = j * geometry.selection_block_size, (j + 1) * geometry.selection_block_size
    ax.fill_between((first, last), -2.6, 0.95, color=SELECTED, alpha=0.10, linewidth=0)
    for i in range(2, 10):
        weight = geometry.overlap_tokens(i, j) / stride
        # Neighbours overlap by half, so they stand on steps.
        face = shades(weight / 2) if weight else "#eef1f4"
        ink = "white" if weight == 2 else INK if weight else QUIET
        label = _offset("4j", i - 4 * j) + (f"  \N{MULTIPLICATION SIGN}{weight:g}" if weight else "")
        _box(ax, i * stride, -(i % 2) * 0.95, size, label, face, ink)
    _box(ax, first, -2.45, last - first, "selection block j", SELECTED, "white")
    ax.text(first, 1.25, f"compressed blocks of {size} tokens, one every {stride}", color=COMPRESSED, va="center")
    weights = " ".join(f"{w:g}" for w in geometry.overlap_stencil())
    ax.text(last + 3, -2.05, f"importance of j:\np_cmp times  {weights}", va="center", color=INK)
    ticks = range(2 * stride, 12 * stride, stride)
    ax.set_xticks(ticks, [_offset("64j", tick - first) for tick in ticks], fontsize=8)
    ax.set(xlim=(28, 180), ylim=(-2.75, 1.5), yticks=[], axisbelow=True)
    ax.grid(axis="x", color=PAST, linewidth=0.8)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return figure


def _box(ax: Axes, left: float, bottom: float, width: float, label: str, face: object, ink: str) -> None:
    shape = "round,pad=0,rounding_size=2"
    # The aspect undoes the stretch of the axes: round corners stay round.
    look = {"mutation_aspect": 0.09, "facecolor": face, "edgecolor": "none"}
    ax.add_patch(FancyBboxPatch((left + 0.5, bottom), width - 1, 0.8, shape, **look))
    ax.text(left + width / 2, bottom + 0.4, label, ha="center", va="center", color=ink)


def _offset(name: str, offset: int) -> str:
    return name if offset == 0 else f"{name} {'+' if offset > 0 else MINUS} {abs(offset)}"


def draw_keys_read() -> Figure:
    """Keys that one decoding step reads, against the length of the past."""
    geometry = Geometry()
    # At the end of a selection block, where the query's own block is full.
    lengths = np.unique(np.logspace(2, 14, 200, base=2).astype(int)) * geometry.selection_block_size
    total = np.array([geometry.keys_read_per_step(int(length) - 1) for length in lengths])
    compressed = np.array([geometry.num_compressed_blocks(int(length)) for length in lengths])
    window = np.minimum(lengths, geometry.window_size)
    figure = Figure(figsize=(9.5, 4.2), facecolor="white", layout="constrained")
    ax = figure.subplots()
    ax.fill_between(lengths, total, lengths, color=INK, alpha=0.045, linewidth=0)
    for reads, name, colour, width, lift in (
        (lengths, "dense", DENSE, 2.2, 0),
        (compressed, "compressed", COMPRESSED, 1.5, -7),
        (total - compressed - window, "selected", SELECTED, 1.5, 0),
        (window, "window", WINDOW, 1.5, 0),
        (total, "all three", INK, 2.8, 7),
    ):
        ax.plot(lengths, reads, color=colour, linewidth=width, solid_capstyle="round")
        label = {"xytext": (9, lift), "textcoords": "offset points", "va": "center", "color": colour}
        ax.annotate(f"{reads[-1]:,}  {name}", (lengths[-1], reads[-1]), **label)
    for length in (8192, 65536):
        reads = geometry.keys_read_per_step(length - 1)
        arrow = {"arrowstyle": "<->", "color": QUIET, "shrinkA": 1, "shrinkB": 1}
        ax.annotate("", (length, length), (length, reads), arrowprops=arrow)
        times = f"{length / reads:.1f} \N{MULTIPLICATION SIGN}"
        ax.text(length * 1.1, (length * reads) ** 0.5, times, va="center", color=INK)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ticks = [2**power for power in range(8, 21, 2)]
    ax.set_xticks(ticks, [_short(tick) for tick in ticks])
    ax.set_yticks(ticks, [_short(tick) for tick in ticks])
    ax.minorticks_off()
    ax.grid(color=PAST)
    ax.set_axisbelow(True)
    ax.set(xlim=(256, 2**20), ylim=(64, 2**20.4), xlabel="tokens so far", ylabel="keys read by one step")
    return figure


def draw_speed() -> Figure:
    """Device time over length of NSA, one branch and dense attention on one GPU, from the newest result file."""
    rows = json.loads(max(RESULTS.glob("attention_crossover_h200_*.json")).read_text())["rows"]
    rows = [row for row in rows if row["status"] == "ok" and row["choices"] in ("", "random")]
    figure = Figure(figsize=(7.2, 3.3), layout="constrained", facecolor="white")
    for ax, measure, title in zip(
        figure.subplots(1, 2), ("forward", "forward_backward"), ("forward", "forward and backward"), strict=True
    ):
        lines = {}
        for row_name, label, colour in (
            ("dense cudnn", "dense, cuDNN", DENSE),
            ("whole", "NSA", WINDOW),
            ("one branch", "one branch", SELECTED),
        ):
            times = {row["tokens"]: row[f"{measure}_device_ms"] for row in rows if row["row"] == row_name}
            lines[row_name] = dict(sorted(times.items()))
            ax.plot(*zip(*lines[row_name].items(), strict=True), color=colour, marker="o", markersize=4, label=label)
        longest = max(lines["one branch"])
        ratio = lines["dense cudnn"][longest] / lines["one branch"][longest]
        words = f"{ratio:.1f} times faster at {_short(longest)}"
        ax.text(0.98, 0.04, words, transform=ax.transAxes, ha="right", color=SELECTED)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ticks = [tokens for tokens in sorted(lines["one branch"]) if not tokens & (tokens - 1)]
        ax.set_xticks(ticks, [_short(tokens) for tokens in ticks])
        ax.minorticks_off()
        ax.grid(color=PAST)
        ax.set_axisbelow(True)
        ax.set(xlabel="tokens", ylabel="milliseconds of the device", title=title)
    ax.legend(frameon=False, loc="upper left")
    return figure


def _short(count: int) -> str:
    return f"{count}" if count < 1024 else f"{count // 1024}k" if count < 2**20 else f"{count // 2**20}M"


FIGURES: dict[str, Callable[[], Figure]] = {
    "reads.svg": draw_reads,
    "one_query.svg": draw_one_query,
    "overlap.svg": draw_overlap,
    "choice_loss.svg": lambda: draw_choice.draw_choice(SMALL, *make_tokens(), 234),
    "context.svg": draw_context.draw_context,
    "keys_read.svg": draw_keys_read,
    "speed.svg": draw_speed,
    "loss_over_time.svg": draw_quality.draw_time,
    "kernels_pipeline.svg": draw_kernels.draw_pipeline,
    "kernels_rows.svg": draw_kernels.draw_rows,
    "kernels_orders.svg": lambda: draw_kernels.draw_orders(make_scene().selected_blocks),
    "kernels_index.svg": lambda: draw_kernels.draw_index(make_scene().selected_blocks),
    "kernels_scoring.svg": draw_kernels.draw_scoring,
    "kernels_roles.svg": draw_kernels.draw_roles,
    "decoding.svg": lambda: draw_decoding.draw_decoding(SMALL, make_scene().selected_blocks, 234),
    **draw_quality.figures(),
}


def draw_all(folder: Path) -> list[Path]:
    """Draw every figure into a folder and return the files."""
    with mpl.rc_context(STYLE):
        for name, draw in FIGURES.items():
            draw().savefig(folder / name, metadata={"Date": None})
            _serve_dark_pages(folder / name)
    return [folder / name for name in FIGURES]


def _serve_dark_pages(path: Path) -> None:
    """Invert light and dark on dark pages; hues stay."""
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("</style>", f"{DARK}</style>", 1), encoding="utf-8")


if __name__ == "__main__":
    for path in draw_all(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent):
        print(path)
    if len(sys.argv) == 1:
        draw_quality.PAGE.write_text(draw_quality.page(draw_quality.PAGE.read_text(encoding="utf-8")), encoding="utf-8")
