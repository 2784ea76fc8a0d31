"""Decoding: a token's time through the engine, and a mix of requests.

python benchmarks/decoding.py --parts model --sizes 1x1024 8x8192
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lib import decode_engine
from lib.decode_engine import DecodeOptions, DecodingBench
from lib.decode_layer import LayerShape, check_memory, check_step
from lib.plain_decoder import PlainDecoder
from lib.recorder import OK, Recorder
from lib.script import MODEL_NOTE, Benchmark, parse_size
from lib.shapes import DTYPES
from lib.timing import Timing, peak_gib, recorded
from trifocal.inference import CachedModel, CachedSequence, Engine, Request, Sampling
from trifocal.inference.paged_cache import cache_bytes
from trifocal.models import ModelConfig, parameter_count
from trifocal.nn.attention_base import INDEX_DIM

# The first step compiles, the second is recorded, and the host reads a step behind.
_WARMUP_STEPS = 5

NOTES = (
    "Random weights. nsa and dense run through the engine of trifocal generate: paged caches, recorded steps, draws at "
    "temperature 0.8, host included.",
    MODEL_NOTE,
    "model: token_ms is the median time of a step that adds a token to every sequence; p20 and p80 are the spread. "
    "Caches are filled with random numbers instead of a prompt. keys_per_step is by formula: keys of all branches "
    "that one query reads in one layer and KV head, the mean over layers, index keys apart; cache_mib is what a step "
    "reads of all caches, weights_mib of the weights, gflop its products; kept_bytes is what the caches hold, over the "
    "past.",
    "dense plain: only PyTorch, one compiled and recorded step, SDPA without a mask over a cache as long as the past, "
    "the likeliest token; the host is not waited for.",
    *decode_engine.MIX_NOTES,
)


def bench_decode(options: DecodeOptions, recorder: Recorder) -> None:
    """Measure every row of the parts that are asked for; they are in `recorder.rows`."""
    bench = DecodingBench(options, recorder)
    for part in options.parts:
        _PARTS[part](bench)
        bench.release()


def _bench_model(bench: DecodingBench) -> None:
    options, recorder = bench.options, bench.recorder
    rows: list[tuple[str, Callable[..., dict[str, Any]]]] = [(name, _step_figures) for name in options.attention]
    if options.plain:
        rows.append(("dense plain", _plain_figures))
    for size in options.sizes:
        sequences, past = parse_size(size)
        for name, figures in rows:
            labels = {"part": "model", "attention": name, "sequences": sequences, "tokens": past}
            row = recorder.measure(labels, partial(figures, bench, name, sequences, past))
            bench.release()
            figure = f"{row['token_ms']:.3g} ms a token" if row["status"] == OK else row["status"]
            recorder.say(f"{name}, {sequences} x {past}: {figure}")


def _step_figures(bench: DecodingBench, attention: str, sequences: int, past: int) -> dict[str, Any]:
    options, device = bench.options, bench.device
    config, dtype = bench.options.model_of(attention), DTYPES[options.precision]
    length = past + _WARMUP_STEPS + options.new_tokens + 1
    sizes = (config.num_heads, config.num_kv_heads, config.head_dim, config.value_dim)
    for kind in {*config.attention_of_layers}:
        check_step(kind, LayerShape(sequences, past, *sizes), config.geometry, device, dtype)
    check_memory(cache_bytes(config, dtype, length).of_sequence(length) * sequences, device)
    model = bench.model(attention)
    cached = FilledModel(
        model,
        max_sequences=sequences,
        max_length=length,
        dtype=dtype,
        prefill_chunk_size=past,
    )
    times = step_times_ms(cached, past, options.new_tokens)
    return {
        **_timing(Timing.of(times)),
        "peak_gib": peak_gib(device),
        **work_per_step(config, sequences, past, dtype),
    }


class FilledModel(CachedModel):
    """A model whose caches hold random numbers: a prompt takes its pages, and nothing is computed for it."""

    @torch.no_grad()
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        generator = torch.Generator(self.device).manual_seed(0)
        for layer in self.cache.layers:
            for x in vars(layer).values():
                if x is not None:
                    x.normal_(generator=generator)

    def prefill_chunk(self, sequence: CachedSequence, tokens: Tensor, *, all_logits: bool = False) -> Tensor:
        """Take the pages of the tokens; all tokens are as likely next."""
        sequence.table.grow(len(tokens))
        return torch.zeros(1, self.config.vocab_size, device=self.device)


def step_times_ms(model: CachedModel, past: int, count: int) -> list[float]:
    """Milliseconds of `count` steps in which all sequences that the model holds take a token, host included."""
    # All prompts in one step.
    model.prefill_chunk_size = max(past, 256) * model.max_sequences
    engine, prompt = Engine(model), [0] * past
    for seed in range(model.max_sequences):
        sampling = Sampling(temperature=0.8, seed=seed)
        engine.submit(Request(prompt=prompt, max_new_tokens=_WARMUP_STEPS + count + 2, sampling=sampling))
    while engine.num_waiting:
        engine.step()
    for _ in range(_WARMUP_STEPS):
        engine.step()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        updates = engine.step()
        times.append((time.perf_counter() - begin) * 1000)
        assert len(updates) == model.max_sequences, len(updates)
        if any(update.token is None for update in updates):
            raise ArithmeticError("a logit was not finite")
    return times


def _plain_figures(bench: DecodingBench, _: str, sequences: int, past: int) -> dict[str, Any]:
    options, device = bench.options, bench.device
    config, dtype = bench.options.model_of("dense"), DTYPES[options.precision]
    check_memory(cache_bytes(config, dtype, past + 1).of_sequence(past + 1) * sequences, device)
    plain = PlainDecoder(bench.model("dense"), sequences, past + 1, dtype)
    step: Callable[[], object] = plain.step
    if device.type == "cuda":
        # Shapes are compiled in, and the number of compilations of one function is limited.
        torch.compiler.reset()
        step = recorded(torch.compile(plain.step, fullgraph=True, dynamic=False), device)
    timing = _timing_of_rounds(step, device, options)
    return {**_timing(timing), "peak_gib": peak_gib(device), **work_per_step(config, sequences, past, dtype)}


def _timing_of_rounds(step: Callable[[], object], device: torch.device, options: DecodeOptions) -> Timing:
    """Time of a step in rounds of steps: the host waits only for a round."""

    def round_ms() -> float:
        begin = time.perf_counter()
        for _ in range(options.new_tokens):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) * 1000

    first = round_ms()
    rounds = max(3, min(50, int(options.row_seconds * 1000 / first)))
    return Timing.of([round_ms() / options.new_tokens for _ in range(rounds)])


def _timing(timing: Timing) -> dict[str, Any]:
    return {"token_ms": timing.median_ms, "token_p20_ms": timing.p20_ms, "token_p80_ms": timing.p80_ms}


def work_per_step(config: ModelConfig, sequences: int, past: int, dtype: torch.dtype) -> dict[str, Any]:
    """Keys (the mean over layers), bytes and operations of one step of all sequences behind n tokens, and bytes
    that a token keeps; by formula.
    """
    kinds, width = config.attention_of_layers, config.head_dim + config.value_dim
    keys = sum(keys_read(config, kind, past) for kind in kinds)
    index = INDEX_DIM * (past + 1) * sum(config.has_index and kind in ("nsa", "selected") for kind in kinds)
    cache = sequences * (keys * config.num_kv_heads * width + index) * dtype.itemsize
    attention = 2 * (config.num_heads * width * keys + config.num_kv_heads * index)
    # Every weight multiplies once, but for the look-up in the embedding.
    count = parameter_count(config) - (0 if config.tie_embeddings else config.vocab_size * config.dim)
    return {
        "keys_per_step": round(keys / len(kinds)),
        "kept_bytes": round(cache_bytes(config, dtype, past).of_sequence(past) / past),
        "cache_mib": cache / 2**20,
        "weights_mib": count * dtype.itemsize / 2**20,
        "gflop": sequences * (attention + 2 * count) / 1e9,
    }


def keys_read(config: ModelConfig, kind: str, past: int) -> int:
    """Keys that the token behind n reads in a layer."""
    geometry, window = config.geometry, min(config.window_of_layers, past + 1)
    if kind == "nsa":
        return geometry.keys_read_per_step(past)
    if kind == "selected":
        others = geometry.num_compressed_blocks(past + 1) + min(geometry.window_size, past + 1)
        return geometry.keys_read_per_step(past) - others
    return window if kind == "window" else past + 1


def speedups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How many times faster each sparse model takes a token than those with dense layers, by size."""
    measured = {
        (row["sequences"], row["tokens"], row["attention"]): row["token_ms"]
        for row in rows
        if row.get("part") == "model" and row["status"] == OK
    }
    found = []
    for sequences, tokens, attention in measured:
        if "dense" in attention:
            continue
        own = measured[sequences, tokens, attention]
        ratios = {
            f"{name.replace(' ', '_')}_ratio": measured[sequences, tokens, name] / own
            for name in ("dense", "dense plain", "mix-dense")
            if (sequences, tokens, name) in measured
        }
        if ratios:
            found.append({"attention": attention, "sequences": sequences, "tokens": tokens, **ratios})
    return found


_PARTS: dict[str, Callable[[DecodingBench], None]] = {
    "model": _bench_model,
    "mix": decode_engine.bench_mix,
}


DECODING = Benchmark(
    "decoding",
    DecodeOptions,
    bench_decode,
    NOTES,
    {
        "attention": "attention", "sequences": "sequences", "tokens": "tokens",
        "requests": "requests", "token_ms": "ms/token", "keys_per_step": "keys/step", "cache_mib": "cache MiB/step",
        "kept_bytes": "bytes kept/token", "seconds": "s",
        "tokens_out_per_second": "tokens/s out", "tokens_in_per_second": "tokens/s in", "peak_gib": "peak GiB",
        "status": "status",
    },
    tables={"times_faster": speedups},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(DECODING.main())
