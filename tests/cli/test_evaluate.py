"""`trifocal evaluate`: its tables, its file, and what it refuses."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from tests.cli.test_commands import refused
from tests.train.tiny import make_config
from trifocal.cli import main
from trifocal.cli.evaluate import _tables
from trifocal.evaluation import measure
from trifocal.runlog import read_metrics
from trifocal.train import load_config, train


def evaluated(capsys, *arguments):
    capsys.readouterr()
    assert main(["evaluate", *arguments]) == 0
    return capsys.readouterr().out


def test_a_run_of_text_has_loss_positions_and_needles(run, tmp_path, capsys):
    short = ("--samples", "2", "--depths", "2", "--lengths", "20,80")
    text = evaluated(capsys, str(run), *short)
    assert 'recall is left out: data.source "text:' in text and "has no keys and values to recall" in text
    assert "needle, 20 tokens: not run: a needle and its question need 64 tokens, got 20" in text
    assert re.search(r"needle: 4 haystacks of 80 tokens, about 0:\d\d left", text)
    for title in ("Loss on validation data", "Loss by position", "Needles found, by depth"):
        assert title in text
    file = run / "evaluation" / "step_00000006.json"
    assert f"written: {file}" in text and f"trifocal report {run}" in text
    content = json.loads(file.read_text())
    assert (content["step"], content["attention"], content["trained_length"]) == (6, "nsa", 32)
    rows = {task: [row for row in content["rows"] if row["task"] == task] for task in ("loss", "position", "needle")}
    known = read_metrics(run / "metrics.jsonl", "evaluation")[-1]
    assert rows["loss"][0]["loss"] == pytest.approx(known["validation_loss"], rel=1e-6)
    assert [row["first"] for row in rows["position"]] == [0, 8, 16]
    assert [(row["length"], row.get("depth")) for row in rows["needle"]] == [(20, None), (80, 0.0), (80, 1.0)]

    # A second call adds a length and keeps the rest; a checkpoint and the run's weights are the same model.
    evaluated(capsys, str(run / "checkpoints" / "step_00000006"), "--only", "position", "--sequence-length", "64")
    evaluated(capsys, str(run / "weights"), "--only", "needle", *short[:4], "--lengths=90")
    after = json.loads(file.read_text())["rows"]
    assert [row for row in after if row["length"] not in (64, 90)] == content["rows"]
    assert {row["task"] for row in after if row["length"] == 64} == {"position"}
    assert sum(row["length"] == 90 for row in after) == 2
    assert not (run / "weights" / "evaluation").exists() and not (run / "checkpoints" / "evaluation").exists()
    # The folder is the run's own: it may be replaced.
    shutil.copytree(run, tmp_path / "run")
    train(load_config(run / "config.toml", ["--run.directory", str(tmp_path / "run")]), overwrite=True)
    assert not (tmp_path / "run" / "evaluation").exists()


def test_a_run_of_a_task_is_measured_by_it(tmp_path, capsys):
    flags = ("--train.steps", "1", "--log.telemetry_interval_steps", "0")
    train(make_config(tmp_path, "--data.source", "recall:4", *flags))
    text = evaluated(capsys, str(tmp_path / "run"), "--samples", "2", "--depths", "2")
    path = tmp_path / "run" / "evaluation" / "step_00000001.json"
    rows = json.loads(path.read_text())["rows"]
    assert {"recall", "loss", "position"} <= {row["task"] for row in rows}
    assert all(row.get("bits_per_byte") is None for row in rows), "random tokens are no text"
    assert "needle is left out" in text
    assert [row["pairs"] for row in rows if row["task"] == "recall"] == [1, 2, 4]
    # What is measured again replaces its earlier figures, and the others stay.
    evaluated(capsys, str(tmp_path / "run"), "--only", "recall", "--pairs", "2", "--samples", "1")
    after = json.loads(path.read_text())["rows"]
    assert sorted(row["task"] for row in after) == sorted(row["task"] for row in rows)
    assert [row["samples"] for row in after if row["task"] == "recall"] == [2, 2, 1]


def test_what_was_measured_is_kept_when_the_rest_is_interrupted(run, tmp_path, capsys, monkeypatch):
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure_needles", interrupted)
    assert main(["evaluate", str(copy), "--sequences", "1"]) == 130
    assert "Loss on validation data" in capsys.readouterr().out
    rows = json.loads((copy / "evaluation" / "step_00000006.json").read_text())["rows"]
    assert {row["task"] for row in rows} == {"loss", "position", "choice", "choice_distance"}
    shutil.rmtree(copy / "evaluation")
    (copy / "evaluation").touch()
    message = refused(capsys, "evaluate", str(copy), "--only", "loss", "--sequences", "1")
    assert f"cannot write {copy / 'evaluation'}: File exists; name another file with --output" in message


def test_weights_without_a_run_need_to_be_told_the_data(run, tmp_path, capsys, monkeypatch):
    weights = str(shutil.copytree(run / "weights", tmp_path / "weights"))
    assert "the data of its training are not known; name some with --source" in refused(capsys, "evaluate", weights)
    source = ("--source", "synthetic")
    # The folder tells the length of its training's rows.
    text = evaluated(capsys, weights, *source, "--only", "loss", "--sequences", "2")
    assert f"of {load_config(run / 'config.toml').train.sequence_length} tokens" in text
    path = Path(weights) / "config.json"
    content = json.loads(path.read_text())
    del content["max_position_embeddings"]
    path.write_text(json.dumps(content))
    assert "give --sequence-length" in refused(capsys, "evaluate", weights, *source)
    sizes = ("--sequence-length", "16", "--sequences", "3", "--only", "loss")
    text = evaluated(capsys, weights, *source, *sizes)
    kept = "the figures are not kept: these weights belong to no run"
    assert 0 < text.find(kept) < text.index("loss: 3 sequences"), "said before the work, not after it"
    file = tmp_path / "figures" / "loss.json"
    monkeypatch.setenv("COLUMNS", "50")
    text = evaluated(capsys, weights, *source, *sizes, "--output", str(file))
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["sequences"], row["targets"], row["source"]) == (3, 48, "synthetic")
    # In few columns no figure is cut off.
    assert f"{row['loss']:.4f}" in text and f"{row['perplexity']:,.4f}" in text


@pytest.mark.parametrize("beside_run", [False, True])
def test_the_type_of_the_weights_is_that_of_the_products(run, tmp_path, capsys, monkeypatch, beside_run):
    """What is recorded is what computed, also of weights in bf16 beside a run in fp32."""
    folder = shutil.copytree(run / "weights", tmp_path / "run" / "weights")
    if beside_run:
        for name in ("config.toml", ".trifocal_run"):
            shutil.copy(run / name, tmp_path / "run" / name)
    linear, seen = torch.nn.functional.linear, set[torch.dtype]()

    def noted(*inputs):
        out = linear(*inputs)
        seen.add(out.dtype)
        return out

    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    file = tmp_path / "figures.json"
    sizes = ("--source", "synthetic", "--sequence-length", "16", "--sequences", "2", "--only", "loss")
    path = folder / "model.safetensors"
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        save_file({key: weight.to(dtype) for key, weight in load_file(path).items()}, path)
        seen.clear()
        evaluated(capsys, str(folder), *sizes, "--output", str(file))
        assert (json.loads(file.read_text())["precision"], seen) == (name, {dtype})


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--only", "needles"), "'choice', 'needle', 'recall', 'ruler', 'grade', got 'needles'"),
        (("--beside", "/nowhere"), "there is no run at /nowhere"),
        (("--validation-fraction", "1"), "--validation-fraction must lie in [0, 1), got 1"),
        (("--only", "recall"), "has no keys and values to recall"),
        (("--source", "recall:400"), "400 pairs need"),
        (("--only", "needle", "--lengths", "20"), "nothing was measured, for the reasons above; give other --lengths"),
    ],
)
def test_bad_input_is_refused(run, capsys, arguments, message):
    assert message in refused(capsys, "evaluate", str(run), *arguments)


@pytest.mark.parametrize("width", range(80, 140, 4))
def test_no_head_is_cut_off_in_a_terminal_of_any_width(width):
    heads = "sequences", "targets", "perplexity", "bits_per_token", "beside_loss", "divergence", "agreement", "rows"
    row = {"task": "loss", "status": "ok", "length": 128, "source": "a", **dict.fromkeys(heads, 1.0)}
    console = Console(width=width, file=io.StringIO())
    names = "first", "end", "targets", "loss", "beside_loss", "divergence", "agreement"
    figures = dict.fromkeys(names, 14.1234) | {"first": 4096, "end": 8192, "targets": 189_116}
    position = {"task": "position", "status": "ok", "length": 8192, "source": "a", **figures}
    console.print(*_tables([row, *[position] * 11], console))
    assert "…" not in console.file.getvalue()


def test_broken_weights_are_refused(run, tmp_path, capsys):
    weights = shutil.copytree(run / "weights", tmp_path / "weights")
    tensors = {
        name: torch.full_like(value, torch.nan) for name, value in load_file(weights / "model.safetensors").items()
    }
    save_file(tensors, weights / "model.safetensors", metadata={"format": "pt"})
    arguments = (str(weights), "--source", "synthetic", "--sequence-length", "16", "--sequences", "1")
    assert "output is not finite" in refused(capsys, "evaluate", *arguments)
