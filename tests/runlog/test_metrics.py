"""One stream, one line of history."""

import pytest
import torch

from trifocal.runlog import read_metrics
from trifocal.runlog.metrics import MetricsWriter


def test_rows_carry_kind_step_and_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write("train", 1, loss=2.5)
        metrics.write("evaluation", 1, validation_loss=2.0)
        metrics.event(1, "checkpoint_saved", "saved", severity="info", directory="step_1")
    rows = read_metrics(path)
    assert [row["kind"] for row in rows] == ["train", "evaluation", "event"]
    assert all(row["step"] == 1 and row["unix_time_seconds"] > 1.7e9 for row in rows)
    assert read_metrics(path, "train")[0]["loss"] == 2.5
    assert rows[2]["name"] == "checkpoint_saved" and rows[2]["directory"] == "step_1"


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        for step in range(1, 8):
            metrics.write("train", step, loss=float(step))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "damaged\n", *lines[2:], '{"kind":"train","st']))
    with MetricsWriter(path, resume_step=4) as metrics:
        for step in range(5, 8):
            metrics.write("train", step, loss=-float(step))
    assert [row["loss"] for row in read_metrics(path, "train")] == [1, 2, 3, 4, -5, -6, -7]
    (event,) = read_metrics(path, "event")
    assert (event["name"], event["step"], event["rows_dropped"]) == ("resumed", 4, 3)


def test_a_folder_in_its_place_costs_rows_and_no_run(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    with MetricsWriter(path, resume_step=4) as metrics:
        metrics.write("train", 5, loss=1.0)
    assert f"cannot write {path}" in caplog.text and path.is_dir()


def test_a_tensor_is_the_callers_mistake(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics, pytest.raises(TypeError):
        metrics.write("train", 1, loss=torch.zeros(()))


def test_a_loss_that_is_not_finite_is_kept_as_such(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write("train", 1, loss=float("nan"), gradient_norm=float("inf"))
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["loss"] != row["loss"] and row["gradient_norm"] == float("inf")
