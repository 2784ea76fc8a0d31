"""Gates and selected blocks of every layer during a run, as `telemetry` rows.

Measured on the first sequence of a batch by a separate forward pass without gradient: the training step itself,
compiled or not, is unchanged. The host waits for the device at the end. docs/diagnostics.md has fields and alarms.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trifocal.models import DecoderLM
from trifocal.nn import NSAttention
from trifocal.nn.chooser import ChoosingAttention
from trifocal.ops import Documents
from trifocal.runlog.jsonl import Row
from trifocal.runlog.metrics import MetricsWriter
from trifocal.telemetry.attention_picture import AttentionPicture, describe_layer
from trifocal.telemetry.maps import LayerAttention, evenly_spaced
from trifocal.telemetry.statistics import BRANCHES, attention_statistics

CLOSED_GATE = 0.02
"""Alarm: a branch with a mean gate below this in a layer adds nothing there."""
SATURATED_ENTROPY = 0.02
"""Alarm: a branch's gates with a mean entropy below this, in nats, are stuck at 0 or 1."""
LOCAL_SHARE = 0.95
"""Alarm: with a greater share of free choices inside the window, selection adds nothing."""
# Of a picture.
_MAX_QUERIES, _MIN_QUERIES = 128, 32
_MAX_CELLS = 2**20
"""Bytes of one map before compression, as far as _MIN_QUERIES allow."""

Describe = Callable[[LayerAttention], dict[str, Tensor]]


