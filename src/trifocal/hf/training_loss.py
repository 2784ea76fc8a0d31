"""The loss of transformers' model in compiled training: of hidden states, or recorded with its gradients."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trifocal.hf.recorded_training import RecordedTraining
from trifocal.hf.row_layout import RowLayout, filling_of
from trifocal.models.decoder import IGNORED_TARGET, summed_loss
from trifocal.ops import Documents


class Decoder(Protocol):
    """What a loss asks of `TrifocalModel`."""

    def layout_of(
        self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, packing: dict[str, Any]
    ) -> RowLayout | None: ...

    def hidden_of(self, tokens: Tensor, documents: Documents | None) -> Tensor: ...


class Targets(NamedTuple):
    """What a loss is of, as the model's `forward` gets it: labels, or labels that are shifted already.

    Attributes:
        labels, shift_labels: [B, T]; one of them is given.
        num_items: What the loss is divided by; None: the number of targets that count.
    """

    labels: Tensor | None
    shift_labels: Tensor | None
    num_items: Tensor | int | None

    def shifted(self) -> Tensor:
        """The target of each token, [B, T]."""
        if self.shift_labels is not None:
            return self.shift_labels
        assert self.labels is not None
        return nn.functional.pad(self.labels, (0, 1), value=IGNORED_TARGET)[..., 1:].contiguous()

    def divisor(self, targets: Tensor) -> Tensor:
        """What the loss is divided by, on the device of the shifted targets."""
        if self.num_items is None:
            return (targets != IGNORED_TARGET).sum().clamp(min=1)
        if not isinstance(self.num_items, Tensor):
            return torch.full((), self.num_items, device=targets.device)
        return self.num_items.to(targets.device, non_blocking=True)


class TrainingLoss:
    """Losses of one model, by compiled code that makes no copy of the logits in fp32.

    Args:
        model: The whole model.
        decoder: Its decoder.
        cuda_graphs: Record the steps of batches without padding.
    """

    def __init__(self, model: PreTrainedModel, decoder: Decoder, *, cuda_graphs: bool) -> None:
        self._model, self._decoder = model, decoder
        self._run = torch.compile(_loss_of_hidden, dynamic=False)
        self._recorded = RecordedTraining(model, self._of_tokens) if cuda_graphs else None

    def of_hidden(self, hidden: Tensor, given: Targets) -> Tensor:
        """The loss of hidden states [B, T, E]."""
        targets = given.shifted()
        count = given.divisor(targets)
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if filling := filling_of(targets.numel()):
            hidden = nn.functional.pad(hidden, (0, 0, 0, filling))
            targets = nn.functional.pad(targets, (0, filling), value=IGNORED_TARGET)
        return self._divided(hidden, targets, count)

    def recorded(
        self,
        tokens: Tensor | None,
        given: Targets,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        packing: dict[str, Any],
    ) -> Tensor | None:
        """The recorded loss of tokens [B, T]; further arguments as of the model's `forward`.

        None where nothing is recorded; rows with padding have too many numbers of real tokens.
        """
        if self._recorded is None or tokens is None or tokens.ndim != 2 or not self._recorded.takes(tokens.device):
            return None
        if not any(parameter.requires_grad for parameter in self._model.parameters()):
            return None
        documents, targets = None, given.shifted()
        layout = self._decoder.layout_of(tokens, attention_mask, position_ids, packing)
        if layout is not None:
            if layout.places is not None:
                return None
            documents = layout.documents
            tokens, targets = layout.pack(tokens), layout.pack(targets, IGNORED_TARGET)
        return self._recorded(tokens, targets, given.divisor(targets), documents)

    def _of_tokens(self, tokens: Tensor, targets: Tensor, count: Tensor, documents: Documents | None) -> Tensor:
        hidden = self._decoder.hidden_of(tokens, documents)
        return self._divided(hidden.flatten(0, 1), targets.flatten(), count)

    def _divided(self, hidden: Tensor, targets: Tensor, count: Tensor) -> Tensor:
        """The sum of the losses of hidden states [N, E] and targets [N], divided by `count`."""
        loss: Tensor = self._run(self._model.get_output_embeddings(), hidden[None], targets) / count
        return loss


def _loss_of_hidden(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return summed_loss(head(hidden), targets)
