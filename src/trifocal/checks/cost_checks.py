"""Checks of cost: the number of operations does not depend on length; storage and time grow linearly."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trifocal.checks.measurement import Measurement
from trifocal.models import DecoderLM
from trifocal.ops import Documents, Geometry, nsa_attention, reference
from trifocal.testing.inputs import attention_inputs
from trifocal.testing.small_models import minimal_config, random_tokens

DEPTHS = (1, 2, 4, 5, 12, 24)
LENGTHS = (64, 256, 512)
ROUNDS, MAX_ROUNDS = 4, 20


def step_seconds(model: DecoderLM, tokens: Tensor, device: torch.device) -> float:
    """Time of one forward and backward pass: on a CPU this process's own, without waits for others."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    _wait(device)
    begin = clock()
    _step(model, tokens)
    _wait(device)
    seconds = clock() - begin
    model.zero_grad(set_to_none=True)
    return seconds


def layer_sweep(device: torch.device) -> Measurement:
    """Step time and memory of the minimal model at 1 to 24 layers: nothing special happens at five.

    The figure is the exponent with which time or stored bytes grow from 12 to 24 layers, or from 1 to 24. Bound:
    linear growth is 1, or less because of constant parts; quadratic is 2; half-way lies 1.5.

    The time is the fastest of interleaved rounds, in which another process's burst hits one round, not one depth.
    Other processes only ever add to it, so a time that grows too fast is measured again, up to `MAX_ROUNDS` times.
    """
    models = {depth: DecoderLM(minimal_config(depth)).to(device) for depth in DEPTHS}
    tokens = random_tokens((1, 128), 256, device)
    memory = {depth: stored_bytes(partial(model, tokens, tokens)) for depth, model in models.items()}
    best = dict.fromkeys(DEPTHS, math.inf)
    bound, measured = 1.5, 0
    while measured < ROUNDS or (measured < MAX_ROUNDS and max(_exponents("time", best).values()) > bound):
        for depth, model in models.items():
            best[depth] = min(best[depth], step_seconds(model, tokens, device))
        measured += 1
    exponents = _exponents("time", best) | _exponents("memory", memory)
    worst = max(exponents, key=lambda name: exponents[name])
    rows = [f"{depth:2} layers: {1000 * best[depth]:7.1f} ms, {memory[depth] / 2**20:6.1f} MiB" for depth in DEPTHS]
    return Measurement(exponents[worst], bound, "exponent", (*rows, f"worst: {worst}"))


def _exponents(what: str, values: Mapping[int, float]) -> dict[str, float]:
    """The power of the depth with which a figure grows."""
    return {
        f"{what}, {low} to {high} layers": math.log(values[high] / values[low]) / math.log(high / low)
        for low, high in ((12, 24), (1, 24))
    }


def stored_memory(device: torch.device) -> Measurement:
    """The attention stores no scores, and no copy of keys and values per query: memory grows linearly with length.

    The figure is the memory that one call stores for backward, in multiples of the necessary, which is linear: inputs,
    the three branches' outputs and log-sum-exps, and the choice. Bound: a tenth more, for positions and documents of
    tokens. A copy of every query's selected keys and values would be over a hundred times as much here.
    """
    geometry = minimal_config(1).geometry
    ratios = {}
    for length in (512, 1024):
        inputs = attention_inputs(geometry, length, device, torch.float32, num_heads=8, value_dim=16).leaves()
        outputs = 3 * 4 * length * inputs.q.shape[2] * (inputs.v_slc.shape[3] + 1)
        choice = 4 * length * inputs.k_cmp.shape[2] * geometry.num_selected_blocks
        stored = stored_bytes(partial(nsa_attention, *inputs, geometry, backend="reference"))
        ratios[length] = stored / (sum(x.nbytes for x in inputs) + outputs + choice)
    details = tuple(f"{length} tokens: {ratio:.3f} of the necessary" for length, ratio in ratios.items())
    return Measurement(max(ratios.values()), 1.1, "of needed", details)


def operation_count(device: torch.device) -> Measurement:
    """A training step takes as many operations at 512 tokens as at 64: nothing loops over the sequence.

    The second step of each length is counted. Before the first one on a GPU, kernels are compiled for lengths of its
    kind, by a call on the meta device: its operations are no part of a step, and depend on how kernels cut that length.
    """
    model = DecoderLM(minimal_config(2)).to(device)
    counts: dict[int, Counter[str]] = {}
    for length in LENGTHS:
        step = partial(_step, model, random_tokens((2, length), 256, device))
        step()
        counts[length] = count_operations(step)
    totals = [count.total() for count in counts.values()]
    details = [f"{length} tokens: {total} operations" for length, total in zip(LENGTHS, totals, strict=True)]
    details += [
        f"{name}: {', '.join(str(count[name]) for count in counts.values())}"
        for name in sorted(set().union(*counts.values()))
        if len({count[name] for count in counts.values()}) > 1
    ]
    return Measurement(max(totals) - min(totals), 0, "operations", tuple(details[:12]))


def _step(model: DecoderLM, tokens: Tensor) -> None:
    model(tokens, tokens).backward()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stored_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that backward keeps alive, each storage once; parameters and inputs included."""
    storages: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # The tensor is kept, so that no other takes its address.
        storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(size for size, _ in storages.values())


def count_operations(step: Callable[[], object]) -> Counter[str]:
    """Operators that PyTorch's dispatcher sees, by name, also those inside of `select_blocks`, one operator to it."""
    with _OperationCounter() as counter:
        step()
    return counter.counts


class _OperationCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[str(func)] += 1
        if func is torch.ops.trifocal.select_blocks.default:
            q, k_cmp, lse, sizes, num_keys, scale, boundaries = args[:7]
            documents = None if boundaries is None else Documents.from_checked(boundaries, num_keys)
            with self:
                reference.select_blocks(q, k_cmp, lse, Geometry(*sizes), num_keys, scale, documents)
        return func(*args, **(kwargs or {}))
