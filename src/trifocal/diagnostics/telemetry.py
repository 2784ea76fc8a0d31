"""What the attention does during a run: gates and chosen blocks of every layer, as `telemetry` rows.

Measured on the first sequence of a batch by a forward pass of its own, without gradient: nothing is added to the
training step, compiled or not, and the cost is one sequence's forward pass every `interval` steps. The host waits for
the device once, at the end.

A row has `layer` and the figures that diagnostics/attention_statistics.py documents. Alarms are events, once when a
state begins, and an `info` event with the suffix `_over` when it ends:

| event | when |
|---|---|
| gate_shut | a branch's mean gate in a layer is below SHUT_GATE: the branch adds nothing there |
| gate_saturated | a branch's gate entropy in a layer is below SATURATED_ENTROPY: its gates are stuck at 0 or 1 |
| choices_local | of the choices that were free, more than LOCAL_SHARE lie inside the window: selection adds nothing |
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trifocal.diagnostics.attention_statistics import (
    BRANCHES,
    gate_statistics,
    importance_covered,
    selection_statistics,
)
from trifocal.diagnostics.jsonl import Row
from trifocal.diagnostics.metrics import MetricsWriter
from trifocal.nn import NSAttention
from trifocal.ops import Documents, Geometry

SHUT_GATE = 0.02
SATURATED_ENTROPY = 0.02
LOCAL_SHARE = 0.95


@dataclass
class _Record:
    gates: Tensor | None = None
    selection: list[dict[str, Tensor]] = field(default_factory=list)


class AttentionTelemetry:
    """Measures the NSA layers of a model.

    Args:
        model: A model with `NSAttention` layers, called as `model(tokens, cu_seqlens=...)`; pass what the trainer
            calls before compilation. A model without such layers gives no rows.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers = [module for module in model.modules() if isinstance(module, NSAttention)]
        self._active: set[tuple[str, int, str]] = set()

    def measure(self, tokens: Tensor, *, cu_seqlens: Tensor | None = None) -> list[Row]:
        """Run the first sequence of a batch through the model and describe its attention.

        With a sharded model every rank must call this, as any forward pass.

        Args:
            tokens: [B, T], on the model's device.
            cu_seqlens: Borders of documents over the flattened B * T tokens, on the host; those inside the first
                sequence are kept.

        Returns:
            For each layer its `layer` and figures, JSON types only.
        """
        if not self.layers:
            return []
        tokens = tokens[:1]
        borders = None
        if cu_seqlens is not None:
            length = tokens.shape[1]
            inside = [border for border in cu_seqlens.tolist() if border < length]
            borders = torch.tensor([*inside, length], dtype=torch.int32)
        records = [_Record() for _ in self.layers]
        with torch.no_grad(), self._recording(records):
            self.model(tokens, cu_seqlens=borders)
        rows = [_described(record) for record in records]
        # One transfer for all layers.
        flat = torch.cat([value.float().flatten() for row in rows for value in row.values()]).tolist()
        remaining = iter(flat)
        result: list[Row] = []
        for layer, row in enumerate(rows):
            figures: Row = {"layer": layer}
            for name, value in row.items():
                numbers = [round(next(remaining), 5) for _ in range(value.numel())]
                figures[name] = numbers if value.ndim else numbers[0]
            result.append(figures)
        return result

    def log(self, metrics: MetricsWriter, step: int, tokens: Tensor, *, cu_seqlens: Tensor | None = None) -> list[Row]:
        """Measure, write a row for each layer, and an event for each alarm that begins or ends.

        Args:
            metrics: Where to write.
            step: Optimizer steps done.
            tokens, cu_seqlens: As in `measure`.

        Returns:
            The rows.
        """
        rows = self.measure(tokens, cu_seqlens=cu_seqlens)
        for row in rows:
            metrics.write("telemetry", step, **row)
        alarms = {key: message for row in rows for key, message in alarms_of(row)}
        for name, layer, branch in sorted(alarms.keys() - self._active):
            values: Row = {"layer": layer, "branch": branch} if branch else {"layer": layer}
            metrics.event(step, name, alarms[name, layer, branch], severity="warning", **values)
        for name, layer, branch in sorted(self._active - alarms.keys()):
            what = f"layer {layer}{', ' + branch if branch else ''}: {name} is over"
            metrics.event(step, f"{name}_over", what, layer=layer)
        self._active = set(alarms)
        return rows

    @contextmanager
    def _recording(self, records: list[_Record]) -> Iterator[None]:
        current: list[_Record] = []

        def enter(record: _Record) -> Callable[[nn.Module, Any], None]:
            return lambda module, inputs: current.append(record)

        def keep_gates(module: nn.Module, inputs: Any, gates: Tensor) -> None:
            current[-1].gates = gates[0]

        handles = []
        for layer, record in zip(self.layers, records, strict=True):
            handles.append(layer.register_forward_pre_hook(enter(record)))
            handles.append(layer.gate.register_forward_hook(keep_gates))
        try:
            with _SelectionRecorder(lambda figures: current[-1].selection.append(figures)):
                yield
        finally:
            for handle in handles:
                handle.remove()


class _SelectionRecorder(TorchDispatchMode):
    """Sees every call of the operator `trifocal::select_blocks`, whichever backend makes the choice."""

    def __init__(self, record: Callable[[dict[str, Tensor]], None]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.trifocal.select_blocks.default:
            q, k_cmp, lse, sizes, num_keys, scale, cu_seqlens, *_ = args
            geometry = Geometry(*sizes)
            documents = None if cu_seqlens is None else Documents.from_checked(cu_seqlens, num_keys)
            figures = selection_statistics(result[0], geometry, documents)
            figures["importance_covered"] = importance_covered(
                q[0], k_cmp[0], lse[0], result[0], geometry, scale, documents
            )
            self._record(figures)
        return result


def _described(record: _Record) -> dict[str, Tensor]:
    if record.gates is None or len(record.selection) != 1:
        raise RuntimeError(
            f"expected one call of the gate and one of trifocal::select_blocks in each layer, got "
            f"{int(record.gates is not None)} and {len(record.selection)}"
        )
    return {**gate_statistics(record.gates), **record.selection[0]}


def alarms_of(row: Row) -> Iterator[tuple[tuple[str, int, str], str]]:
    """The alarms that one layer's figures give.

    Args:
        row: From `AttentionTelemetry.measure`.

    Yields:
        Name, layer and branch (empty where there is none), and a sentence.
    """
    layer = row["layer"]
    for branch in BRANCHES:
        mean, entropy = row[f"gate_mean_{branch}"], row[f"gate_entropy_{branch}"]
        if mean < SHUT_GATE:
            yield ("gate_shut", layer, branch), f"layer {layer}: the {branch} gate is shut, its mean is {mean:.4f}"
        elif entropy < SATURATED_ENTROPY:
            sentence = f"layer {layer}: the {branch} gate is saturated, its entropy is {entropy:.4f} nats"
            yield ("gate_saturated", layer, branch), sentence
    if row["free_local_share"] > LOCAL_SHARE:
        sentence = f"layer {layer}: {row['free_local_share']:.0%} of the free choices lie inside the window"
        yield ("choices_local", layer, ""), sentence
