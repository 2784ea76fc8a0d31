"""Checks of cost: the number of operations does not depend on length; storage and time grow linearly."""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from trifocal.checks.measurement import Measurement
from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import nsa_attention
from trifocal.testing.costs import count_operations, stored_bytes
from trifocal.testing.inputs import attention_inputs
from trifocal.testing.small_models import minimal_config, random_tokens

MakeModel = Callable[[ModelConfig], DecoderLM]
Attention = Callable[..., Tensor]

DEPTHS = (1, 2, 4, 5, 12, 24)
LENGTHS = (64, 256, 512)


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


def layer_sweep(
    device: torch.device,
    *,
    make_model: MakeModel = DecoderLM,
    step_seconds: Callable[[DecoderLM, Tensor, torch.device], float] = step_seconds,
    rounds: int = 4,
    most_rounds: int = 20,
) -> Measurement:
    """Step time and memory of the minimal model at 1 to 24 layers: nothing special happens at five.

    The figure is the exponent with which time or stored bytes grow from 12 to 24 layers, or from 1 to 24. Bound:
    linear growth is 1, or less because of constant parts; quadratic is 2; half-way lies 1.5.

    The time is the fastest of interleaved rounds, in which another process's burst hits one round, not one depth.
    Other processes only ever add to it, so a time that grows too fast is measured again, up to `most_rounds`.
    """
    models = {depth: make_model(minimal_config(depth)).to(device) for depth in DEPTHS}
    tokens = random_tokens((1, 128), 256, device)
    memory = {depth: stored_bytes(partial(model, tokens, tokens)) for depth, model in models.items()}
    best = dict.fromkeys(DEPTHS, math.inf)
    bound, measured = 1.5, 0
    while measured < rounds or (measured < most_rounds and max(_exponents("time", best).values()) > bound):
        for depth, model in models.items():
            best[depth] = min(best[depth], step_seconds(model, tokens, device))
        measured += 1
    exponents = _exponents("time", best) | _exponents("memory", memory)
    worst = max(exponents, key=lambda name: exponents[name])
    rows = [f"{depth:2} layers: {1000 * best[depth]:7.1f} ms, {memory[depth] / 2**20:6.1f} MiB" for depth in DEPTHS]
    return Measurement(exponents[worst], bound, "exponent", (*rows, *machine_busy(), f"worst: {worst}"))


def machine_busy() -> tuple[str, ...]:
    """A line if more processes run than there are cores: times then include other programs."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return ()
    cores = os.cpu_count() or 1
    return (f"machine busy: load {load:.1f} on {cores} cores",) if load > cores else ()


def _exponents(what: str, values: Mapping[int, float]) -> dict[str, float]:
    """The power of the depth with which a figure grows."""
    return {
        f"{what}, {low} to {high} layers": math.log(values[high] / values[low]) / math.log(high / low)
        for low, high in ((12, 24), (1, 24))
    }


def stored_memory_growth(device: torch.device, *, make_model: MakeModel = DecoderLM) -> Measurement:
    """The memory that a model stores for backward grows linearly with length.

    The figure compares the bytes that a token costs between the two longer lengths with those between the two
    shorter ones. Bound: 1 for linear growth, and one percent for rounding up to whole blocks.
    """
    model = make_model(minimal_config(2)).to(device)
    lengths = (256, 512, 1024)
    sizes = []
    for length in lengths:
        tokens = random_tokens((1, length), 256, device)
        sizes.append(stored_bytes(partial(model, tokens, tokens)))
    slopes = [(sizes[i + 1] - sizes[i]) / (lengths[i + 1] - lengths[i]) for i in (0, 1)]
    details = [f"{length} tokens: {size / 2**20:.2f} MiB" for length, size in zip(lengths, sizes, strict=True)]
    return Measurement(slopes[1] / slopes[0], 1.01, "ratio", tuple(details))


def stored_memory_per_token(device: torch.device, *, attention: Attention = nsa_attention) -> Measurement:
    """The attention stores no copy of keys and values per query.

    The figure is the memory that one call stores for backward, in multiples of the necessary: inputs, the three
    branches' outputs and log-sum-exps, and the choice. Bound: a tenth more, for positions and documents of tokens. A
    copy of every query's selected keys and values would be over a hundred times as much here.
    """
    length, geometry = 1024, minimal_config(1).geometry
    inputs = attention_inputs(geometry, length, device, torch.float32, num_heads=8, head_dim=16, value_dim=16).leaves()
    outputs = 3 * 4 * length * inputs.q.shape[2] * (inputs.v_slc.shape[3] + 1)
    choice = 4 * length * inputs.k_cmp.shape[2] * geometry.num_selected_blocks
    needed = sum(x.nbytes for x in inputs) + outputs + choice
    stored = stored_bytes(lambda: attention(*inputs, geometry, backend="reference"))
    return Measurement(stored / needed, 1.1, "of needed", (f"{stored / length:.0f} bytes a token",))


def operation_count(device: torch.device, *, make_model: MakeModel = DecoderLM) -> Measurement:
    """A training step takes as many operations at 512 tokens as at 64: nothing loops over the sequence.

    The second step of each length is counted. Before the first one on a GPU, kernels are compiled for lengths of its
    kind, by a call on the meta device: its operations are no part of a step, and depend on how kernels cut that length.
    """
    model = make_model(minimal_config(2)).to(device)
    counts: dict[int, Counter[str]] = {}
    for length in LENGTHS:
        step = partial(_step, model, random_tokens((2, length), 256, device))
        step()
        counts[length] = count_operations(step)
    totals = [count.total() for count in counts.values()]
    details = [f"{length} tokens: {total} operations" for length, total in zip(LENGTHS, totals, strict=True)]
    spread = max(totals) - min(totals)
    return Measurement(spread, 0, "operations", (*details, *(_differing(list(counts.values())) if spread else ())))


def _differing(counts: Sequence[Counter[str]]) -> list[str]:
    """The eight operations whose numbers differ most, with the number at each length."""
    numbers = {name: [count[name] for count in counts] for name in sorted(set().union(*counts))}
    differing = {name: found for name, found in numbers.items() if len(set(found)) > 1}
    ranked = sorted(differing, key=lambda name: min(differing[name]) - max(differing[name]))
    return [f"{name}: {', '.join(map(str, differing[name]))}" for name in ranked[:8]]


def _step(model: DecoderLM, tokens: Tensor) -> None:
    model(tokens, tokens).backward()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
