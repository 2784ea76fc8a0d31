"""The loss of the choice in a training step of a whole model: what is drawn, how it is scaled, where it is added."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trifocal.models.model_config import ModelConfig
from trifocal.nn.attention_base import Lesson
from trifocal.nn.context import Chunk, OwnTokens
from trifocal.ops.choice_loss import Sample, sample_queries


class ChoiceTeaching(NamedTuple):
    """What the layers of a model are taught in a training step; its tensors are on the model's device.

    Attributes:
        step: Number of the training step, an int64 scalar.
        scales: Factor on the summed loss of each layer, [layers].
        totals: Get the scaled loss and recall of each layer added, [layers, 2], fp32.
        row_length: Tokens of a training row.
        stretch: One query is sampled of so many.
    """

    step: Tensor
    scales: Tensor
    totals: Tensor
    row_length: int
    stretch: int


class Lessons:
    """Makes the lessons of the layers for one forward pass.

    Args:
        teaching: What they are taught.
        config: Configuration of the model.
        tokens: [B, T].
        positions: Position of each token in its document, [T].
        own: The tokens among them that this process has; None for all.
        draw: `sample_queries`, or compiled from it.
    """

    def __init__(
        self,
        teaching: ChoiceTeaching,
        config: ModelConfig,
        tokens: Tensor,
        positions: Tensor,
        own: OwnTokens | None = None,
        draw: Callable[..., Sample] = sample_queries,
    ) -> None:
        self._teaching, self._own = teaching, own
        row = teaching.row_length, teaching.stretch
        self._samples = draw(tokens, positions, teaching.step, config.num_layers, config.geometry, *row)
        self._figures: dict[int, Tensor] = {}

    def of_layer(self, layer: int) -> Lesson:
        """The lesson of a layer."""
        sample = Sample(*(field[layer] for field in self._samples))
        return (sample,) if self._own is None else tuple(self._of_chunk(sample, chunk) for chunk in self._own.chunks)

    def _of_chunk(self, sample: Sample, chunk: Chunk) -> Sample:
        """The queries of the stretches that a chunk touches; those that lie outside of it teach nothing."""
        begin, end = chunk.first_token, chunk.num_keys
        length, stretch = self._teaching.row_length, self._teaching.stretch
        stretches = -(-length // stretch)
        first, last = (token // length * stretches + token % length // stretch for token in (begin, end - 1))
        tokens, starts, eligible = (field[:, first : last + 1] for field in sample)
        inside = tokens.clamp(begin, end - 1)
        return Sample(inside, starts.minimum(inside), eligible & (inside == tokens))

    def add(self, layer: int, figures: Tensor) -> None:
        """Take the loss and recall of a layer, [2]."""
        self._figures[layer] = figures

    def attach_to(self, loss: Tensor) -> Tensor:
        """The model's loss, unchanged, whose backward pass is that of the choice's loss as well."""
        if not self._figures:
            return loss
        totals = self._teaching.totals
        untaught = torch.zeros_like(totals[0])
        figures = torch.stack([self._figures.get(layer, untaught) for layer in range(len(totals))])
        figures = figures * self._teaching.scales[:, None]
        totals.add_(figures.detach())
        return _attach(loss, figures[:, 0].sum())


def eligible_queries(
    config: ModelConfig, tokens: Tensor, cu_seqlens: Tensor | None, step: int, stretch: int
) -> list[int]:
    """Eligible sampled queries of each layer in a micro-batch, counted on the host.

    Args:
        config: Configuration of the model.
        tokens: [B, T].
        cu_seqlens: Boundaries of the documents over the B * T tokens, or None.
        step: Number of the training step.
        stretch: One query is sampled of so many.
    """
    row_length = tokens.shape[1]
    positions = torch.arange(row_length)
    if cu_seqlens is not None:
        # NumPy, in one thread: PyTorch shares these few numbers among all cores, and waits where others use them.
        starts = cu_seqlens.numpy()
        positions = torch.from_numpy(np.arange(tokens.numel()) - np.repeat(starts[:-1], np.diff(starts)))
    sample = sample_queries(tokens, positions, step, config.num_layers, config.geometry, row_length, stretch)
    chooses = [kind in ("nsa", "selected") for kind in config.attention_of_layers]
    counts = sample.eligible.sum((1, 2)).tolist()
    return [count if chosen else 0 for count, chosen in zip(counts, chooses, strict=True)]


class _Attach(torch.autograd.Function):
    """Returns the first input; in backward the second gets a gradient of 1, whatever that of the first is."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, attached: Tensor) -> Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.type = attached.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return d_loss, torch.ones((), dtype=ctx.type, device=d_loss.device)


def _attach(loss: Tensor, attached: Tensor) -> Tensor:
    return _Attach.apply(loss, attached)  # type: ignore[no-any-return, no-untyped-call]
