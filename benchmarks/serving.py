"""The server under load: tokens a second, time to the first token and between tokens; the second turn of a chat.

python benchmarks/serving.py --clients 1 64
"""

import asyncio
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from lib.parity import check_model_parity
from lib.recorder import OK, Recorder, Unavailable
from lib.script import MODEL_NOTE, Benchmark, ModelOptions
from lib.shapes import DTYPES
from trifocal.data import make_tokenizer
from trifocal.errors import UserError
from trifocal.models import DecoderLM
from trifocal.train.checkpoint.export import export_folder
from trifocal.train.checkpoint.pretrained import DEMO

NOTES = (
    "Random weights, served by trifocal serve in its own process on the same machine, asked over HTTP; prompts "
    "are random tokens, and every answer has all of its tokens.",
    MODEL_NOTE,
    "load: n clients, each of which sends its next request when it has the answer to the last. The time between "
    "tokens is that between events of one stream. A first request of each length is not counted.",
    "turns: a prompt, then the same prompt with the answer and 50 more tokens; medians of the time to the first token. "
    "speculate: the package's model, one client, temperature 0; code is a class whose methods repeat themselves, "
    "random is a prompt of random tokens.",
)

_METHOD = """
    def __{}__(self, other):
        if not isinstance(other, Point):
            return NotImplemented
        return self.x {} other.x {} self.y {} other.y
"""
REPETITIVE = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n" + "".join(
    _METHOD.format(*words)
    for words in (("eq", "==", "and", "=="), ("ne", "!=", "or", "!="), ("lt", "<", "and", "<"), ("le", "", "", ""))
)
# A model writes the rest.
REPETITIVE = REPETITIVE[: REPETITIVE.rindex("            return NotImplemented")]


