"""Shared by the traces: the moment within a step, a clock for host and device, tables, hooks around modules."""

import csv
import io
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Mark:
    """A moment on the host, and its event in the device's queue."""

    seconds: float
    event: torch.cuda.Event | None


class Clock:
    """Marks moments without waiting for the device.

    Args:
        device: The device of the work; a CUDA device has times of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Mark:
        """This moment, on the stream of this thread."""
        event = None
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return Mark(time.perf_counter(), event)

    def between(self, start: Mark, end: Mark, name: str = "milliseconds") -> dict[str, float]:
        """Columns of a table: the time between two moments on the host, and on a CUDA device.

        The device must have been synchronised after the second moment.
        """
        columns = {f"host_{name}": round(1e3 * (end.seconds - start.seconds), 4)}
        if start.event is not None and end.event is not None:
            columns[f"device_{name}"] = round(start.event.elapsed_time(end.event), 4)
        return columns


class Moment:
    """Number of the traced step, its micro-batch (from 1) and phase, and the beginning of the phase."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.step = 0
        self.micro_batch = 0
        self.phase = ""
        self.phase_began = clock.mark()

    def enter_step(self, step: int) -> None:
        """Begin a step."""
        self.step, self.micro_batch = step, 0

    def enter_phase(self, name: str) -> None:
        """Begin a phase."""
        self.phase, self.phase_began = name, self.clock.mark()
        if name in ("forward", "compile"):
            self.micro_batch += 1

    def leave_phase(self) -> None:
        """End a phase. Work until the next one (an evaluation, for example) is not part of the step."""
        self.phase = ""

    def columns(self) -> dict[str, Any]:
        """Step and micro-batch, for a table."""
        return {"step": self.step, "micro_batch": self.micro_batch}


class Trace:
    """One kind of trace of one window of steps. Its constructor installs the hooks, and `end` removes them.

    Args:
        moment: The place within the traced step.
    """

    def __init__(self, moment: Moment) -> None:
        self._moment = moment

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Context manager around a phase of a traced step."""
        return nullcontext()

    def end(self) -> None:
        """Remove the hooks, after the device was synchronised."""

    def write(self, folder: Path, rank: int) -> None:
        """Write the files.

        Raises:
            OSError: If writing fails.
        """


def write_table(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as CSV, with the columns of all rows; None is an empty cell."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(text.getvalue(), encoding="utf-8")


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard of a sharded tensor; any other tensor as it is."""
    # Not by its type: importing DTensor takes as long as half of PyTorch.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def size_in_bytes(tensor: Tensor | None) -> int:
    """Bytes of this process's part of a tensor; 0 for None."""
    if tensor is None:
        return 0
    part = local_shard(tensor)
    return part.numel() * part.element_size()


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a module's argument or output, also inside sequences and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]


class ModuleHooks:
    """Calls back around the forward pass of every module, also when checkpointing repeats it in backward.

    Args:
        model: The model; its own name is `model`.
        entered: Called with a module's name and its inputs.
        left: Called with a module's name and its outputs; without outputs if a repeated pass ended early.
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
            name = path or "model"

            def enter(_: nn.Module, inputs: Any, options: Any, name: str = name) -> None:
                entered(name, [*tensors_in(inputs), *tensors_in(options)])

            def leave(_: nn.Module, inputs: Any, outputs: Any, name: str = name) -> None:
                left(name, tensors_in(outputs))

            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            # Also after an exception: checkpointing ends a repeated pass early with one.
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
