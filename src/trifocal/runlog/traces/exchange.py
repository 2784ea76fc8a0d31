"""Traces of gradients and of the communication between processes: `gradients_rank*.csv`, `exchange_rank*.csv`.

The latter comes with `collectives_rank*.csv`, every collective of the window from PyTorch's flight recorder, and under
DDP with `ddp_rank*.json`, DDP's own figures.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trifocal.runlog.stalls.collectives import Collective, recorded_collectives
from trifocal.runlog.traces.base import Mark, Moment, Trace, write_table

if TYPE_CHECKING:
    from trifocal.distributed.parallel import GradientWatch


class GradientTrace(Trace):
    """Notes each accumulation into a parameter's gradient, with its time since backward began.

    In a sharded model, the time is that of the shard's gradient, after the reduce-scatter. A parameter without any
    gradient in a step has a row without order and time.
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


class ExchangeTrace(Trace):
    """Notes each bucket of DDP, and each all-gather and reduce-scatter of FSDP2."""

    name = "exchange"

    def __init__(self, moment: Moment, model: nn.Module, module: nn.Module, watch: "GradientWatch") -> None:
        super().__init__(moment)
        self._module, self._watch = module, watch
        # Not by time: the recorder's clock may be seconds off.
        self._before = {_identity(collective) for collective in recorded_collectives()}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        watch.observer = self._exchange

    def end(self) -> None:
        """Stop observing, and make the rows."""
        self._watch.observer = None
        for row, began, start, ended in self.seen:
            row |= self.moment.between(began, start, "begin_milliseconds")
            self.rows.append(row | (self.moment.between(start, ended[0]) if ended else {}))

    def write(self, folder: Path, rank: int) -> None:
        """Write the tables."""
        super().write(folder, rank)
        collectives = [found for found in recorded_collectives() if _identity(found) not in self._before]
        write_table(folder / f"collectives_rank{rank}.csv", [asdict(found) for found in collectives])
        if isinstance(self._module, DistributedDataParallel):
            figures = self._module._get_ddp_logging_data()
            (folder / f"ddp_rank{rank}.json").write_text(json.dumps(figures, indent=1, default=str) + "\n")

    def _exchange(self, kind: str, name: str, buffer: Tensor, parameters: Sequence[Tensor]) -> Callable[[], None]:
        row = self.moment.columns() | {
            "phase": self.moment.phase,
            "exchange": kind,
            "of": name,
            "bytes": buffer.nbytes,
            "dtype": str(buffer.dtype).removeprefix("torch."),
            "parameters": " ".join(self._names[id(parameter)] for parameter in parameters),
        }
        ended: list[Mark] = []
        self.seen.append((row, self.moment.phase_began, self.moment.mark(), ended))
        return lambda: ended.append(self.moment.mark())


def _identity(collective: Collective) -> tuple[str, str, str, int]:
    return collective.library, collective.group, collective.operation, collective.number
