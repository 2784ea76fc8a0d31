"""The loss of the choice in a training step of a whole model: what is drawn, how it is scaled, where it is added."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trifocal.models.model_config import ModelConfig
from trifocal.nn.attention_base import ChoiceSample
from trifocal.nn.chooser import ChoosingAttention
from trifocal.nn.context import Chunk, TokenShard
from trifocal.ops import Documents
from trifocal.ops.choice_loss import Sample, draw_queries, sample_queries


class ChoiceTeaching(NamedTuple):
    """What the layers of a model are taught in a training step; its tensors are on the model's device.

    Attributes:
        step: Number of the training step, an int64 scalar.
        scales: Factor on the summed loss of each layer, [layers].
        totals: Get the scaled loss and recall of each layer added, [layers, 2], fp32.
        row_length: Tokens of a training row.
        stretch: One query is sampled of this many.
    """

    step: Tensor
    scales: Tensor
    totals: Tensor
    row_length: int
    stretch: int


class ChoiceSamples:
    """The sampled queries of a model's layers in one forward pass.

    `scales` are factors on the summed loss and recall of each layer, [layers]; `learning` are the layers that are
    taught, by number; `cut` makes the sample of a layer into one for each chunk.
    """

    def __init__(
        self,
        samples: Sample,
        scales: Tensor,
        learning: Mapping[int, ChoosingAttention],
        cut: Callable[[Sample], ChoiceSample] = lambda sample: (sample,),
    ) -> None:
        self._samples, self._scales, self._learning, self._cut = samples, scales, learning, cut
        self._figures: dict[int, Tensor] = {}

    @classmethod
    def of_step(
        cls,
        layers: Sequence[nn.Module],
        teaching: ChoiceTeaching,
        tokens: Tensor,
        positions: Tensor,
        local_tokens: TokenShard | None = None,
        draw: Callable[..., Sample] = sample_queries,
    ) -> "ChoiceSamples":
        """Those of a step of Trifocal's trainer, of tokens [B, T] and their positions [T]; they do not depend on how
        the step is cut. `draw` is `sample_queries`, or compiled from it.
        """
        learning = _choosing(layers)
        geometry, row = next(iter(learning.values())).geometry, (teaching.row_length, teaching.stretch)
        samples = draw(tokens, positions, teaching.step, len(layers), geometry, *row)
        if local_tokens is None:
            return cls(samples, teaching.scales, learning)
        chunks = local_tokens.chunks
        return cls(samples, teaching.scales, learning, lambda one: tuple(_of_chunk(one, part, *row) for part in chunks))

    @classmethod
    def of_call(cls, layers: Sequence[nn.Module], x: Tensor, documents: Documents | None) -> "ChoiceSamples | None":
        """Those of a call in another training loop, of x [B, T, ...], by PyTorch's generator; None if none learns."""
        learning = {number: layer for number, layer in _choosing(layers).items() if layer.learns_choice}
        if not learning:
            return None
        first = next(iter(learning.values()))
        rows, positions = (
            (len(x), torch.arange(x.shape[1], device=x.device)) if documents is None else (1, documents.positions)
        )
        samples = draw_queries(positions, rows, len(layers), first.geometry, first.choice_loss_stretch)
        return cls(samples, 1 / (samples.eligible.sum((1, 2)) * first.num_kv_heads).clamp(min=1), learning)

    def of_layer(self, layer: int) -> ChoiceSample | None:
        """The sample of a layer; None if it is not taught."""
        return self._cut(Sample(*(field[layer] for field in self._samples))) if layer in self._learning else None

    def add(self, layer: int, figures: Tensor) -> None:
        """Take the summed loss and recall of a layer, [2]."""
        self._figures[layer] = figures

    def figures(self) -> Tensor:
        """Scaled loss and recall of all layers, [layers, 2]; 0 where a layer is not taught."""
        [some, *_] = self._figures.values()
        untaught = torch.zeros_like(some)
        figures = torch.stack([self._figures.get(layer, untaught) for layer in range(len(self._scales))])
        return figures * self._scales[:, None]

    def call_loss(self) -> Tensor:
        """The loss of a call: that of its layers, times their weights. The layers keep loss and recall."""
        figures = self.figures()
        for number, layer in self._learning.items():
            layer.choice_figures = figures[number].detach()
        return torch.stack([layer.choice_loss_weight * figures[n, 0] for n, layer in self._learning.items()]).sum()


def _choosing(layers: Sequence[nn.Module]) -> dict[int, ChoosingAttention]:
    return {number: layer for number, layer in enumerate(layers) if isinstance(layer, ChoosingAttention)}


def _of_chunk(sample: Sample, chunk: Chunk, length: int, stretch: int) -> Sample:
    """The queries of the stretches that a chunk touches; those that lie outside of it teach nothing."""
    begin, end = chunk.first_token, chunk.num_keys
    stretches = -(-length // stretch)
    first, last = (token // length * stretches + token % length // stretch for token in (begin, end - 1))
    tokens, starts, eligible = (field[:, first : last + 1] for field in sample)
    inside = tokens.clamp(begin, end - 1)
    return Sample(inside, starts.minimum(inside), eligible & (inside == tokens))


def eligible_queries(
    config: ModelConfig, tokens: Tensor, cu_seqlens: Tensor | None, step: int, stretch: int
) -> list[int]:
    """Eligible sampled queries of each layer in tokens [B, T], with boundaries over all B * T, counted on the host."""
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
