"""Gates and selected blocks of every layer during a run, as `telemetry` rows.

Measured on the first sequence of a batch by a separate forward pass without gradient: the training step itself,
compiled or not, is unchanged. The cost is the forward pass of one sequence, and full attention of some of its queries,
every `log.telemetry_interval_steps` steps. The host waits for the device once, at the end.

Layers that choose no blocks have no rows, and layers without gates null for the figures of gates. The figures that
compare with full attention are null if every query reads all its candidates. An alarm is an event when a state begins,
and an `info` event with the suffix `_over` when it ends; docs/diagnostics.md has fields and alarms.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trifocal.models import DecoderLM
from trifocal.nn import NSAttention, SelectedAttention
from trifocal.ops import Documents, Geometry
from trifocal.runlog.jsonl import Row
from trifocal.runlog.metrics import MetricsWriter
from trifocal.telemetry.attention_picture import AttentionPicture, assemble_picture, describe_layers, picture_queries
from trifocal.telemetry.maps import MOST_SCORES, LayerAttention, evenly_spaced
from trifocal.telemetry.statistics import BRANCHES, attention_statistics

CLOSED_GATE = 0.02
"""Alarm: a branch with a mean gate below this in a layer adds nothing there."""
SATURATED_ENTROPY = 0.02
"""Alarm: a branch's gates with a mean entropy below this, in nats, are stuck at 0 or 1."""
LOCAL_SHARE = 0.95
"""Alarm: with a greater share of free choices inside the window, selection adds nothing."""

Describe = Callable[[LayerAttention], dict[str, Tensor]]


@dataclass
class _Record:
    """Tensors of one layer from the hooks."""

    layer: NSAttention | SelectedAttention
    gates: Tensor | None = None
    keys: Tensor | None = None
    choices: int = 0


