"""The script that times transformers' Trainer beside our own: the same documents in both, and a row for each."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.children import load_script


def test_rows_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("benchmarks/finetune_speed.py")
    arguments = ["--config", "minimal.toml", "--sequences", "1", "2", "--tokens", "128", "--warmup", "1"]
    arguments += [
        "--steps",
        "1",
        "--no-compile",
        "--output",
        str(tmp_path),
        "--model.num_layers",
        "1",
        "--model.dim",
        "32",
    ]
    monkeypatch.setattr(sys, "argv", ["finetune_speed.py", *arguments])
    assert script.main() == 0
    [path] = tmp_path.glob("finetune_speed_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["trainer"], row["sequences"]) for row in rows] == [
        (trainer, sequences) for sequences in (1, 2) for trainer in ("trifocal", "transformers.Trainer")
    ]
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert ours["share_of_trifocal"] == 1.0 and theirs["share_of_trifocal"] > 0
