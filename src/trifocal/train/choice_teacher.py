"""The loss of the choice of blocks in the steps of a run: which queries, how it is scaled, what it came to."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trifocal.data import Batch
from trifocal.models import DecoderLM
from trifocal.models.choice_teaching import ChoiceTeaching, eligible_queries
from trifocal.ops.devices import to_device
from trifocal.train.config.sections import TrainSection
from trifocal.train.step.optimizer import index_parameters


class ChoiceTeacher:
    """Teaches the choice of a model's layers in each step: by the mean loss over the eligible sampled queries of the
    global batch, summed over layers, times the weight. Processes that average gradients divide it by `gradient_factor`.

    `teaching` is what each forward pass is given; its tensors stay, so that recorded graphs read them anew.
    `index_parameters` are clipped apart from the others: nothing else trains them.
    """

    def __init__(self, model: DecoderLM, config: TrainSection, device: torch.device, gradient_factor: int = 1) -> None:
        self._model_config, self._device = model.config, device
        self._factor = config.choice_weight(model.config) * gradient_factor
        self.teaching = ChoiceTeaching(
            step=torch.zeros((), dtype=torch.int64, device=device),
            scales=torch.zeros(model.config.num_layers, device=device),
            totals=torch.zeros(model.config.num_layers, 2, device=device),
            row_length=config.sequence_length,
            stretch=config.choice_loss_stretch,
        )
        self.index_parameters = index_parameters(model) if config.only == "all" else []

    def eligible(self, batches: Sequence[Batch], step: int) -> list[int]:
        """Eligible sampled queries of each layer in micro-batches of a step, counted on the host."""
        counts = [0] * self._model_config.num_layers
        for batch in batches:
            found = eligible_queries(self._model_config, batch.rows, batch.cu_seqlens, step, self.teaching.stretch)
            counts = [count + more for count, more in zip(counts, found, strict=True)]
        return counts

    def begin(self, step: int, eligible: Sequence[float]) -> None:
        """Begin a step, numbered from 1, with this many eligible sampled queries of each layer in the global batch."""
        groups = self._model_config.num_kv_heads
        scales = torch.tensor([self._factor / (count * groups) if count else 0.0 for count in eligible])
        self.teaching.step.fill_(step)
        self.teaching.scales.copy_(to_device(scales, self._device))
        self.teaching.totals.zero_()

    def figures(self) -> Tensor:
        """This process's share of the step's loss and recall of each layer, [layers, 2]; the shares add up to them."""
        return self.teaching.totals / self._factor
