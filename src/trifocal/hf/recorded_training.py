"""Training steps of transformers' model as CUDA graphs: forward and backward of a batch, started with a single call.

A trainer calls the model for a loss and then asks that for gradients; a graph holds both. So the gradients are computed
together with the loss, and its backward pass hands them out, times the gradient of the loss. Each kind of batch (its
sizes, packed or not) has a graph of its own; all write their gradients into the same memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import PreTrainedModel

from trifocal.ops import Documents
from trifocal.train.graphs import GraphRecorder

# Each keeps memory of its own; batches of still other sizes are computed without a graph.
_MOST_RECORDINGS = 16
PackedLoss = Callable[[Tensor, Tensor, Tensor, Documents | None], Tensor]
# One for each trainable parameter; None for those that the loss does not depend on.
Gradients = Sequence[Tensor | None]


class _Recording(NamedTuple):
    replay: Callable[[], None]
    inputs: list[Tensor]
    loss: Tensor
    gradients: Gradients


@dataclass
class _Graphs:
    """What is recorded, while parameters stay at their places in memory.

    A pool of memory whose graphs are gone takes no others, so the recorder goes with them.
    """

    places: tuple[Any, ...] = ()
    recorder: GraphRecorder | None = None
    known: set[tuple[Any, ...]] = field(default_factory=set)
    recordings: dict[tuple[Any, ...], _Recording] = field(default_factory=dict)
    gradients: list[Tensor] = field(default_factory=list)


class RecordedTraining:
    """Computes losses of batches, and the gradients of the trainable parameters with them.

    The first batch of a kind is computed without a graph, which compiles its kernels; the second is recorded. Where
    parameters move, are frozen or unfrozen, all is recorded again.

    Args:
        model: Its trainable parameters get gradients.
        loss: Of tokens [B, T], targets [B, T], the number to divide by, and the documents; it waits for no device.

    Attributes:
        replays: How many there were; each overwrites the gradients of the one before.
    """

    def __init__(self, model: PreTrainedModel, loss: PackedLoss) -> None:
        self._model, self._module = model, _Loss(model, loss)
        self.replays = 0
        self._graphs = _Graphs()

    def __getstate__(self) -> dict[str, Any]:
        """Without graphs: a copy of the model records its own."""
        return self.__dict__ | {"_graphs": _Graphs()}

    @property
    def recordings(self) -> int:
        """Kinds of batches that have been recorded."""
        return len(self._graphs.recordings)

    @staticmethod
    def takes(device: torch.device) -> bool:
        """Whether steps on this device can be recorded."""
        return device.type == "cuda"

    def __call__(self, tokens: Tensor, targets: Tensor, count: Tensor, documents: Documents | None) -> Tensor:
        """The loss of a batch, whose backward pass must come before the next call.

        Args:
            tokens: [B, T].
            targets: Shifted labels, [B, T].
            count: What the loss is divided by, a scalar.
            documents: Packed documents, with B == 1.

        Raises:
            ValueError: If the parameters are sharded, or products are in fp16.
        """
        graphs, parameters = self._graphs_of(list(self._model.parameters()), tokens.device)
        inputs = [tokens, targets, count]
        if documents is not None:
            inputs += documents[:3]
        kind = (
            tuple((x.shape, x.dtype) for x in inputs),
            documents and documents[3:],
            _product_type(tokens.device),
            self._model.base_model.gradient_checkpointing,
        )
        recorder = graphs.recorder = graphs.recorder or GraphRecorder(tokens.device)
        if kind in graphs.known and kind not in graphs.recordings and len(graphs.recordings) < _MOST_RECORDINGS:
            graphs.gradients = graphs.gradients or [torch.empty_like(parameter) for parameter in parameters]
            own = [x.clone() for x in inputs]
            replay, result = recorder.record(lambda: self._pass(own, documents, graphs.gradients))
            graphs.recordings[kind] = _Recording(replay, own, *result)
        graphs.known.add(kind)
        recording = graphs.recordings.get(kind)
        if recording is None:
            result = recorder.warm_up(lambda: self._pass(inputs, documents))
            return _with_gradients(*result, None, *parameters)
        for own_input, given in zip(recording.inputs, inputs, strict=True):
            own_input.copy_(given)
        recording.replay()
        self.replays += 1
        return _with_gradients(recording.loss, recording.gradients, self, *parameters)

    def _graphs_of(self, parameters: list[nn.Parameter], device: torch.device) -> tuple[_Graphs, list[nn.Parameter]]:
        """What is recorded of these parameters, and those that are trained."""
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            raise ValueError("compile_training(cuda_graphs=True) needs whole weights: leave cuda_graphs out under FSDP")
        if _product_type(device) is torch.float16:
            # Gradients are made before a scaler has scaled the loss.
            raise ValueError("compile_training(cuda_graphs=True) trains in bf16 or fp32, not in fp16")
        places = tuple((x.data_ptr(), x.dtype, x.requires_grad) for x in (*parameters, *self._model.buffers()))
        if places != self._graphs.places:
            self._graphs = _Graphs(places)
        return self._graphs, [parameter for parameter in parameters if parameter.requires_grad]

    def _pass(
        self, inputs: list[Tensor], documents: Documents | None, into: list[Tensor] | None = None
    ) -> tuple[Tensor, Gradients]:
        """The loss and its gradients, written `into` the memory that all recordings share."""
        tokens, targets, count, *parts = inputs
        if documents is not None:
            documents = Documents(parts[0], parts[1], parts[2], *documents[3:])
        # Leaves of its own in the same memory: as long as a loss lives, autograd runs the end of a backward pass to its
        # parameters on the stream that they were used on, which no graph of another stream can hold.
        leaves: dict[str, Tensor] = {
            name: nn.Parameter(parameter.detach())
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad
        }
        device, dtype = tokens.device.type, _product_type(tokens.device)
        with torch.enable_grad(), torch.autocast(device, enabled=False):
            # A copy of a weight that autocast kept from outside would not be made again in a replay.
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
                loss = functional_call(self._module, leaves, (tokens, targets, count, documents))
            gradients: Gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        if into is not None:
            found, gradients = (
                gradients,
                [None if new is None else own for own, new in zip(into, gradients, strict=True)],
            )
            torch._foreach_copy_([x for x in gradients if x is not None], [x for x in found if x is not None])
        return loss.detach(), gradients


class _Loss(nn.Module):
    """A loss as a module, whose parameters are those of the model."""

    def __init__(self, model: PreTrainedModel, loss: PackedLoss) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, tokens: Tensor, targets: Tensor, count: Tensor, documents: Documents | None) -> Tensor:
        """As of `PackedLoss`."""
        return self._loss(tokens, targets, count, documents)


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are known; `training`, if they are of its last replay."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: Gradients, training: RecordedTraining | None, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.gradients, ctx.training, ctx.replays = gradients, training, training and training.replays
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if ctx.training is not None and ctx.replays != ctx.training.replays:
            raise RuntimeError(
                "the gradients of this loss are gone: after compile_training(cuda_graphs=True), call backward() before "
                "the model's next batch"
            )
        scaled = iter(torch._foreach_mul([x for x in ctx.gradients if x is not None], upstream))
        return None, None, None, *(None if x is None else next(scaled) for x in ctx.gradients)


def _with_gradients(*arguments: Any) -> Tensor:
    loss: Tensor = _WithGradients.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


def _product_type(device: torch.device) -> torch.dtype | None:
    """Autocast's; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
