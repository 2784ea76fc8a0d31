"""Runs that begin with weights: the model is theirs, the first step starts there, and a resume does not need them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.tiny import make_config, write_config
from trifocal import load_model
from trifocal.errors import UserError
from trifocal.runlog import read_metrics
from trifocal.train import load_config, resume, train
from trifocal.train.run_folder import load_run


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps, whose model is not that of the tiny configuration."""
    folder = tmp_path_factory.mktemp("source")
    train(make_config(folder, "--train.steps", "2", "--model.mlp_dim", "24", "--model.rope_theta", "500.0"))
    return folder / "run"


def begin(folder: Path, source: Path, **changes: Any) -> Any:
    overrides = {"model.from": str(source), "train.steps": 2, **changes}
    return load_config(write_config(folder), overrides)


@pytest.mark.parametrize("part", ["", "weights", "checkpoints/step_00000002"])
def test_the_first_step_begins_with_the_weights(source: Path, tmp_path: Path, part: str) -> None:
    # So small a learning rate leaves them as they are.
    config = begin(tmp_path, source / part, **{"optimizer.learning_rate": 1e-30, "train.steps": 1})
    assert (config.model.mlp_dim, config.model.rope_theta) == (24, 500.0)
    assert config.model == load_run(source).model and config.data.tokenizer == "bytes"
    train(config)
    before, after = load_model(source).state_dict(), load_model(tmp_path / "run").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(
        "begins with the weights of" in row["message"]
        for row in read_metrics(tmp_path / "run" / "metrics.jsonl", "event")
    )


def test_a_resumed_run_does_not_read_them_again(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source / "weights", copy)
    train(begin(tmp_path, copy))
    whole = load_model(tmp_path / "run").state_dict()
    other = tmp_path / "other"
    train(begin(other, copy, **{"train.steps": 1, "schedule.warmup_steps": 0}))
    shutil.rmtree(copy)
    saved = load_run(other / "run")
    assert saved.model.from_ == str(copy)
    assert resume(other / "run", config=replace(saved, train=replace(saved.train, steps=2))).step == 2
    assert whole.keys() == load_model(other / "run").state_dict().keys()


def test_flags_go_before_the_weights_where_they_fit(source: Path, tmp_path: Path) -> None:
    changes = {"model.geometry.window_size": 4, "model.layer_types": ("nsa", "nsa"), "model.backend": "reference"}
    config = begin(tmp_path, source, **changes)
    assert (config.model.geometry.window_size, config.model.mlp_dim) == (4, 24)
    train(config)
    for name, value, message in (
        ("model.mlp_dim", 48, r"is of another model: mlp_dim is 24 there, 48 here"),
        ("model.attention", "dense", "attention is nsa there, dense here"),
        ("model.num_layers", 3, "num_layers is 2 there, 3 here"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            train(begin(tmp_path / name, source, **{name: value}))
        assert "\n" not in str(caught.value)
        assert not (tmp_path / name / "run").exists()


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no run at .*nowhere: no such folder"):
        begin(tmp_path, tmp_path / "nowhere")
