"""What the parts of `benchmarks/decoding.py` share, and the mix of requests."""

import gc
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from lib.recorder import OK, Recorder, Unavailable
from lib.script import ModelOptions, parse_size
from lib.shapes import DTYPES
from lib.timing import peak_gib, synchronized_seconds
from trifocal.errors import UserError
from trifocal.inference import CachedModel, Engine, Request, Sampling
from trifocal.inference.paged_cache import memory_for_caches, plan_cache
from trifocal.models import DecoderLM

SIZES = ("1x1024", "1x4096", "1x16384", "1x65536", "8x8192", "64x8192", "64x65536")

MIX_NOTES = (
    "mix: requests of random tokens, lengths in and out uniform between --mix-in and --mix-out and the same in every "
    "row, all submitted at once; continuous batching. seconds is from the first request to the last token; the kernels "
    "were compiled and the steps recorded before. sequences is the most that run at a time.",
)


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(ModelOptions):
    """Time decoding of the sparse model, of its dense baseline on the same engine, and of a plain dense model."""

    parts: tuple[Literal["model", "mix"], ...] = ("model", "mix")
    """model: a token's time at --sizes; mix: many requests of many lengths."""
    sizes: tuple[str, ...] = SIZES
    """Sequences x tokens of the past of each, like 8x8192."""
    new_tokens: int = 64
    """Tokens of a sequence that are timed at each size."""
    plain: bool = True
    """Time a plain dense model beside the engine's, compiled and recorded."""
    prefill_chunk_size: int = 0
    """Tokens of a prompt that go through the model at a time; 0: as trifocal generate chooses."""
    requests: int = 256
    """Requests of the mix."""
    mix_in: tuple[int, int] = (4096, 7680)
    """Fewest and most tokens of a prompt of the mix."""
    mix_out: tuple[int, int] = (512, 2048)
    """Fewest and most new tokens of a request of the mix."""
    max_sequences: int = 256
    """Sequences that the mix runs at a time, as far as memory allows."""
    row_seconds: float = 1.0
    """Time to spend on a row of the plain model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("new_tokens", "requests", "max_sequences", "row_seconds")
        for size in self.sizes:
            parse_size(size)
        for name in ("mix_in", "mix_out"):
            fewest, most = getattr(self, name)
            if not 1 <= fewest <= most:
                raise UserError(f"--{name.replace('_', '-')} must be two numbers from 1 on, got {fewest} {most}")


class DecodingBench:
    """What the parts of the bench share."""

    def __init__(self, options: DecodeOptions, recorder: Recorder) -> None:
        self.options, self.recorder = options, recorder
        self.device = options.torch_device
        self._models: dict[str, DecoderLM] = {}

    def model(self, attention: str) -> DecoderLM:
        """A model with random weights, made once."""
        if attention not in self._models:
            model = DecoderLM(self.options.model_of(attention))
            model.init_weights(0)
            self._models[attention] = model.to(self.device).eval()
        return self._models[attention]

    def release(self) -> None:
        """Give the memory of a row back, and forget its peak."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


def bench_mix(bench: DecodingBench) -> None:
    """Measure the mix for each attention; rows are in the recorder."""
    for attention in bench.options.attention:
        labels = {"part": "mix", "attention": attention, "requests": bench.options.requests}
        row = bench.recorder.measure(labels, partial(_mix_figures, bench, attention))
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


def _mix_figures(bench: DecodingBench, attention: str) -> dict[str, Any]:
    options, device = bench.options, bench.device
    config, dtype = bench.options.model_of(attention), DTYPES[options.precision]
    requests = mixed_requests(bench)
    most = min(options.max_sequences, options.requests)
    longest = max(request.longest for request in requests)
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
    )
    engine = Engine(cached)
    engine.warm_up()
    engine.complete(map(_first_token_of, requests[:2]))
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


def _first_token_of(request: Request) -> Request:
    return Request(prompt=request.prompt, max_new_tokens=1)
