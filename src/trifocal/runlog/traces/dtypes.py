"""The dtype of every tensor: `dtypes_rank*.csv`."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trifocal.runlog.traces.base import ModuleHooks, Moment, Trace, local_shard

# Tensors that the optimizer changes by small amounts need one of these.
_FULL_PRECISION = (torch.float32, torch.float64)
_Seen = tuple[str, str, torch.dtype, tuple[int, ...]]


class DtypeTrace(Trace):
    """Lists parameters, gradients, the optimizer's state, activations and the gradients of activations.

    An activation is a module's output, listed once for each dtype that it had.

    Args:
        moment: The place within the traced step.
        model: The model.
        optimizer: Its optimizer.
    """

    name = "dtypes"

    def __init__(self, moment: Moment, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(moment)
        self._model, self._optimizer = model, optimizer
        self._hooks = ModuleHooks(model, left=self._left)

    def end(self) -> None:
        """Remove the hooks, and list the tensors that persist between steps."""
        self._hooks.remove()
        shapes = {(kind, name, dtype): shape for kind, name, dtype, shape in (*self._kept(), *self.seen)}
        for (kind, name, dtype), shape in sorted(shapes.items(), key=lambda row: row[0][0]):
            lossy = kind in ("parameter", "optimizer state") and dtype.is_floating_point
            self.rows.append(
                {
                    "kind": kind,
                    "name": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "shape": "x".join(map(str, shape)) or "scalar",
                    "remark": "small updates are lost at this precision"
                    if lossy and dtype not in _FULL_PRECISION
                    else "",
                }
            )

    def _kept(self) -> Iterator[_Seen]:
        for name, parameter in self._model.named_parameters():
            yield _seen("parameter", name, local_shard(parameter))
            if parameter.grad is not None:
                yield _seen("gradient", name, local_shard(parameter.grad))
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield _seen("optimizer state", f"{name}.{key}", local_shard(value))

    def _left(self, name: str, outputs: list[Tensor]) -> None:
        def gradient_arrived(gradient: Tensor) -> None:
            self.seen.append(_seen("gradient of activation", name, gradient))

        for output in outputs if self.moment.phase else ():
            self.seen.append(_seen("activation", name, output))
            if output.grad_fn is not None:
                output.register_hook(gradient_arrived)


def _seen(kind: str, name: str, tensor: Tensor) -> _Seen:
    return kind, name, tensor.dtype, tuple(tensor.shape)
