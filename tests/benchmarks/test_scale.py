"""The rows of `benchmarks/scale.py`, from the files of a run."""

from pathlib import Path

import pytest

from tests.children import load_script
from tests.train.tiny import make_config
from trifocal.train import train

scale = load_script("benchmarks/scale.py")
ROW = scale.Row("speed", "none", 1, "none", "false", "m7c_shake.toml", {})


def test_the_figures_of_a_run_are_those_of_its_files(tmp_path: Path) -> None:
    train(make_config(tmp_path, "--evaluate.interval_steps", "0"))
    found = scale.figures(ROW, tmp_path / "run")
    assert found["outcome"] == "ended" and found["steps"] == 6
    assert found["tokens_per_second"] == pytest.approx(4 * 32 / found["step_ms"] * 1000, rel=0.5)
    assert found["host_ms"] > 0 and found["wait_ms"] == 0 and len(found["checkpoint_seconds"]) == 3
    # The production run saves every so many steps; this one waited for each of its checkpoints.
    assert 0 < found["checkpoint_share"] < 1


def test_a_run_without_a_checkpoint_has_failed(tmp_path: Path) -> None:
    assert scale.figures(ROW, tmp_path / "run") == {"outcome": "failed"}


def test_speeds_are_multiples_of_one_gpus() -> None:
    head = {"checkpointing": "all", "graphs": "false", "step_ms": 1.0}
    one = {**head, "part": "one", "gpus": 1, "tokens_per_second": 10.0}
    two = {**head, "part": "speed", "gpus": 2, "tokens_per_second": 19.0}
    failed = {"part": "speed", "checkpointing": "all", "graphs": "false", "outcome": "failed"}
    assert [found.get("times_one_gpu") for found in scale.compared([one, two, failed])] == [1.0, 1.9, None]
    assert [found.get("efficiency") for found in scale.compared([one, two, failed])] == [1.0, 0.95, None]