class AttentionTelemetry:
    """Measures the layers of a model that choose blocks.

    Args:
        model: The model, before compilation. One whose layers choose nothing gives no rows.

    Attributes:
        layers: The layers that are measured, by their numbers.
    """

    def __init__(self, model: DecoderLM) -> None:
        self.model = model
        self.layers = {
            number: layer
            for number, layer in enumerate(model.attention_layers())
            if isinstance(layer, NSAttention | SelectedAttention) and layer.chooser == "compressed"
            if model.config.selection == "importance"
        }
        self._active: set[tuple[str, int, str]] = set()

    def measure(self, tokens: Tensor, *, cu_seqlens: Tensor | None = None) -> list[Row]:
        """Run the first sequence of a batch through the model and describe its attention.

        With a sharded model every rank must call this, as for any forward pass.

        Args:
            tokens: [B, T], on the model's device.
            cu_seqlens: Document boundaries over the flattened B * T tokens, on the host; only those inside the first
                sequence count.

        Returns:
            A row for each layer that chooses blocks, JSON types only.
        """
        if not self.layers:
            return []
        figures = self.figures(tokens, cu_seqlens=cu_seqlens)
        # One transfer for all figures of all layers.
        columns = torch.cat([value.float().flatten(1) for value in map(_as_columns, figures.values())], dim=1).tolist()
        rows: list[Row] = []
        for layer, numbers in zip(self.layers, columns, strict=True):
            row: Row = {"layer": layer}
            remaining = iter(numbers)
            for name, value in figures.items():
                width = _as_columns(value).shape[1]
                rounded = [_rounded(next(remaining)) for _ in range(width)]
                row[name] = rounded if value.ndim > 1 else rounded[0]
            rows.append(row)
        return rows

    def figures(self, tokens: Tensor, *, cu_seqlens: Tensor | None = None) -> dict[str, Tensor]:
        """The figures of `measure`, [layers, ...], on the device, without waiting for it."""
        documents = _documents_of_first(cu_seqlens, tokens)
        return self._observe(tokens[:1], documents, attention_statistics)

    def picture(
        self, step: int, tokens: Tensor, texts: list[str], *, cu_seqlens: Tensor | None = None
    ) -> AttentionPicture:
        """Run the first sequence of a batch through the model and record the keys that each branch reads.

        With a sharded model every rank must call this.

        Args:
            step: Optimizer steps done.
            tokens, cu_seqlens: See `measure`.
            texts: The text of each of the T tokens.

        Raises:
            ValueError: If the number of texts is not that of the tokens, or no layer chooses blocks.
        """
        num_tokens = tokens.shape[1]
        if len(texts) != num_tokens or not self.layers:
            raise ValueError(
                f"expected {num_tokens} texts and layers that choose blocks, got {len(texts)} and {len(self.layers)}"
            )
        geometry, num_groups = self.model.config.geometry, self.model.config.num_kv_heads
        cells = len(self.layers) * num_groups * geometry.num_selection_blocks(num_tokens)
        queries = evenly_spaced(num_tokens, picture_queries(num_tokens, cells), tokens.device)
        documents = _documents_of_first(cu_seqlens, tokens)
        layers = self._observe(tokens[:1], documents, lambda layer: describe_layers(layer, queries))
        return assemble_picture(step, geometry, texts, documents, queries, list(self.layers), layers)

    def choices(self, tokens: Tensor, queries: Tensor) -> Tensor:
        """Run a sequence [1, T] through the model; the blocks that some queries choose, [layers, Q, G, N], -1 pads."""
        return self._observe(tokens, None, lambda layer: {"chosen": layer.selected[..., queries, :, :]})["chosen"]

    def log(self, metrics: MetricsWriter, step: int, tokens: Tensor, *, cu_seqlens: Tensor | None = None) -> None:
        """Measure, write a row for each layer, and an event for each alarm that begins or ends.

        Args:
            metrics: The metrics of the run.
            step: Optimizer steps done.
            tokens, cu_seqlens: See `measure`.
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

    @torch.no_grad()
    def _observe(self, tokens: Tensor, documents: Documents | None, describe: Describe) -> dict[str, Tensor]:
        """Describe every layer of a forward pass, in groups that fit the memory; [layers, ...]."""
        described: list[dict[str, Tensor]] = []
        waiting: list[LayerAttention] = []

        def describe_waiting() -> None:
            # Matrix products in bf16 would not match the log-sum-exp that the layers computed.
            with torch.autocast(tokens.device.type, enabled=False):
                described.append(describe(LayerAttention.stack(waiting)))
            waiting.clear()

        def take(layer: LayerAttention) -> None:
            if waiting and (len(waiting) + 1) * layer.num_scores > MOST_SCORES:
                describe_waiting()
            waiting.append(layer)

        records = [_Record(layer) for layer in self.layers.values()]
        with self._recording(records, take, documents):
            self.model(tokens, cu_seqlens=documents)
        for record in records:
            if record.choices != 1:
                raise RuntimeError(f"expected one call of trifocal::select_blocks in each layer, got {record.choices}")
        describe_waiting()
        return {name: torch.cat([part[name] for part in described]) for name in described[0]}

    @contextmanager
    def _recording(
        self, records: list[_Record], take: Callable[[LayerAttention], None], documents: Documents | None
    ) -> Iterator[None]:
        current: list[_Record] = []

        def enter(record: _Record) -> Callable[[nn.Module, Any], None]:
            return lambda module, inputs: current.append(record)

        def keep_gates(module: nn.Module, inputs: Any, gates: Tensor) -> None:
            current[-1].gates = gates[0]

        def keep_keys(module: nn.Module, inputs: Any, keys: Tensor) -> None:
            current[-1].keys = keys

        def choice(q: Tensor, k_cmp: Tensor, lse: Tensor, geometry: Geometry, scale: float, selected: Tensor) -> None:
            record = current[-1]
            if isinstance(record.layer, SelectedAttention):
                record.gates = q.new_full((*q.shape[1:3], 3), math.nan, dtype=torch.float32)
            if record.gates is None or record.keys is None:
                raise RuntimeError("a layer chose its blocks before its gates and keys were computed")
            k_slc = record.layer.selected_keys(record.keys, documents)[0]
            layer = LayerAttention(record.gates, q[0], k_cmp[0], lse[0], k_slc, selected[0], geometry, scale, documents)
            record.choices += 1
            take(layer)

        handles = []
        for record in records:
            handles.append(record.layer.register_forward_pre_hook(enter(record)))
            if isinstance(record.layer, NSAttention):
                handles.append(record.layer.gate.register_forward_hook(keep_gates))
            handles.append(record.layer.k_proj.register_forward_hook(keep_keys))
        try:
            with _SelectionRecorder(choice):
                yield
        finally:
            for handle in handles:
                handle.remove()


class _SelectionRecorder(TorchDispatchMode):
    """Records every call of the operator `trifocal::select_blocks`, on any backend."""

    def __init__(self, record: Callable[[Tensor, Tensor, Tensor, Geometry, float, Tensor], None]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.trifocal.select_blocks.default:
            q, k_cmp, lse, sizes, _, scale, *_ = args
            self._record(q, k_cmp, lse, Geometry(*sizes), scale, result)
        return result


def _documents_of_first(cu_seqlens: Tensor | None, tokens: Tensor) -> Documents | None:
    """The documents of the first sequence of [B, T] tokens, on their device, without waiting for it."""
    if cu_seqlens is None:
        return None
    length = tokens.shape[1]
    inside = [start for start in cu_seqlens.tolist() if start < length]
    return Documents.from_cu_seqlens(torch.tensor([*inside, length], dtype=torch.int32), length).to(tokens.device)


def _as_columns(value: Tensor) -> Tensor:
    """[layers] or [layers, n] as [layers, n]."""
    return value[:, None] if value.ndim == 1 else value


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 5)


def alarms_of(row: Row) -> Iterator[tuple[tuple[str, int, str], str]]:
    """The alarms of one layer's figures.

    Args:
        row: From `AttentionTelemetry.measure`.

    Yields:
        Name, layer and branch (empty where there is none), and a sentence.
    """
    layer = row["layer"]
    for branch in BRANCHES:
        mean, entropy = row[f"gate_mean_{branch}"], row[f"gate_entropy_{branch}"]
        if mean is None or entropy is None:
            # NaN: the loss of the next step is too, and ends the run with the cause.
            continue
        if mean < CLOSED_GATE:
            yield ("gate_closed", layer, branch), f"layer {layer}: the {branch} gate is closed, its mean is {mean:.4f}"
        elif entropy < SATURATED_ENTROPY:
            sentence = f"layer {layer}: the {branch} gate is saturated, its entropy is {entropy:.4f} nats"
            yield ("gate_saturated", layer, branch), sentence
    # Without gates there is no window branch to read them.
    if row["gate_mean_win"] is not None and row["free_local_share"] > LOCAL_SHARE:
        sentence = f"layer {layer}: {row['free_local_share']:.0%} of the free choices lie inside the window"
        yield ("choices_local", layer, ""), sentence
