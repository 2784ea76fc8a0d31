"""A sequence that processes share: which pairs of query and key each of them computes."""

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from palette import COMPRESSED, INK, PAST, QUIET, SELECTED, WINDOW
from trifocal.nn.context import ContextShard, TokenShard

COLOURS = (COMPRESSED, SELECTED, WINDOW, QUIET)
PROCESSES = 4


def draw_context() -> Figure:
    """The chunks of four processes: left by query and key, right the pairs that each one has."""
    tokens = torch.zeros(1, 2 * PROCESSES)
    figure = Figure(figsize=(7.2, 2.9), layout="constrained", facecolor="white")
    pairs, work = figure.subplots(1, 2, width_ratios=(1.25, 1))
    for rank, colour in enumerate(COLOURS):
        # Chunks of one token: the keys up to a chunk's end are its number and one.
        shard = ContextShard(rank, PROCESSES, list)
        lengths = [chunk.num_keys for chunk in TokenShard.of(shard, shard.local_tokens(tokens), None).chunks]
        left = 0.0
        for length in lengths:
            row = length - 1
            pairs.add_patch(Rectangle((0, row), length, 1, facecolor=colour, edgecolor="white"))
            pairs.text(-0.25, row + 0.5, f"process {rank}", ha="right", va="center", color=colour)
            pairs.add_patch(Rectangle((row, row), 1, 1, facecolor="none", edgecolor=INK, linewidth=1.2))
            # Half of the last chunk of keys lies in the future.
            work.barh(rank, length - 0.5, left=left, color=colour, edgecolor="white", height=0.7)
            left += length - 0.5
    pairs.set(xlim=(-2.2, 2 * PROCESSES), ylim=(2 * PROCESSES, 0), aspect="equal", xticks=[], yticks=[])
    pairs.set(xlabel="keys: gathered, up to the chunk's end", title="queries of each chunk")
    work.set(yticks=range(PROCESSES), yticklabels=[f"process {rank}" for rank in range(PROCESSES)])
    work.set(xlabel="pairs of query and key, in chunks", title="the same work for all")
    work.invert_yaxis()
    work.grid(axis="x", color=PAST)
    work.set_axisbelow(True)
    for side in ("left", "bottom"):
        pairs.spines[side].set_visible(False)
    return figure
