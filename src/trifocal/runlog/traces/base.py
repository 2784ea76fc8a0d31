"""Shared by the traces: the moment within a step, with a clock for host and device, tables, hooks around modules."""

import csv
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trifocal.nn.attention_base import INPUT_MAPS


class Mark(NamedTuple):
    """A moment on the host, and its event in the device's queue."""

    seconds: float
    event: torch.cuda.Event | None


class Moment:
    """Traced step, micro-batch (from 1), phase and its beginning; work on a CUDA device has its own times."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.steps: list[int] = []
        """The traced steps of the open window; the last one is the present one."""
        self.micro_batch = 0
        self.phase = ""
        self.phase_began = self.mark()

    def mark(self) -> Mark:
        """This moment, on the stream of this thread, without a wait for the device."""
        event = None
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return Mark(time.perf_counter(), event)

    def between(self, start: Mark, end: Mark, name: str = "milliseconds") -> dict[str, float]:
        """Columns of the time between two moments on the host, and on a CUDA device, synchronised after the second."""
        columns = {f"host_{name}": round(1e3 * (end.seconds - start.seconds), 4)}
        if start.event is not None and end.event is not None:
            columns[f"device_{name}"] = round(start.event.elapsed_time(end.event), 4)
        return columns

    def enter_phase(self, name: str) -> None:
        """Begin a phase of the present step."""
        self.phase, self.phase_began = name, self.mark()
        self.micro_batch += name in ("forward", "compile")

    def columns(self) -> dict[str, Any]:
        """Step and micro-batch, for a table."""
        return {"step": self.steps[-1], "micro_batch": self.micro_batch}


class Trace:
    """One kind of trace of one window of steps. Its constructor installs the hooks, and `end` removes them."""

    name = ""
    """Name of the table, `NAME_rank*.csv`."""

    def __init__(self, moment: Moment) -> None:
        self.moment = moment
        self.seen: list[Any] = []
        """Noted while the steps run. Autograd and collectives call back from their own threads; appending is atomic."""
        self.rows: list[dict[str, Any]] = []

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Context manager around a phase of a traced step."""
        return nullcontext()

    def end(self) -> None:
        """Remove the hooks and make the rows, after the device was synchronised."""

    def write(self, folder: Path, rank: int) -> None:
        """Write the files; OSError if writing fails."""
        write_table(folder / f"{self.name}_rank{rank}.csv", self.rows)


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as CSV, with the columns of all rows; None is an empty cell."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


class ModuleHooks:
    """Calls back around the forward pass of every module, also when checkpointing repeats it, with name and tensors;
    none if a repeated pass ended early. A hook on an attention's input maps would take them out of their joint product.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        entered: Callable[[str, list[Tensor]], None] = lambda name, inputs: None,
        left: Callable[[str, list[Tensor]], None] = lambda name, outputs: None,
    ) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for path, module in model.named_modules():
            if path.endswith(INPUT_MAPS):
                continue
            name = path or "model"

            def enter(_: nn.Module, inputs: Any, options: Any, name: str = name) -> None:
                entered(name, tensors_in((inputs, options)))

            def leave(_: nn.Module, inputs: Any, outputs: Any, name: str = name) -> None:
                left(name, tensors_in(outputs))

            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            # Also after an exception: checkpointing ends a repeated pass early with one.
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a module's argument or output, also inside sequences and mappings."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
