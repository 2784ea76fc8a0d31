"""The dtype of every tensor: `dtypes_rank*.csv`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trifocal.runlog.traces.base import ModuleHooks, Moment, Trace, local_shard, write_table

# Tensors that the optimizer changes by small amounts need one of these.
_FULL_PRECISION = (torch.float32, torch.float64)


class DtypeTrace(Trace):
    """Lists parameters, gradients, the optimizer's state, activations and the gradients of activations.

    An activation is a module's output, listed once for each dtype that it had.

    Args:
        moment: The place within the traced step.
        model: The model.
        optimizer: Its optimizer.
    """

    def __init__(self, moment: Moment, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(moment)
        self._model, self._optimizer = model, optimizer
        # Autograd and collectives call back from threads of their own; appending is atomic.
        self._seen: list[Any] = []
        self._rows: list[dict[str, Any]] = []
        self._hooks = ModuleHooks(model, left=self._left)

    def end(self) -> None:
        """Remove the hooks, and list the tensors that persist between steps."""
        self._hooks.remove()
        listed = [*self._kept(), *self._seen]
        rows = {(kind, name, dtype): shape for kind, name, dtype, shape in listed}
        self._rows = [
            {
                "kind": kind,
                "name": name,
                "dtype": str(dtype).removeprefix("torch."),
                "shape": "x".join(map(str, shape)) or "scalar",
                "remark": _remark(kind, dtype),
            }
            for (kind, name, dtype), shape in rows.items()
        ]
        self._rows.sort(key=lambda row: row["kind"])

    def write(self, folder: Path, rank: int) -> None:
        """Write the table."""
        write_table(folder / f"dtypes_rank{rank}.csv", self._rows)

    def _kept(self) -> Iterator[tuple[str, str, torch.dtype, tuple[int, ...]]]:
        for name, parameter in self._model.named_parameters():
            yield "parameter", name, parameter.dtype, tuple(local_shard(parameter).shape)
            if parameter.grad is not None:
                yield "gradient", name, parameter.grad.dtype, tuple(local_shard(parameter.grad).shape)
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield "optimizer state", f"{name}.{key}", value.dtype, tuple(local_shard(value).shape)

    def _left(self, name: str, outputs: list[Tensor]) -> None:
        for output in outputs if self._moment.phase else ():
            self._seen.append(("activation", name, output.dtype, tuple(output.shape)))
            if output.grad_fn is not None:
                output.register_hook(
                    lambda gradient: self._seen.append(
                        ("gradient of activation", name, gradient.dtype, tuple(gradient.shape))
                    )
                )


def _remark(kind: str, dtype: torch.dtype) -> str:
    if kind in ("parameter", "optimizer state") and dtype.is_floating_point and dtype not in _FULL_PRECISION:
        return "small updates are lost at this precision"
    return ""
