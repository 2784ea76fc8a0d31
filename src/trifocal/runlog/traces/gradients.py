"""Order and time of each parameter's gradient: `gradients_rank*.csv`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trifocal.runlog.traces.base import Mark, Moment, Trace, write_table


class GradientTrace(Trace):
    """Notes each accumulation into a parameter's gradient, with its time since backward began.

    In a sharded model, the time is that of the shard's gradient, after the reduce-scatter. A parameter without any
    gradient in a step has a row without order and time.

    Args:
        moment: The place within the traced step.
        model: The model.
    """

    def __init__(self, moment: Moment, model: nn.Module) -> None:
        super().__init__(moment)
        # Autograd calls back from threads of its own; appending is atomic.
        self._seen: list[tuple[dict[str, int], str, Mark, Mark]] = []
        self._steps: dict[int, None] = {}
        self._entries = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._rows: list[dict[str, Any]] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue

            def arrived(parameter: Tensor, name: str = name) -> None:
                self._seen.append((moment.columns(), name, moment.phase_began, moment.clock.mark()))

            self._handles.append(parameter.register_post_accumulate_grad_hook(arrived))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note the steps that had a backward pass."""
        if name == "backward":
            self._steps[self._moment.step] = None
        yield

    def end(self) -> None:
        """Remove the hooks, and make the rows; the order counts from 1 in each backward pass."""
        for handle in self._handles:
            handle.remove()
        order: dict[tuple[int, int], int] = {}
        for columns, name, began, mark in self._seen:
            key = (columns["step"], columns["micro_batch"])
            order[key] = order.get(key, 0) + 1
            times = self._moment.clock.between(began, mark)
            row = {**columns, "order": order[key], "parameter": name, "entries": self._entries[name], **times}
            self._rows.append({**row, "remark": ""})
        arrived = {(columns["step"], name) for columns, name, _, _ in self._seen}
        self._rows += [
            {"step": step, "parameter": name, "entries": entries, "remark": "no gradient in this step"}
            for step in self._steps
            for name, entries in self._entries.items()
            if (step, name) not in arrived
        ]

    def write(self, folder: Path, rank: int) -> None:
        """Write the table."""
        write_table(folder / f"gradients_rank{rank}.csv", self._rows)
