"""A process that the checks start: compares gradients with those of one process.

Started by `trifocal.checks.training_checks` as `python -c "…process_worker…"` with torchrun's variables. Each case
takes the same four rows: one process all of them, several processes an equal part each, or two chunks of each row.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trifocal.distributed.parallel import Mode, Parallel, parallelize
from trifocal.distributed.processes import DistributedContext, hard_exit, processes_started
from trifocal.models import DecoderLM
from trifocal.nn.chooser import ChoosingAttention
from trifocal.testing.small_models import MIX, make_model, random_tokens, small_config

LENGTH = 40
ROWS_PER_PROCESS = 2
TIMEOUT_SECONDS = 60.0
# The second step is the first in which DDP uses its new buckets, and a static graph.
_SEEDS = (1, 2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to take a step: `shards` processes share a copy under hsdp, `context` a sequence; `after`: gradients are
    exchanged after backward, as recorded graphs need it; `index`: of the mix, whose index every query teaches.
    """

    mode: Mode
    shards: int = 0
    num_layers: int = 2
    checkpointing: bool = False
    accumulation: int = 1
    static_graph: bool = False
    find_unused: bool = False
    reshard: bool = True
    after: bool = False
    context: int = 1
    index: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """fp64 where processes share sequences: there the products have other shapes, and round otherwise; and where an
        index chooses, by scores that rounding may exchange.
        """
        return torch.float64 if self.context > 1 or self.index else torch.float32

    @property
    def name(self) -> str:
        """The mode, and the fields that differ from the default."""
        parts: list[str] = [self.mode]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(field.name.replace("_", " ") + ("" if value is True else f" {value}"))
        return ", ".join(parts)


def full_tensor(tensor: Tensor | None) -> Tensor:
    """The whole tensor, gathered from its shards where it has any."""
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parallelize_case(case: Case, processes: DistributedContext) -> tuple[DecoderLM, Parallel]:
    """Make the case's model and parallelize it."""
    model = _model(case, processes)
    if case.checkpointing:
        model.set_activation_checkpointing(0, case.num_layers)
    parallel = parallelize(
        model,
        processes,
        case.mode,
        shards=case.shards,
        reshard_after_forward=case.reshard,
        static_graph=case.static_graph,
        find_unused_parameters=case.find_unused,
        exchange_after=case.after,
        context=case.context,
    )
    return model, parallel


def backward(case: Case, model: DecoderLM, parallel: Parallel, processes: DistributedContext, tokens: Tensor) -> None:
    """This process's part of the gradient: its rows, or its part of them, in micro-batches."""
    part = (lambda x: x) if model.context is None else model.context.local_tokens
    groups = processes.size // case.context
    rows = tokens.chunk(groups)[processes.rank // case.context]
    if parallel.flat_gradients is not None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter, view in zip(trained, parallel.flat_gradients.views, strict=True):
            parameter.grad = view.zero_()
        for batch in rows.chunk(case.accumulation):
            (parallel.module(part(batch), part(batch.roll(-1, 1))) / (case.accumulation * groups)).backward()
        parallel.exchange_gradients()
        return
    for index, batch in enumerate(rows.chunk(case.accumulation)):
        with parallel.micro_batch(last=index == case.accumulation - 1):
            # Averaged over all processes, those that share sequences among them, whose losses are shares.
            (parallel.module(part(batch), part(batch.roll(-1, 1))) * case.context / case.accumulation).backward()


def gradients_of_one(case: Case, processes: DistributedContext) -> list[list[Tensor]]:
    """The gradients of a case's model that one process computes, for the first and the second batch."""
    model = _model(case, processes)
    found = []
    for seed in _SEEDS:
        tokens = _tokens(processes, seed)
        model.zero_grad(set_to_none=True)
        model(tokens, tokens.roll(-1, 1)).backward()
        found.append([full_tensor(parameter.grad) for parameter in model.parameters()])
    return found


def gradient_difference(case: Case, processes: DistributedContext, one: list[list[Tensor]]) -> tuple[float, str]:
    """Largest difference of a gradient from one process's, relative to its largest entry, and whose; infinite where
    there is no gradient, or it differs by a bit between processes.
    """
    model, parallel = parallelize_case(case, processes)
    worst, name = 0.0, ""
    for seed, expected in zip(_SEEDS, one, strict=True):
        model.zero_grad(set_to_none=True)
        backward(case, model, parallel, processes, _tokens(processes, seed))
        for (key, parameter), exact in zip(model.named_parameters(), expected, strict=True):
            if parameter.grad is None:
                return float("inf"), key
            found = full_tensor(parameter.grad)
            relative = ((found - exact).abs().max() / exact.abs().max()).item()
            copies = processes.gather(found.cpu().numpy())
            if any((copies[0] != copy).any() for copy in copies):
                relative = float("inf")
            if not relative <= worst:
                worst, name = relative, key
    return worst, name


def main(device: str, cases: Sequence[dict[str, Any]], path: str) -> None:
    """Measure cases, given by their fields, on "cpu" or "cuda"; rank 0 writes `[[figure, name], …]` to the path."""
    torch.set_num_threads(1)
    with processes_started(torch.device(device), timeout_seconds=TIMEOUT_SECONDS) as processes:
        found = []
        one: dict[tuple[int, torch.dtype, bool], list[list[Tensor]]] = {}
        for fields in cases:
            case = Case(**fields)
            model = case.num_layers, case.dtype, case.index
            if model not in one:
                one[model] = gradients_of_one(case, processes)
            found.append(max(processes.gather(gradient_difference(case, processes, one[model]))))
        if processes.is_rank0:
            Path(path).write_text(json.dumps(found), encoding="utf-8")
    hard_exit(0)


def _model(case: Case, processes: DistributedContext) -> DecoderLM:
    changes = MIX if case.index else {}
    config = small_config(num_layers=case.num_layers, backend="reference", **changes)
    model = make_model(config, processes.device, case.dtype)
    for layer in model.attention_layers():
        if isinstance(layer, ChoosingAttention):
            layer.choice_loss_stretch = 1
    return model


def _tokens(processes: DistributedContext, seed: int) -> Tensor:
    return random_tokens((ROWS_PER_PROCESS * processes.size, LENGTH), 64, processes.device, seed=seed)
