"""`trifocal bench decode`: milliseconds a token over the length of the past, sparse model beside dense twin."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from trifocal.bench.options import TwinOptions
from trifocal.bench.parity import check_model_parity
from trifocal.bench.recorder import Recorder
from trifocal.bench.shapes import DTYPES
from trifocal.bench.timing import Timing
from trifocal.errors import UserError
from trifocal.generate import CachedModel
from trifocal.models import DecoderLM, ModelConfig, parameter_count
from trifocal.train.micro_batch import autocast
from trifocal.train.preflight import choose_device

GIB = 2**30
_WARMUP_TOKENS = 3

NOTES = (
    "One token a step through the caches of generate, the likeliest taken; random weights and prompt. Medians over "
    "the steps; p20 and p80 are the spread; the prompt went through the model before, in chunks.",
    "keys_per_step is by formula: keys of all branches that one query reads, in one layer and group; cache_mib is "
    "what all layers read of the cache for one step, gflop the products of a step.",
)


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(TwinOptions):
    """Time decoding of the sparse model and its dense twin over lengths of the past, in one run."""

    contexts: tuple[int, ...] = (1024, 4096, 16384, 65536)
    """Tokens of the past."""
    new_tokens: int = 64
    """Tokens that are timed at each."""
    batch: int = 1
    """Sequences at a time."""
    prefill_chunk_size: int = 2048
    """Tokens of the prompt at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("new_tokens", "batch", "prefill_chunk_size")
        if any(context < 1 for context in self.contexts):
            raise UserError(f"--contexts must be at least 1 each, got {' '.join(map(str, self.contexts))}")


def bench_decode(options: DecodeOptions, recorder: Recorder) -> None:
    """Measure every row; they are in `recorder.rows`."""
    device = choose_device(options.device)
    for attention in options.attention:
        config = replace(options.model, attention=attention)
        made: list[DecoderLM] = []
        for context in options.contexts:
            labels = {
                "attention": attention,
                "batch": options.batch,
                "context_tokens": context,
                "precision": options.precision,
            }
            row = recorder.measure(labels, partial(_row, options, config, context, device, made))
            figure = f"{row['token_ms']:.3g} ms a token" if "token_ms" in row else row["status"]
            recorder.say(f"{attention} after {context}: {figure}")


def _row(
    options: DecodeOptions, config: ModelConfig, context: int, device: torch.device, made: list[DecoderLM]
) -> dict[str, Any]:
    if not made:
        if config.attention == "nsa":
            check_model_parity(config, device, DTYPES[options.precision])
        model = DecoderLM(config)
        model.init_weights(0)
        made.append(model.to(device).eval())
    return {**_timed(made[0], options, context, device), **work_per_step(config, options, context)}


def work_per_step(config: ModelConfig, options: DecodeOptions, context: int) -> dict[str, Any]:
    """Keys, bytes of the cache and operations of one step at the end of the past, by formula."""
    if config.attention == "nsa":
        keys = config.geometry.keys_read_per_step(context)
    else:
        keys = context + 1
    element = DTYPES[options.precision].itemsize
    width = config.head_dim + config.value_dim
    cache = options.batch * config.num_layers * keys * config.num_kv_heads * width * element
    attention = 2 * config.num_layers * config.num_heads * width * keys
    # Every weight multiplies once, but for the look-up in the embedding.
    weights = 2 * (parameter_count(config) - (0 if config.tie_embeddings else config.vocab_size * config.dim))
    return {
        "keys_per_step": keys,
        "cache_mib": cache / 2**20,
        "gflop": options.batch * (attention + weights) / 1e9,
    }


@torch.inference_mode()
def _timed(model: DecoderLM, options: DecodeOptions, context: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (options.batch, context), generator=generator).to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock = _clock(device)
    with autocast(device, options.precision):
        cached = CachedModel(
            model,
            max_sequences=options.batch,
            max_length=context + _WARMUP_TOKENS + options.new_tokens,
            prefill_chunk_size=options.prefill_chunk_size,
        )
        sequences = [cached.admit() for _ in range(options.batch)]
        begin = clock()
        logits = torch.stack([cached.prefill(sequence, row) for sequence, row in zip(sequences, prompt, strict=True)])[
            :, None
        ]
        prefill_seconds = clock() - begin
        times = []
        for _ in range(_WARMUP_TOKENS + options.new_tokens):
            begin = clock()
            logits = cached.decode(sequences, logits[:, -1:].argmax(-1))
            times.append((clock() - begin) * 1000)
    if not torch.isfinite(logits).all():
        raise ArithmeticError("a logit was not finite")
    timing = Timing.of(times[_WARMUP_TOKENS:])
    peak = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
    return {
        "token_ms": timing.median_ms,
        "token_p20_ms": timing.p20_ms,
        "token_p80_ms": timing.p80_ms,
        "tokens_timed": timing.calls,
        "prefill_seconds": prefill_seconds,
        "peak_gib": peak,
    }


def _clock(device: torch.device) -> Callable[[], float]:
    """Seconds, once the device has nothing left to do: a person waits for every token."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
