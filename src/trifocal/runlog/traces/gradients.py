"""Order and time of each parameter's gradient: `gradients_rank*.csv`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trifocal.runlog.traces.base import Mark, Moment, RowBuffer, Trace, write_table


class GradientTrace(Trace):
    """Notes each accumulation into a parameter's gradient, with its time since backward began.

    In a sharded model, the time is that of the shard's gradient, after the reduce-scatter.

    Args:
        moment: The place within the traced step.
        model: The model.
    """

    def __init__(self, moment: Moment, model: nn.Module) -> None:
        super().__init__(moment)
        self._seen = RowBuffer()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._rows: list[dict[str, Any]] = []
        for name, parameter in model.named_parameters():

            def arrived(parameter: Tensor, name: str = name) -> None:
                self._seen.add((moment.columns(), name, parameter.numel(), moment.phase_began, moment.clock.mark()))

            self._handles.append(parameter.register_post_accumulate_grad_hook(arrived))

    def end(self) -> None:
        """Remove the hooks, and make the rows; the order counts from 1 in each backward pass."""
        for handle in self._handles:
            handle.remove()
        order: dict[tuple[int, int], int] = {}
        columns: dict[str, int]
        began: Mark
        mark: Mark
        for columns, name, entries, began, mark in self._seen.take():
            key = (columns["step"], columns["micro_batch"])
            order[key] = order.get(key, 0) + 1
            times = self._moment.clock.between(began, mark)
            self._rows.append({**columns, "order": order[key], "parameter": name, "entries": entries, **times})

    def write(self, folder: Path, rank: int) -> None:
        """Write the table."""
        write_table(folder / f"gradients_rank{rank}.csv", self._rows)
