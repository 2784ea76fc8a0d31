"""The rows of `benchmarks/scale.py`, from the files of a run."""

import argparse

import pytest

from tests.children import load_script
from tests.train.tiny import make_config
from trifocal.train import train

scale = load_script("benchmarks/scale.py")
OPTIONS = argparse.Namespace(device="cpu", gpus=[1], steps=100, tiny=True, set=["data.streams=4"])


def test_the_figures_of_a_run_are_those_of_its_files(tmp_path):
    train(make_config(tmp_path, "--evaluate.interval_steps", "0"))
    found = scale.figures(tmp_path / "run", 4 * 32)
    assert found["outcome"] == "ended" and found["steps"] == 6
    assert found["tokens_per_second"] == pytest.approx(4 * 32 / found["step_ms"] * 1000)
    assert found["checkpoint_blocked_seconds"] > 0 and len(found["rows_step_ms"]) == 6
    assert scale.figures(tmp_path / "none", 1) == {"outcome": "failed: no checkpoint"}
