"""`trifocal bench decode` on a CPU."""

from dataclasses import replace

import pytest

from tests.bench.tiny import MODEL
from trifocal.bench import decoding_speed as decode
from trifocal.bench.decoding_speed import DecodeOptions, bench_decode, work_per_step
from trifocal.bench.recorder import Recorder, Refused
from trifocal.errors import UserError

OPTIONS = DecodeOptions(
    contexts=(5, 40), new_tokens=3, batch=2, model=MODEL, precision="fp32", prefill_chunk_size=16, device="cpu"
)


def test_rows_of_both_twins():
    recorder = Recorder(60, lambda text: None, lambda: None)
    bench_decode(OPTIONS, recorder)
    rows = recorder.rows
    assert [(row["attention"], row["context_tokens"], row["status"]) for row in rows] == [
        ("nsa", 5, "ok"), ("nsa", 40, "ok"), ("dense", 5, "ok"), ("dense", 40, "ok"),
    ]  # fmt: skip
    for row in rows:
        assert 0 < row["token_p20_ms"] <= row["token_ms"] <= row["token_p80_ms"] and row["tokens_timed"] == 3
    assert rows[1]["keys_per_step"] == MODEL.geometry.keys_read_per_step(40) and rows[3]["keys_per_step"] == 41


def test_work_is_counted():
    work = work_per_step(replace(MODEL, attention="dense"), OPTIONS, 40)
    # Batch, layers, keys, groups, D + V, bytes.
    assert work["cache_mib"] * 2**20 == 2 * 2 * 41 * 2 * 16 * 4
    layer = 16 * 4 * 8 * 2 + 16 * 2 * 16 + 3 * 16 * 16 + 2 * 16
    weights = 2 * layer + 16 + 16 * 32
    assert work["gflop"] * 1e9 == 2 * (2 * weights + 2 * 2 * 4 * 16 * 41)


def test_wrong_results_are_not_timed(monkeypatch):
    def refuse(*args):
        raise Refused("o is off")

    monkeypatch.setattr(decode, "check_model_parity", refuse)
    recorder = Recorder(60, lambda text: None, lambda: None)
    bench_decode(OPTIONS, recorder)
    assert [row["status"] for row in recorder.rows] == ["refused: o is off"] * 2 + ["ok"] * 2


def test_bad_options_are_refused():
    for changes in ({"new_tokens": 0}, {"contexts": (0,)}, {"seconds": 0.0}):
        with pytest.raises(UserError, match=next(iter(changes)).replace("_", "-")):
            DecodeOptions(**changes)
    with pytest.raises(UserError, match="--attention"):
        DecodeOptions(model=replace(MODEL, attention="dense"))
