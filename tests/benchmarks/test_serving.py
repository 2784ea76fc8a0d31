"""`benchmarks/serving.py` on a CPU."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("openai")

from lib.recorder import Recorder
from tests.benchmarks.tiny import MODEL
from tests.children import load_script
from tests.serve.servers import serving as in_process
from trifocal.models import DecoderLM

serving = load_script("benchmarks/serving.py")


OPTIONS = serving.ServingOptions(
    attention=("nsa",), clients=(3,), requests=2, prompt_tokens=20, new_tokens=12, turn_tokens=600, repeats=1,
    prefill_chunk_size=512, model=MODEL, precision="fp32", device="cpu",
)  # fmt: skip


def test_tokens_by_their_texts():
    assert [serving._token(text) for text in ("a", "\n", "token_id:200", "<|endoftext|>")] == [97, 10, 200, 256]


def test_load_turns_and_guesses(monkeypatch):
    """On a server in this process. Of the second turn 512 of 600 tokens are found again, also before it is timed."""
    calls, reused = [], []

    @contextmanager
    def server(options, path, *given):
        calls.append((path == "demo", *given))
        model = replace(MODEL, vocab_size=257)
        with in_process(DecoderLM(model), max_length=1024, prefill_chunk_size=512, spare_rows=4) as served:
            yield "127.0.0.1", int(served.url.rpartition(":")[2])
            reused.append(served.worker.metrics.reused_tokens)

    monkeypatch.setattr(serving, "server", server)
    # Has tests of its own.
    monkeypatch.setattr(serving, "check_model_parity", lambda *args: None)
    recorder = Recorder(600, lambda text: None, lambda: None)
    serving.bench_serving(OPTIONS, recorder)
    load, turns, *speculate = recorder.rows
    assert {row["status"] for row in recorder.rows} == {"ok"}, recorder.rows
    assert calls == [(False,), (False,), *2 * [(True,), (True, "--speculate")]]
    assert turns["second_ratio"] == turns["second_turn_ms"] / turns["first_turn_ms"] and reused[1] == 2 * 512
    assert [row["text"] for row in speculate] == ["code", "random"]
    assert load["requests"] == 6 and 0 < load["first_token_p50_ms"] <= load["first_token_p99_ms"]
    assert load["tokens_per_second"] > 0 < load["between_tokens_p99_ms"]
    assert all(row["speedup"] == row["plain_ms"] / row["guessed_ms"] for row in speculate)
    dense = [{**load, "attention": "dense", "tokens_per_second": load["tokens_per_second"] / 2}]
    assert serving.speedups([load, *dense]) == [{"clients": 3, "dense_ratio": pytest.approx(2)}]
