"""Many requests of many lengths through the engine: tokens a second, in and out."""

from functools import partial
from typing import Any

import torch

from trifocal.bench.decoding_options import DecodingBench
from trifocal.bench.recorder import OK, Unavailable
from trifocal.bench.shapes import DTYPES
from trifocal.bench.timing import peak_gib, synchronized_seconds
from trifocal.generate import CachedModel, Engine, Request, Sampling
from trifocal.generate.paged_cache import memory_for_caches, plan_cache

NOTES = (
    "mix: requests of random tokens, lengths in and out uniform between --mix-in and --mix-out and the same in every "
    "row, all submitted at once; continuous batching. seconds is from the first request to the last token; the kernels "
    "were compiled and the steps recorded before. sequences is the most that run at a time.",
)
# Tokens of a prompt that is there to record a step.
_SHORT = 8


def bench_mix(bench: DecodingBench) -> None:
    """Measure the mix for each attention; rows are in the recorder."""
    for attention in bench.options.attention:
        labels = {"part": "mix", "attention": attention, "requests": bench.options.requests}
        row = bench.recorder.measure(labels, partial(_figures, bench, attention))
        bench.release()
        figure = f"{row['tokens_out_per_second']:,.0f} tokens/s" if row["status"] == OK else row["status"]
        bench.recorder.say(f"{attention}, {bench.options.requests} requests: {figure}")


def mixed_requests(bench: DecodingBench) -> list[Request]:
    """The requests, the same every time."""
    options, generator = bench.options, torch.Generator().manual_seed(0)

    def draw(fewest: int, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(fewest, most + 1, shape, generator=generator)

    lengths = draw(*options.mix_in, options.requests).tolist()
    new = draw(*options.mix_out, options.requests).tolist()
    return [
        Request(
            prompt=draw(0, options.model.vocab_size - 1, length).tolist(),
            max_new_tokens=count,
            sampling=Sampling(temperature=0.8, seed=seed),
        )
        for seed, (length, count) in enumerate(zip(lengths, new, strict=True))
    ]


def _figures(bench: DecodingBench, attention: str) -> dict[str, Any]:
    options, device = bench.options, bench.device
    config, dtype = bench.config(attention), DTYPES[options.precision]
    requests = mixed_requests(bench)
    most = min(options.max_sequences, options.requests)
    longest = max(request.longest for request in [*requests, *requests_of_every_batch(most)])
    model = bench.model(attention)
    free = memory_for_caches(config, dtype, device)
    plan = plan_cache(config, dtype, longest, free_bytes=free, sequences=most)
    if plan is None:
        raise Unavailable(f"a sequence of {longest:,} tokens does not fit")
    cached = CachedModel(
        model,
        max_sequences=plan.max_sequences,
        max_length=longest,
        num_pages=plan.num_pages,
        dtype=dtype,
        prefill_chunk_size=options.prefill_chunk_size,
        batch_invariant=options.batch_invariant,
    )
    engine = Engine(cached)
    for _ in engine.run([*requests_of_every_batch(plan.max_sequences), *map(_first_token_of, requests[:2])]):
        pass
    begin = synchronized_seconds(device)
    tokens_out = sum(update.token is not None for update in engine.run(requests))
    seconds = synchronized_seconds(device) - begin
    if tokens_out != sum(request.max_new_tokens for request in requests):
        raise ArithmeticError("a logit was not finite")
    tokens_in = sum(len(request.prompt) for request in requests)
    return {
        "sequences": plan.max_sequences,
        "seconds": seconds,
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "tokens_in_per_second": tokens_in / seconds,
        "tokens_out_per_second": tokens_out / seconds,
        "peak_gib": peak_gib(device),
    }


def requests_of_every_batch(max_sequences: int) -> list[Request]:
    """Short requests that end in turns, the later half each time: each batch size has steps enough to be recorded."""
    turns = max_sequences.bit_length()
    return [
        Request(prompt=[0] * _SHORT, max_new_tokens=4 * (1 + turns - number.bit_length()))
        for number in range(max_sequences)
    ]


def _first_token_of(request: Request) -> Request:
    return Request(prompt=request.prompt, max_new_tokens=1)
