"""`benchmarks/real_model.py` with a tiny model: every kind of row, and a second call that finds all done."""

import json

import pytest

from tests.children import load_script
from tests.train.tiny import write_documents, write_model
from trifocal.cli import sparsify
from trifocal.doctor.measured import Need
from trifocal.runlog.run import read_run

real_model = load_script("benchmarks/real_model.py")
SIZES = "--steps 2 --index-steps 2 --batch 1 --length 64 --blocks 4 --block-size 8 --sequences 2 --held-out 0.3 --plain"
BLOCKS = "compression-block-size=4 compression-stride=2 selection-block-size=8 num-initial-blocks=0"
ROWS = ["dense", "n = 32", "text", "window"]


def test_every_kind_of_row_is_made_once(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    need = Need(name="", parameters=1, state_bytes=1, disk_bytes=1, step_seconds=0.1)
    monkeypatch.setattr(sparsify, "need_of", lambda name, config: need)
    monkeypatch.setattr(real_model, "_NEW_TOKENS", 2)
    dense = write_model(tmp_path / "dense", longest=64, num_heads=2)
    data = f"text:{write_documents(tmp_path / 'text')}"
    words = [str(dense), str(tmp_path / "out"), "--data", data, *SIZES.split(), "--geometry", *BLOCKS.split()]
    words += ["--rows", *ROWS, "--results", str(tmp_path / "results"), "--device", "cpu"]
    words += ["--ruler-tasks", "fwe", "--ruler-lengths", "700", "--samples", "1"]

    # A call that ends between the two trainings of a row; the next one goes on with the index that was taught.
    def ended(*words):
        if "--train.only" not in words and str(tmp_path / "out" / "text" / "trained") in words:
            raise SystemExit(1)
        run(*words)

    run = real_model._run
    monkeypatch.setattr(real_model, "_run", ended)
    with pytest.raises(SystemExit):
        real_model.main_script(words)
    monkeypatch.setattr(real_model, "_run", run)
    rows = json.loads(real_model.main_script(words).with_suffix(".json").read_text())["rows"]
    assert [row["row"] for row in rows] == ROWS
    assert read_run(tmp_path / "out" / "text" / "trained").config["model"]["from"].endswith("/text/index")
    assert rows[0]["above_dense"] == 0 and rows[0]["agreement"] == 1
    for row in rows:
        assert {"loss", "loss_to_64", "divergence", "token_ms", "prefill_tokens_per_second"} <= row.keys()
        assert row["ruler_700"] == 0
    assert 0 < rows[1]["recall_worst"] <= rows[1]["recall_best"] <= 1.01

    def refuse(*words):
        raise AssertionError(words)

    monkeypatch.setattr(real_model, "main", refuse)
    again = json.loads(real_model.main_script(words).with_suffix(".json").read_text())["rows"]
    assert again == rows
    # Without time for more, what is known is in the table.
    later = real_model.main_script([*words, "--minutes", "-1", "--rows", *ROWS, "mix"]).with_suffix(".json")
    assert json.loads(later.read_text())["rows"][-1]["row"] == "mix"