class AttentionTelemetry:
    """Measures the layers of a model, from before its compilation, that choose blocks: `layers`, by their numbers."""

    def __init__(self, model: DecoderLM) -> None:
        self.model = model
        self.layers = {
            number: layer
            for number, layer in enumerate(model.attention_layers())
            if isinstance(layer, ChoosingAttention) and model.config.selection != "random"
        }
        self._active: set[tuple[str, int, str]] = set()

    def measure(self, tokens: Tensor, *, cu_seqlens: Tensor | None = None) -> list[Row]:
        """A row, of JSON types, for each layer that chooses blocks, of the first sequence of tokens [B, T];
        `cu_seqlens` are those of its batch, on the host. With a sharded model every rank must call this.
        """
        if not self.layers:
            return []
        figures = {name: value.tolist() for name, value in self.figures(tokens, cu_seqlens=cu_seqlens).items()}
        return [
            {"layer": layer} | {name: _rounded(values[index]) for name, values in figures.items()}
            for index, layer in enumerate(self.layers)
        ]

    def figures(self, tokens: Tensor, *, cu_seqlens: Tensor | None = None) -> dict[str, Tensor]:
        """The figures of `measure`, [layers, ...], on the device, without waiting for it."""
        documents = _documents_of_first(cu_seqlens, tokens)
        return self._observe(tokens[:1], documents, attention_statistics)

    def picture(
        self, step: int, tokens: Tensor, texts: list[str], *, cu_seqlens: Tensor | None = None
    ) -> AttentionPicture:
        """The keys that each branch reads in the first sequence of a batch, as of `measure`, with its tokens' texts."""
        num_tokens = tokens.shape[1]
        geometry, num_groups = self.model.config.geometry, self.model.config.num_kv_heads
        cells = len(self.layers) * num_groups * geometry.num_selection_blocks(num_tokens)
        most = max(_MIN_QUERIES, min(_MAX_QUERIES, _MAX_CELLS // cells))
        queries = evenly_spaced(num_tokens, most, tokens.device)
        documents = _documents_of_first(cu_seqlens, tokens)
        layers = self._observe(tokens[:1], documents, lambda layer: describe_layer(layer, queries))
        maps = {name: map_of_layers.cpu().numpy() for name, map_of_layers in layers.items()}
        if documents is None:
            positions, ids = np.arange(num_tokens, dtype=np.int32), np.zeros(num_tokens, dtype=np.int32)
        else:
            positions, ids = documents.positions.cpu().numpy(), documents.ids.cpu().numpy()
        on_host = queries.to(torch.int32).cpu().numpy()
        config = self.model.config
        others = [
            [number, config.window_of_layers if kind == "window" else 0]
            for number, kind in enumerate(config.attention_of_layers)
            if number not in self.layers
        ]
        return AttentionPicture(
            step, geometry, texts, list(self.layers), positions, ids, on_host, **maps, others=others
        )

    def choices(self, tokens: Tensor, queries: Tensor) -> Tensor:
        """Run a sequence [1, T] through the model; the blocks that some queries choose, [layers, Q, G, N], -1 pads."""
        return self._observe(tokens, None, lambda layer: {"chosen": layer.selected[..., queries, :, :]})["chosen"]

    def log(self, metrics: MetricsWriter, step: int, tokens: Tensor, *, cu_seqlens: Tensor | None = None) -> None:
        """Measure, write a row for each layer, and an event for each alarm that begins or ends."""
        rows = self.measure(tokens, cu_seqlens=cu_seqlens)
        for row in rows:
            metrics.write("telemetry", step, **row)
        before, alarms = self._active, {key: sentence for row in rows for key, sentence in alarms_of(row)}
        self._active = set(alarms)
        for name, layer, branch in sorted(alarms.keys() - before):
            values: Row = {"layer": layer, "branch": branch} if branch else {"layer": layer}
            metrics.event(step, name, alarms[name, layer, branch], severity="warning", **values)
        for name, layer, branch in sorted(before - alarms.keys()):
            what = f"layer {layer}{', ' + branch if branch else ''}: {name} is over"
            metrics.event(step, f"{name}_over", what, layer=layer)

    @torch.no_grad()
    def _observe(self, tokens: Tensor, documents: Documents | None, describe: Describe) -> dict[str, Tensor]:
        """Describe every layer of a forward pass when it chooses; [layers, ...]."""
        described: list[dict[str, Tensor]] = []

        def take(layer: LayerAttention) -> None:
            # Matrix products in bf16 would not match the log-sum-exp that the layers computed.
            with torch.autocast(tokens.device.type, enabled=False):
                described.append(describe(layer))

        with _ChoiceRecorder(list(self.layers.values()), documents, take):
            self.model(tokens, cu_seqlens=documents)
        assert len(described) == len(self.layers), f"{len(described)} choices in {len(self.layers)} layers"
        return {name: torch.cat([part[name] for part in described]) for name in described[0]}


class _ChoiceRecorder(TorchDispatchMode):
    """Hands on the tensors of each layer when it has called the operator that chooses its blocks, on any backend."""

    def __init__(
        self, layers: list[ChoosingAttention], documents: Documents | None, take: Callable[[LayerAttention], None]
    ) -> None:
        super().__init__()
        self._layers, self._documents, self._take = layers, documents, take
        self._handles: list[Any] = []
        self._gates: Tensor | None = None
        self._current: tuple[ChoosingAttention, Tensor, Tensor] | None = None

    def __enter__(self) -> Self:
        for layer in self._layers:
            layer.watcher = partial(self._begin, layer)
            if isinstance(layer, NSAttention):
                self._handles.append(layer.gate.register_forward_hook(self._keep_gates))
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for layer in self._layers:
            layer.watcher = None
        for handle in self._handles:
            handle.remove()

    def _keep_gates(self, module: nn.Module, inputs: Any, gates: Tensor) -> None:
        self._gates = gates

    def _begin(self, layer: ChoosingAttention, q: Tensor, k_slc: Tensor) -> None:
        self._current = layer, q, k_slc

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.trifocal.select_blocks.default:
            self._chosen(args[1:2], result)
        elif func is torch.ops.trifocal.select_blocks_by_index.default:
            self._chosen(args[:2], result)
        return result

    def _chosen(self, chooser: tuple[Tensor, ...], selected: Tensor) -> None:
        assert self._current is not None
        layer, q, k_slc = self._current
        gates, self._gates, self._current = self._gates, None, None
        if gates is None:
            gates = q.new_full((*q.shape[:3], 3), math.nan, dtype=torch.float32)
        if layer.chooser == "exact":
            chooser = ()
        self._take(LayerAttention(gates, q, k_slc, selected, chooser, layer.geometry, self._documents))


def _documents_of_first(cu_seqlens: Tensor | None, tokens: Tensor) -> Documents | None:
    """The documents of the first sequence of [B, T] tokens, on their device, without waiting for it."""
    if cu_seqlens is None:
        return None
    length = tokens.shape[1]
    inside = [start for start in cu_seqlens.tolist() if start < length]
    return Documents.from_cu_seqlens(torch.tensor([*inside, length], dtype=torch.int32), length).to(tokens.device)


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return None if math.isnan(value) else round(value, 5)


def alarms_of(row: Row) -> Iterator[tuple[tuple[str, int, str], str]]:
    """The alarms of a row of `AttentionTelemetry.measure`: name, layer, branch or "", and a sentence."""
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
    if row["free_local_share"] is not None and row["free_local_share"] > LOCAL_SHARE:
        sentence = f"layer {layer}: {row['free_local_share']:.0%} of the free choices lie inside the window"
        yield ("choices_local", layer, ""), sentence
