"""The script that converts a dense run and trains it on: every model is measured on the same text, once."""

import json
import sys
from pathlib import Path

import pytest

from tests.children import load_script
from tests.train.tiny import write_config
from trifocal.cli import main
from trifocal.train.run_folder import load_run

SMALL = ["--geometry.compression_block_size", "4", "--geometry.compression_stride", "2"]
SMALL += ["--geometry.selection_block_size", "8", "--geometry.num_selected_blocks", "3"]
MODELS = ["dense", "dense, trained on"]
MODELS += [f"{target}, {state}" for target in ("selected", "nsa") for state in ("converted", "trained on")]


def test_models_are_converted_trained_on_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("benchmarks/convert_quality.py")
    commands = []

    def command(*arguments: str) -> None:
        commands.append(arguments[0])
        assert main(arguments) == 0

    monkeypatch.setattr(script, "command", command)
    dense, directory, results = tmp_path / "run", tmp_path / "converted", tmp_path / "results"
    assert main(["train", str(write_config(tmp_path)), "--model.attention", "dense", "--train.steps", "3"]) == 0
    arguments = [str(dense), "--directory", str(directory), "--lengths", "16", "32", "--share", "0.34", *SMALL]
    # So small a learning rate leaves models as they are.
    arguments += ["--output", str(results), "--optimizer.learning_rate", "1e-30"]
    monkeypatch.setattr(sys, "argv", ["convert_quality.py", *arguments])
    assert script.main() == 0
    [path] = results.glob("convert_quality_*.json")
    rows = json.loads(path.read_text())["rows"]
    loss = {(row["model"], row["length"]): row["loss"] for row in rows}
    assert sorted(loss) == sorted((name, length) for name in MODELS for length in (16, 32))
    for length in (16, 32):
        assert loss["dense, trained on", length] == loss["dense", length]
        assert loss["selected, trained on", length] == loss["selected, converted", length]
        assert abs(loss["nsa, converted", length] - loss["dense", length]) > 1e-6
    # Three blocks of eight tokens cover the shorter rows.
    assert abs(loss["selected, converted", 16] - loss["dense", 16]) < 1e-5
    assert all(row["above_dense_percent"] == 0 for row in rows if row["model"] == "dense")
    assert commands == ["train", "convert", "train", "convert", "train"]
    # Started again, nothing is done twice.
    assert script.main() == 0
    assert len(commands) == 5
    # Another choice of layers is another model and another result.
    others = ["--label", "hybrid", "--to", "selected", "--dense-layers", "0"]
    monkeypatch.setattr(sys, "argv", ["convert_quality.py", *arguments, *others])
    assert script.main() == 0
    assert commands[5:] == ["convert", "train"] and len(list(results.glob("convert_quality_hybrid_*.json"))) == 1
    assert (directory / "selected-hybrid" / "config.toml").is_file()
    # The layer that costs the most stays dense: so the model is at least as near to the dense one as with the other.
    kept = ["--label", "kept", "--to", "selected", "--keep-dense", "1"]
    monkeypatch.setattr(sys, "argv", ["convert_quality.py", *arguments, *kept])
    assert script.main() == 0
    [path] = results.glob("convert_quality_kept_*.json")
    costs = {row["layer"]: row["above_dense"] for row in json.loads(path.read_text())["one_layer_converted"]}
    worst = max(costs, key=lambda layer: costs[layer])
    types = load_run(directory / "selected-kept").model.attention_of_layers
    assert sorted(costs) == list(range(len(types))) and any(costs.values())
    assert [layer for layer, kind in enumerate(types) if kind == "dense"] == [worst]
