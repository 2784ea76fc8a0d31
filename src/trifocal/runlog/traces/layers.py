"""The traces, `NAME_rank*.csv`: passes of modules, dtypes, memory by module, gradients, and exchanges of processes.

`exchange` comes with `collectives_rank*.csv`, every collective of the window from PyTorch's flight recorder, and under
DDP with `ddp_rank*.json`, DDP's own figures.
"""

import contextlib
import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trifocal.distributed.parallel import GradientWatch, local_shard
from trifocal.runlog.stalls.collectives import Collective, recorded_collectives
from trifocal.runlog.traces.base import Mark, ModuleHooks, Moment, Trace, write_table

_Seen = tuple[str, str, torch.dtype, tuple[int, ...]]
_SNAPSHOT_EVENTS = 200_000


class ModuleTrace(Trace):
    """Notes every pass through every module: `forward`; `recompute`, which checkpointing repeats in backward; or
    `backward`, from the gradient of the first output to that of the first input.
    """

    name = "modules"

    def __init__(self, moment: Moment, model: nn.Module) -> None:
        super().__init__(moment)
        self._open: list[tuple[Mark, list[Tensor]]] = []
        self._hooks = ModuleHooks(model, entered=self._entered, left=self._left)

    def end(self) -> None:
        """Remove the hooks, and make the rows."""
        self._hooks.remove()
        order: Counter[tuple[int, int, str]] = Counter()
        for columns, event, name, phase_began, begin, ended in self.seen:
            key = (columns["step"], columns["micro_batch"], event)
            order[key] += 1
            row = {**columns, "event": event, "order": order[key], "module": name}
            row |= self.moment.between(phase_began, begin, "begin_milliseconds")
            self.rows.append(row | (self.moment.between(begin, ended[0]) if ended else {}))

    def _entered(self, name: str, inputs: list[Tensor]) -> None:
        self._open.append((self.moment.mark(), inputs))

    def _left(self, name: str, outputs: list[Tensor]) -> None:
        begin, inputs = self._open.pop()
        moment = self.moment
        if not moment.phase:
            return
        again = moment.phase == "backward"
        event = "recompute" if again else "forward"
        self.seen.append((moment.columns(), event, name, moment.phase_began, begin, [moment.mark()]))
        # The gradient flows through the graph of the first pass; the repeated one only gives saved tensors. A module
        # outside autograd, or one that returns its input, has no backward pass.
        output = next((tensor for tensor in outputs if tensor.grad_fn is not None), None)
        if again or output is None:
            return
        columns, ended = moment.columns(), list[Mark]()

        def begun(gradient: Tensor) -> None:
            self.seen.append((columns, "backward", name, moment.phase_began, moment.mark(), ended))

        def finished(gradient: Tensor) -> None:
            ended.append(moment.mark())

        output.register_hook(begun)
        source = next((tensor for tensor in inputs if tensor.requires_grad and tensor is not output), None)
        if source is not None:
            source.register_hook(finished)


class DtypeTrace(Trace):
    """Lists parameters, gradients, the optimizer's state, and modules' outputs with gradients, once for each dtype."""

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
            self.rows.append(
                {
                    "kind": kind,
                    "name": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "shape": "x".join(map(str, shape)) or "scalar",
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


class MemoryTrace(Trace):
    """Bytes by module, of the first micro-batch of a window, and the allocator's history on a GPU.

    Parameters, gradients, the optimizer's state and tensors saved for backward count for the module itself, without
    the modules inside. A tensor that two modules save counts for the first. In a sharded model only this process's
    part counts, not the whole weights that exist during a forward pass.
    """

    name = "memory"

    def __init__(
        self, moment: Moment, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        super().__init__(moment)
        self._model, self._optimizer = model, optimizer
        self._on_gpu, self._first = device.type == "cuda", True
        self._snapshot: Any = None
        self._modules = {path or "model": module for path, module in model.named_modules()}
        self._stack: list[tuple[str, set[int]]] = []
        self._saved: Counter[str] = Counter()
        self._counted = _weights_of(model)
        if self._on_gpu:
            # Only Python frames: C++ frames take minutes.
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_EVENTS, stacks="python")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count in the first forward pass."""
        if name not in ("forward", "compile") or not self._first:
            yield
            return
        self._first = False
        hooks = ModuleHooks(self._model, entered=self._entered, left=self._left)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            hooks.remove()

    def end(self) -> None:
        """Stop the history, and make the rows."""
        if self._on_gpu:
            self._snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
        for name, module in self._modules.items():
            own = list(module.parameters(recurse=False))
            states = [value for parameter in own for value in self._optimizer.state.get(parameter, {}).values()]
            self.rows.append(
                {
                    "module": name,
                    "parameter_bytes": sum(map(_local_bytes, own)),
                    "gradient_bytes": sum(_local_bytes(p.grad) for p in own if p.grad is not None),
                    "optimizer_bytes": sum(_local_bytes(value) for value in states if isinstance(value, Tensor)),
                    "saved_for_backward_bytes": self._saved[name],
                }
            )
        totals = {key: sum(row[key] for row in self.rows) for key in self.rows[0] if key != "module"}
        self.rows.append({"module": "total", **totals})

    def write(self, folder: Path, rank: int) -> None:
        """Write the table and the snapshot."""
        super().write(folder, rank)
        if self._snapshot is not None:
            (folder / f"memory_snapshot_rank{rank}.pickle").write_bytes(pickle.dumps(self._snapshot))

    def _entered(self, name: str, inputs: list[Tensor]) -> None:
        # Under FSDP a running module has other weights: whole ones, in memory that is reused afterwards.
        self._stack.append((name, _weights_of(self._modules[name])))

    def _left(self, name: str, outputs: list[Tensor]) -> None:
        self._stack.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = local_shard(tensor).untyped_storage()
        name, weights = self._stack[-1] if self._stack else ("model", set[int]())
        if storage.data_ptr() not in self._counted and storage.data_ptr() not in weights:
            self._counted.add(storage.data_ptr())
            self._saved[name] += storage.nbytes()
        return tensor


def _weights_of(module: nn.Module) -> set[int]:
    """Addresses of the parameters of the module and of the modules inside."""
    return {local_shard(parameter).untyped_storage().data_ptr() for parameter in module.parameters()}


def _local_bytes(tensor: Tensor) -> int:
    """Bytes of this process's part of a tensor."""
    return local_shard(tensor).nbytes


class GradientTrace(Trace):
    """Notes each accumulation into a parameter's gradient, or its shard's, with its time since backward began; a
    parameter without any in a step has a row without order and time.
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

    def __init__(self, moment: Moment, model: nn.Module, module: nn.Module, watch: GradientWatch) -> None:
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
