"""What the traces share: the moment that a step is in, a clock for host and device, tables, hooks around modules."""

import csv
import io
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Mark:
    """A moment on the host, and the place in the device's queue of work."""

    seconds: float
    event: torch.cuda.Event | None


class Clock:
    """Marks moments without waiting for the device.

    Args:
        device: Where the work is; a CUDA device has a time of its own.
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
        """Columns of a table: the time between two moments on the host, and on the device where it has one.

        Device times are known once the device has been waited for.
        """
        columns = {f"host_{name}": round(1e3 * (end.seconds - start.seconds), 4)}
        if start.event is not None and end.event is not None:
            columns[f"device_{name}"] = round(start.event.elapsed_time(end.event), 4)
        return columns


class Moment:
    """Where a traced step is: its number, micro-batch (from 1) and phase, and when the phase began."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.step = 0
        self.micro_batch = 0
        self.phase = ""
        self.phase_began = clock.mark()

    def enter_step(self, step: int) -> None:
        """A step begins."""
        self.step, self.micro_batch = step, 0

    def enter_phase(self, name: str) -> None:
        """A phase begins."""
        self.phase, self.phase_began = name, self.clock.mark()
        if name in ("forward", "compile"):
            self.micro_batch += 1

    def leave_phase(self) -> None:
        """A phase ends: what runs until the next one is not of the step (an evaluation, for example)."""
        self.phase = ""

    def columns(self) -> dict[str, Any]:
        """Step and micro-batch, for a table."""
        return {"step": self.step, "micro_batch": self.micro_batch}


class Trace:
    """One way of looking at some steps. Nothing is installed but between `begin` and `end`."""

    def begin(self, moment: Moment) -> None:
        """Install what is needed; the first step of a window is about to begin."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around a phase of a traced step."""
        return nullcontext()

    def end(self) -> None:
        """Take everything away again; the device has been waited for."""

    def write(self, folder: Path, rank: int) -> None:
        """Write what was seen.

        Raises:
            OSError: If the disk does not take it.
        """


def write_table(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as CSV, under the columns of all of them; numbers as they are, nothing for None."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(text.getvalue(), encoding="utf-8")


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size_in_bytes(tensor: Tensor | None) -> int:
    """Bytes of this process's part of a tensor; 0 for None."""
    if tensor is None:
        return 0
    part = local(tensor)
    return part.numel() * part.element_size()


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a module's argument or output, as far as sequences and mappings go."""
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
        model: Whose modules; the model itself is called `model`.
        entered: Called with a module's name and its inputs.
        left: Called with its name and its outputs; without outputs where a repeated pass was cut short.
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
            # Also after an exception: checkpointing ends a repeated pass with one, as soon as it has what it needs.
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


class Lines:
    """Rows that several threads add to: autograd and collectives call back from threads of their own."""

    def __init__(self) -> None:
        self._rows: list[Any] = []
        self._lock = threading.Lock()

    def add(self, row: Any) -> None:
        """Add one."""
        with self._lock:
            self._rows.append(row)

    def take(self) -> list[Any]:
        """All of them, in order; none is left."""
        with self._lock:
            rows, self._rows = self._rows, []
        return rows
