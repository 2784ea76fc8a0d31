"""Training steps of transformers' model as CUDA graphs: forward and backward of a batch, started with a single call.

A trainer calls the model for a loss and then asks that for gradients; a graph holds both. So the gradients are computed
together with the loss, and its backward pass hands them out, times the gradient of the loss. Each kind of batch (its
sizes, packed or not) has a graph of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trifocal.models.decoder import IGNORED_TARGET
from trifocal.ops import Documents
from trifocal.train.graphs import GraphRecorder

# Each keeps its activations and gradients; batches of still other sizes are computed without a graph.
_MOST_RECORDINGS = 16
PackedLoss = Callable[[Tensor, Tensor, Tensor, Documents | None], Tensor]
Gradients = Sequence[Tensor | None]


@dataclass
class _Pass:
    """A loss and its gradients, which the next replay overwrites.

    Attributes:
        loss: In fp32, a scalar.
        gradients: One for each trainable parameter; None for those that the loss does not depend on.
        number: Counts the replays.
    """

    loss: Tensor
    gradients: Gradients
    number: int = 0


@dataclass(frozen=True)
class _Recording:
    replay: Callable[[], None]
    inputs: list[Tensor]
    result: _Pass


class RecordedTraining:
    """Computes losses of batches, and the gradients of the trainable parameters with them.

    The first batch of a kind is computed without a graph, which compiles its kernels; the second is recorded. The
    parameters must keep their memory; where they do not, all is recorded again.

    Args:
        model: Its trainable parameters get gradients.
        loss: Of tokens [B, T], targets [B, T], the number to divide by, and the documents; it waits for no device.
    """

    def __init__(self, model: PreTrainedModel, loss: PackedLoss) -> None:
        self._model, self._loss = model, loss
        self._recorder: GraphRecorder | None = None
        self._known: set[tuple[Any, ...]] = set()
        self._recordings: dict[tuple[Any, ...], _Recording] = {}
        self._places: tuple[int, ...] = ()

    @property
    def recordings(self) -> int:
        """Kinds of batches that have been recorded."""
        return len(self._recordings)

    @staticmethod
    def takes(device: torch.device) -> bool:
        """Whether steps on this device can be recorded."""
        return device.type == "cuda"

    def __call__(
        self, tokens: Tensor, targets: Tensor, count: Tensor | int | None, documents: Documents | None
    ) -> Tensor:
        """The loss of a batch, whose backward pass must come before the next call.

        Args:
            tokens: [B, T].
            targets: Shifted labels, [B, T].
            count: What the loss is divided by; None: the number of targets that count.
            documents: Packed documents, with B == 1.

        Raises:
            ValueError: If the parameters are sharded, or products are in fp16.
        """
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._check(parameters, tokens.device)
        inputs = [tokens, targets, _divisor(count, targets)]
        if documents is not None:
            inputs += documents[:3]
        kind = (
            tuple((x.shape, x.dtype) for x in inputs),
            documents and documents[3:],
            _product_type(tokens.device),
            self._model.base_model.gradient_checkpointing,
        )
        result = self._run(kind, inputs, documents, parameters)
        loss: Tensor = _WithGradients.apply(result, *parameters)  # type: ignore[no-untyped-call]
        return loss

    def _check(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            raise ValueError("compile_training(cuda_graphs=True) needs whole weights: leave cuda_graphs out under FSDP")
        if _product_type(device) is torch.float16:
            # Gradients are made before a scaler has scaled the loss.
            raise ValueError("compile_training(cuda_graphs=True) trains in bf16 or fp32, not in fp16")
        places = tuple(parameter.data_ptr() for parameter in parameters)
        if places != self._places:
            self._recordings.clear()
            self._known.clear()
            self._places = places

    def _run(
        self,
        kind: tuple[Any, ...],
        inputs: list[Tensor],
        documents: Documents | None,
        parameters: Sequence[nn.Parameter],
    ) -> _Pass:
        recorder = self._recorder = self._recorder or GraphRecorder(inputs[0].device)
        if kind in self._known and kind not in self._recordings and len(self._recordings) < _MOST_RECORDINGS:
            own = [x.clone() for x in inputs]
            replay, (loss, gradients) = recorder.record(lambda: self._passes(own, documents, parameters))
            self._recordings[kind] = _Recording(replay, own, _Pass(loss, gradients))
        self._known.add(kind)
        recording = self._recordings.get(kind)
        if recording is None:
            return _Pass(*recorder.warm_up(lambda: self._passes(inputs, documents, parameters)))
        for own_input, given in zip(recording.inputs, inputs, strict=True):
            own_input.copy_(given)
        recording.replay()
        recording.result.number += 1
        return recording.result

    def _passes(
        self, inputs: list[Tensor], documents: Documents | None, parameters: Sequence[nn.Parameter]
    ) -> tuple[Tensor, Gradients]:
        tokens, targets, count, *parts = inputs
        if documents is not None:
            documents = Documents(parts[0], parts[1], parts[2], *documents[3:])
        device = tokens.device.type
        dtype = _product_type(tokens.device)
        # A copy of a weight that autocast kept from outside would not be made again in a replay.
        with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            loss = self._loss(tokens, targets, count, documents)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return loss.detach(), gradients


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, result: _Pass, *parameters: nn.Parameter) -> Tensor:
        ctx.result, ctx.number = result, result.number
        return result.loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        result = ctx.result
        if ctx.number != result.number:
            raise RuntimeError(
                "the gradients of this loss are gone: after compile_training(cuda_graphs=True), call backward() before "
                "the model's next batch"
            )
        scaled = iter(torch._foreach_mul([x for x in result.gradients if x is not None], upstream))
        return None, *(None if x is None else next(scaled) for x in result.gradients)


def _divisor(count: Tensor | int | None, targets: Tensor) -> Tensor:
    """What the loss is divided by, on the device of the targets."""
    if count is None:
        return (targets != IGNORED_TARGET).sum().clamp(min=1)
    if isinstance(count, int):
        return torch.full((), count, device=targets.device)
    return count.to(targets.device, non_blocking=True)


def _product_type(device: torch.device) -> torch.dtype | None:
    """Autocast's; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
