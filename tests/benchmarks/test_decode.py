"""`benchmarks/decoding.py` on a CPU."""

from dataclasses import replace

import pytest
import torch

from lib import decode_layer
from lib.decode_engine import DecodeOptions
from lib.plain_decoder import PlainDecoder
from lib.recorder import Recorder
from lib.shapes import DTYPES
from tests.benchmarks.tiny import MODEL
from tests.children import load_script
from trifocal.models import DecoderLM

decoding = load_script("benchmarks/decoding.py")
bench_decode, speedups = decoding.bench_decode, decoding.speedups

OPTIONS = DecodeOptions(
    sizes=("2x5", "1x40"), new_tokens=3, prefill_chunk_size=16,
    requests=5, mix_in=(2, 6), mix_out=(1, 4), max_sequences=2, row_seconds=1e-3,
    model=MODEL, precision="fp32", device="cpu",
)  # fmt: skip


def recorder():
    return Recorder(600, lambda text: None, lambda: None)


@pytest.fixture(scope="module")
def rows():
    """All rows that need no process of their own."""
    found = recorder()
    bench_decode(OPTIONS, found)
    assert {row["status"] for row in found.rows} == {"ok"}, found.rows
    return found.rows


def test_a_tokens_time_of_every_model(rows):
    model = [row for row in rows if row["part"] == "model"]
    names = ("nsa", "dense", "dense plain")
    assert [(row["attention"], row["sequences"], row["tokens"]) for row in model] == [
        *((name, 2, 5) for name in names), *((name, 1, 40) for name in names),
    ]  # fmt: skip
    for row in model:
        assert 0 < row["token_p20_ms"] <= row["token_ms"] <= row["token_p80_ms"]
    sparse = MODEL.geometry.keys_read_per_step(40)
    assert [row["keys_per_step"] for row in model[3:]] == [sparse, 41, 41]
    (small, large) = speedups(rows)
    assert (large["sequences"], large["tokens"]) == (1, 40)
    assert small["dense_plain_ratio"] == model[2]["token_ms"] / model[0]["token_ms"]


def test_the_plain_model_is_the_dense_one():
    torch.manual_seed(0)
    model = DecoderLM(replace(MODEL, attention="dense", value_dim=4))
    tokens = torch.randint(32, (2, 9))
    plain = PlainDecoder(model, 2, 9, torch.float32)
    plain.logits(tokens.flip(0))
    plain.logits(tokens)
    # Its last token again, as a step takes it.
    plain.tokens.copy_(tokens[:, -1])
    expected = model(tokens)[:, -1]
    torch.testing.assert_close(plain.logits(plain.tokens[:, None])[:, 0], expected, atol=1e-5, rtol=1e-5)
    plain.step()
    assert torch.equal(plain.tokens, expected.argmax(-1))


def test_work_is_counted():
    work = decoding.work_per_step(replace(MODEL, attention="dense"), 2, 40, DTYPES["fp32"])
    # Sequences, layers, keys, groups, D + V, bytes.
    assert work["cache_mib"] * 2**20 == 2 * 2 * 41 * 2 * 16 * 4
    layer = 16 * 4 * 8 * 2 + 16 * 2 * 16 + 3 * 16 * 16 + 2 * 16
    weights = 2 * layer + 16 + 16 * 32
    assert work["weights_mib"] * 2**20 == weights * 4
    assert work["gflop"] * 1e9 == 2 * (2 * weights + 2 * 2 * 4 * 16 * 41)
    means, index = (
        decoding.work_per_step(replace(MODEL, chooser=chooser), 2, 40, DTYPES["fp32"])
        for chooser in ("compressed", "index")
    )
    # An index key of each token, in both layers of both sequences.
    assert (index["cache_mib"] - means["cache_mib"]) * 2**20 == 2 * 2 * 41 * 64 * 4


def test_wrong_results_are_not_timed(monkeypatch):
    attend = decode_layer.decode_attention

    def wrong(*args, backend, **options):
        return attend(*args, backend=backend, **options) + (0.1 if backend == "auto" else 0.0)

    monkeypatch.setattr(decode_layer, "decode_attention", wrong)
    found = recorder()
    changes = {"parts": ("model",), "sizes": ("1x5",), "attention": ("nsa", "mix", "dense", "mix-dense")}
    bench_decode(replace(OPTIONS, **changes, model=replace(MODEL, num_layers=4)), found)
    statuses = [row["status"].partition(":")[0] for row in found.rows]
    assert statuses == ["refused", "refused", "ok", "ok", "ok"]