@dataclass(frozen=True, kw_only=True)
class ServingOptions(ModelOptions):
    """Time the server of the sparse model beside that of its dense baseline."""

    parts: tuple[Literal["load", "turns", "speculate"], ...] = ("load", "turns", "speculate")
    """load: many clients; turns: two turns of a chat; speculate: the package's model, with and without guesses."""
    clients: tuple[int, ...] = (1, 16, 64, 256)
    """Clients at a time."""
    requests: int = 4
    """Requests of each client."""
    prompt_tokens: int = 4096
    """Tokens of a prompt under load."""
    new_tokens: int = 256
    """Tokens of an answer."""
    turn_tokens: int = 8192
    """Tokens of the first turn."""
    repeats: int = 5
    """Chats that are timed."""
    prefill_chunk_size: int = 0
    """The server's flag of that name; 0: the server's default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("requests", "prompt_tokens", "new_tokens", "turn_tokens", "repeats")
        if not self.clients or min(self.clients) < 1:
            raise UserError(f"--clients must be at least 1 each, got {self.clients}")

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.prompt_tokens, self.turn_tokens + self.new_tokens + 50) + self.new_tokens


class Timed(NamedTuple):
    """One answer: seconds to its first event, between its events, and its tokens."""

    first: float
    between: list[float]
    tokens: list[int]


@contextlib.contextmanager
def random_server(options: ServingOptions, attention: str) -> Iterator[tuple[str, int]]:
    """Serve a model with random weights; host and port."""
    config = options.model_of(attention)
    model = DecoderLM(config)
    model.init_weights(0)
    with tempfile.TemporaryDirectory() as folder:
        export_folder(model, make_tokenizer("bytes"), Path(folder) / "model", sequence_length=options.max_length)
        del model
        with server(options, f"{folder}/model") as address:
            yield address


@contextlib.contextmanager
def server(options: ServingOptions, path: str, *flags: str) -> Iterator[tuple[str, int]]:
    """Serve the model of a path; host and port."""
    command = [
        sys.executable, "-m", "trifocal", "serve", path, "--port", "0", "--device", options.device,
        "--precision", options.precision, "--max-waiting", str(max(options.clients)),
        "--prefill-chunk-size", str(options.prefill_chunk_size), *flags,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            found = re.search(r"http://(.+):(\d+)$", process.stdout.readline().strip())
            if found is None:
                raise Unavailable((process.stderr.read().strip().splitlines() or ["the server ended"])[-1])
            yield found[1], int(found[2])
        finally:
            process.terminate()


async def ask(address: tuple[str, int], prompt: Sequence[int], new_tokens: int, **options: Any) -> Timed:
    """Stream one answer. The smallest client, so that it is not what is measured."""
    # Log-probabilities make an event of every token, also of one without text.
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": new_tokens, "stream": True, "logprobs": 0}
    data = json.dumps(body | {"ignore_eos": True} | options).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(*address, limit=2**20)
    try:
        writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + data)
        times, tokens = [], []
        async for line in reader:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ArithmeticError(event["error"]["message"])
                times.append(time.perf_counter())
                tokens += [_token(text) for text in event["choices"][0]["logprobs"]["tokens"]]
    finally:
        writer.close()
    if len(tokens) != new_tokens:
        raise ArithmeticError(f"expected {new_tokens} tokens, got {len(tokens)}")
    return Timed(times[0] - begin, [after - before for before, after in pairwise(times)], tokens)


def _token(text: str) -> int:
    """The token of a text in the answer's log-probabilities, also of the separator's name."""
    if text.startswith("token_id:"):
        return int(text.removeprefix("token_id:"))
    return int(make_tokenizer("bytes").encode_prompt(text).item())


def bench_serving(options: ServingOptions, recorder: Recorder) -> None:
    """Measure every row of the parts that are asked for; they are in `recorder.rows`."""
    for part in options.parts:
        _PARTS[part](options, recorder)


def _bench_load(options: ServingOptions, recorder: Recorder) -> None:
    for attention in options.attention:
        for clients in options.clients:
            labels = {
                "part": "load",
                "attention": attention,
                "clients": clients,
                "prompt_tokens": options.prompt_tokens,
            }
            row = recorder.measure(labels, partial(_load_figures, options, attention, clients))
            figure = f"{row['tokens_per_second']:,.0f} tokens/s" if row["status"] == OK else row["status"]
            recorder.say(f"{attention}, {clients} clients: {figure}")


def _load_figures(options: ServingOptions, attention: str, clients: int) -> dict[str, Any]:
    _check(options, attention)
    rng = random.Random(0)

    async def client(address: tuple[str, int], prompts: Sequence[Sequence[int]]) -> list[Timed]:
        return [await ask(address, prompt, options.new_tokens) for prompt in prompts]

    async def run(address: tuple[str, int]) -> tuple[float, list[Timed]]:
        await ask(address, _prompt(options, rng, options.prompt_tokens), 4)
        prompts = [
            [_prompt(options, rng, options.prompt_tokens) for _ in range(options.requests)] for _ in range(clients)
        ]
        begin = time.perf_counter()
        answers = await asyncio.gather(*(client(address, part) for part in prompts))
        return time.perf_counter() - begin, [answer for part in answers for answer in part]

    with random_server(options, attention) as address:
        seconds, answers = asyncio.run(run(address))
    between = [gap for answer in answers for gap in answer.between] or [0.0]
    return {
        "requests": len(answers),
        "seconds": seconds,
        "tokens_per_second": len(answers) * options.new_tokens / seconds,
        **_spread("first_token", [answer.first for answer in answers]),
        **_spread("between_tokens", between),
    }


def _bench_turns(options: ServingOptions, recorder: Recorder) -> None:
    for attention in options.attention:
        labels = {"part": "turns", "attention": attention, "prompt_tokens": options.turn_tokens}
        row = recorder.measure(labels, partial(_turn_figures, options, attention))
        figure = f"{row['second_ratio']:.2f} of the first" if row["status"] == OK else row["status"]
        recorder.say(f"{attention}, second turn: {figure}")


def _turn_figures(options: ServingOptions, attention: str) -> dict[str, Any]:
    _check(options, attention)
    rng = random.Random(0)

    async def chat(address: tuple[str, int]) -> tuple[float, float]:
        prompt = _prompt(options, rng, options.turn_tokens)
        first = await ask(address, prompt, options.new_tokens)
        second = await ask(address, [*prompt, *first.tokens, *_prompt(options, rng, 50)], options.new_tokens)
        return first.first, second.first

    async def run(address: tuple[str, int]) -> list[tuple[float, float]]:
        # The first one compiles.
        return [await chat(address) for _ in range(1 + options.repeats)][1:]

    with random_server(options, attention) as address:
        firsts, seconds = zip(*asyncio.run(run(address)), strict=True)
    first, second = statistics.median(firsts), statistics.median(seconds)
    return {"first_turn_ms": first * 1000, "second_turn_ms": second * 1000, "second_ratio": second / first}


def _bench_speculate(options: ServingOptions, recorder: Recorder) -> None:
    rng = random.Random(0)
    prompts = {"code": list(REPETITIVE.encode()), "random": [rng.randrange(256) for _ in REPETITIVE]}
    for text, prompt in prompts.items():
        labels = {"part": "speculate", "attention": "nsa", "text": text, "clients": 1}
        row = recorder.measure(labels, partial(_speculate_figures, options, prompt))
        figure = f"{row['speedup']:.2f} times as fast" if row["status"] == OK else row["status"]
        recorder.say(f"{text}, with guesses: {figure}")


def _speculate_figures(options: ServingOptions, prompt: Sequence[int]) -> dict[str, Any]:
    times = []

    async def run(address: tuple[str, int]) -> float:
        # The first one compiles.
        answers = [await ask(address, prompt, options.new_tokens, temperature=0) for _ in range(1 + options.repeats)]
        return statistics.median(sum(answer.between) for answer in answers[1:])

    for flags in ((), ("--speculate",)):
        with server(options, DEMO, *flags) as address:
            times.append(asyncio.run(run(address)))
    plain, guessed = times
    return {"plain_ms": plain * 1000, "guessed_ms": guessed * 1000, "speedup": plain / guessed}


def _check(options: ServingOptions, attention: str) -> None:
    if attention == "nsa":
        check_model_parity(options.model, options.torch_device, DTYPES[options.precision])


def _prompt(options: ServingOptions, rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(options.model.vocab_size) for _ in range(length)]


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = torch.tensor(seconds, dtype=torch.float64) * 1000
    return {f"{name}_p{percent}_ms": float(values.quantile(percent / 100)) for percent in (50, 99)}


def speedups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The sparse server's tokens a second in those of the dense one, by clients."""
    rates = {
        (row["clients"], row["attention"]): row["tokens_per_second"]
        for row in rows
        if row["part"] == "load" and row["status"] == OK
    }
    return [
        {"clients": clients, "dense_ratio": rate / rates[clients, "dense"]}
        for (clients, attention), rate in rates.items()
        if attention == "nsa" and (clients, "dense") in rates
    ]


_PARTS = {"load": _bench_load, "turns": _bench_turns, "speculate": _bench_speculate}

SERVING = Benchmark(
    "serving",
    ServingOptions,
    bench_serving,
    NOTES,
    {
        "attention": "attention", "text": "text", "clients": "clients", "prompt_tokens": "prompt",
        "requests": "requests", "tokens_per_second": "tokens/s", "first_token_p50_ms": "first p50 ms",
        "first_token_p99_ms": "first p99 ms",
        "between_tokens_p50_ms": "between p50 ms", "between_tokens_p99_ms": "between p99 ms",
        "first_turn_ms": "first turn ms", "second_turn_ms": "second turn ms", "second_ratio": "ratio",
        "plain_ms": "plain ms", "guessed_ms": "guessed ms", "speedup": "speedup", "status": "status",
    },
    tables={"times_faster": speedups},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(SERVING.main())
