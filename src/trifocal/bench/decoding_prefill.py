"""Prompts: prefill beside the training forward of the same length, and the time to the first token."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trifocal.bench.decoding_options import DecodingBench
from trifocal.bench.parity import check_model_parity
from trifocal.bench.recorder import OK
from trifocal.bench.shapes import DTYPES
from trifocal.bench.timing import peak_gib, synchronized_seconds
from trifocal.generate import CachedModel, Engine, Request
from trifocal.train.micro_batch import autocast

NOTES = (
    "prefill: one sequence of random tokens, medians, the host included. training_forward_seconds is the forward pass "
    "of training with its loss and everything that backward needs, compiled where compiled is True. "
    "first_token_seconds is from the request to the first token on the host.",
)


def bench_prefill(bench: DecodingBench) -> None:
    """Measure every prompt; rows are in the recorder."""
    for tokens in bench.options.prompt_tokens:
        for attention in bench.options.attention:
            labels = {"part": "prefill", "attention": attention, "sequences": 1, "tokens": tokens}
            row = bench.recorder.measure(labels, partial(_figures, bench, attention, tokens))
            bench.release()
            figure = row["status"]
            if figure == OK:
                figure = f"{row['prefill_seconds']:.3g} s, {row['prefill_ratio']:.2f} of the training forward's"
            bench.recorder.say(f"{attention}, prompt of {tokens}: {figure}")


def _figures(bench: DecodingBench, attention: str, tokens: int) -> dict[str, Any]:
    options, device = bench.options, bench.device
    if attention == "nsa":
        check_model_parity(bench.config(attention), device, DTYPES[options.precision])
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(options.model.vocab_size, (tokens,), generator=generator)
    figures = _prefill(bench, attention, prompt)
    bench.release()
    compiled = options.compile and device.type == "cuda"
    forward_seconds = _median_seconds(_training_forward(bench, attention, prompt, compiled), bench)
    return {
        **figures,
        "training_forward_seconds": forward_seconds,
        "compiled": compiled,
        "prefill_ratio": figures["prefill_seconds"] / forward_seconds,
    }


def _prefill(bench: DecodingBench, attention: str, prompt: Tensor) -> dict[str, Any]:
    options = bench.options
    cached = CachedModel(
        bench.model(attention),
        max_sequences=1,
        max_length=len(prompt),
        dtype=DTYPES[options.precision],
        prefill_chunk_size=options.prefill_chunk_size,
        batch_invariant=options.batch_invariant,
    )
    engine, request = Engine(cached), Request(prompt=prompt.tolist(), max_new_tokens=1)

    def prefill() -> None:
        sequence = cached.admit()
        cached.prefill(sequence, prompt)
        cached.free(sequence)

    def first_token() -> None:
        (update,) = engine.run([request])
        if update.token is None:
            raise ArithmeticError("a logit was not finite")

    return {
        "prefill_seconds": _median_seconds(prefill, bench),
        "prefill_chunk_size": cached.prefill_chunk_size,
        "first_token_seconds": _median_seconds(first_token, bench),
        "peak_gib": peak_gib(bench.device),
    }


def _training_forward(bench: DecodingBench, attention: str, prompt: Tensor, compiled: bool) -> Callable[[], object]:
    model = bench.model(attention)
    if compiled:
        # Shapes are compiled in, and the number of compilations of one function is limited.
        torch.compiler.reset()
        model.compile_training()
    tokens = prompt[None].to(bench.device)
    targets = tokens.roll(-1, dims=1)

    def forward() -> None:
        with torch.enable_grad(), autocast(bench.device, bench.options.precision):
            model(tokens, targets)

    return forward


def _median_seconds(call: Callable[[], object], bench: DecodingBench) -> float:
    """Of the calls behind the first, which compiles."""
    call()
    times = []
    for _ in range(bench.options.repeats):
        begin = synchronized_seconds(bench.device)
        call()
        times.append(synchronized_seconds(bench.device) - begin)
    return statistics.median(times)
