"""Order and time of each parameter's gradient: `gradients_rank*.csv`."""

from collections import Counter

import torch
from torch import Tensor, nn

from trifocal.runlog.traces.base import Moment, Trace


class GradientTrace(Trace):
    """Notes each accumulation into a parameter's gradient, with its time since backward began.

    In a sharded model, the time is that of the shard's gradient, after the reduce-scatter. A parameter without any
    gradient in a step has a row without order and time.

    Args:
        moment: The place within the traced step.
        model: The model.
    """

    name = "gradients"

    def __init__(self, moment: Moment, model: nn.Module) -> None:
        super().__init__(moment)
        self._entries = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue

            def arrived(parameter: Tensor, name: str = name) -> None:
                self.seen.append((moment.columns(), name, moment.phase_began, moment.mark()))

            self._handles.append(parameter.register_post_accumulate_grad_hook(arrived))

    def end(self) -> None:
        """Remove the hooks, and make the rows; the order counts from 1 in each backward pass."""
        for handle in self._handles:
            handle.remove()
        order: Counter[tuple[int, int]] = Counter()
        for columns, name, began, mark in self.seen:
            key = (columns["step"], columns["micro_batch"])
            order[key] += 1
            row = {**columns, "order": order[key], "parameter": name, "entries": self._entries[name]}
            self.rows.append(row | self.moment.between(began, mark) | {"remark": ""})
        arrived = {(columns["step"], name) for columns, name, _, _ in self.seen}
        self.rows += [
            {"step": step, "parameter": name, "entries": entries, "remark": "no gradient in this step"}
            for step in self.moment.steps
            for name, entries in self._entries.items()
            if (step, name) not in arrived
        ]
