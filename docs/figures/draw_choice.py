"""The loss of the choice: what teaches, and what an index has learned from it on an invented text."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from palette import DENSE, INK, QUIET, SELECTED
from trifocal import Geometry
from trifocal.ops.choice_loss import (
    Sample,
    choice_loss,
    free_blocks,
    free_places,
    index_scores,
    num_free,
    recall,
    teacher_masses,
)

STEPS, WIDTH = 150, 16


def draw_choice(geometry: Geometry, x: Tensor, q: Tensor, k: Tensor, position: int) -> Figure:
    """Teacher and student of one query by block, before and after the loss has taught the index.

    Args:
        geometry: Block sizes, in tokens.
        x: Input of the layer, [T, E].
        q: Its queries, [T, H, D], of one group.
        k: The selected branch's keys, [T, 1, D].
        position: The query to show.
    """
    tokens = torch.arange(len(x))[None]
    eligible = num_free(tokens // geometry.selection_block_size, geometry) > free_places(geometry)
    sample = Sample(tokens, torch.zeros_like(tokens), eligible)
    mass = teacher_masses(q[None], k[None], sample, geometry, None)
    free = free_blocks(sample, geometry, mass.shape[-1])

    generator = torch.Generator().manual_seed(5)
    maps = [torch.randn(x.shape[1], WIDTH, generator=generator) / x.shape[1] ** 0.5 for _ in range(2)]
    to_query, to_key = (weight.requires_grad_() for weight in maps)
    optimizer = torch.optim.Adam([to_query, to_key], lr=0.01)

    def index() -> tuple[Tensor, Tensor]:
        return (x @ to_query)[None, :, None], (x @ to_key)[None]

    @torch.no_grad()
    def student() -> tuple[Tensor, float]:
        shares = index_scores(*index(), sample, geometry, None).masked_fill(~free[:, :, None], -1e9).softmax(-1)
        found = recall(mass, shares, free, eligible, geometry) / eligible.sum()
        return shares[0, position, 0], found.item()

    before = student()
    for _ in range(STEPS):
        q_idx, k_idx = index()
        loss, _ = choice_loss(q[None], k[None], sample, geometry, q_idx=q_idx, k_idx=k_idx)
        optimizer.zero_grad()
        (loss / eligible.sum()).backward()
        optimizer.step()
    after = student()

    figure = Figure(figsize=(9.5, 4.6), facecolor="white", layout="constrained")
    upper, middle, lower = figure.subplots(3, 1, sharex=True, sharey=True)
    own = position // geometry.selection_block_size
    can = free[0, position, : own + 1]
    taught = mass[0, position, 0, : own + 1].where(can, 0)
    taught = taught / taught.sum()
    _bars(upper, taught, taught, can, DENSE, geometry, "best")
    _title(upper, "Teacher: full attention of the selected branch, by block", DENSE)
    for axes, (shares, found), words in ((middle, before, "before"), (lower, after, f"after {STEPS} steps")):
        _bars(axes, shares[: own + 1], shares[: own + 1], can, SELECTED, geometry, "chosen")
        _title(axes, f"Student: the index, {words}; over all queries its choice recalls {found:.0%}", SELECTED)
    lower.set_xlabel("selection blocks of the past; forced ones are left out on both sides", color=QUIET)
    return figure


def _bars(ax: Axes, shares: Tensor, order: Tensor, can: Tensor, colour: str, geometry: Geometry, word: str) -> None:
    chosen = set(order.masked_fill(~can, -1).topk(free_places(geometry)).indices.tolist())
    for block, share in enumerate(shares.where(can, 0).tolist()):
        ax.bar(block, share, width=0.86, color=colour, alpha=1.0 if block in chosen else 0.35)
        label = word if block in chosen else "" if can[block] else "forced"
        ax.text(block, share + 0.02, label, ha="center", fontsize=8, color=colour if can[block] else QUIET)
    ax.set(yticks=[], xticks=[], ylim=(0, 0.6))
    ax.spines[["left", "right", "top"]].set_visible(False)
    ax.spines.bottom.set_color(INK)


def _title(ax: Axes, text: str, colour: str) -> None:
    ax.set_title(text, loc="left", fontsize=10.5, color=colour, fontweight="bold")
