"""The charts of `trifocal evaluate`: their figures, and that a browser draws them."""

import itertools
import json
import math

import pytest

from tests.written_runs import write_run
from trifocal.evaluation import record
from trifocal.report.evaluation_charts import evaluation_charts
from trifocal.report.tables import key_figures
from trifocal.runlog.run import read_run


def write_evaluation(run, step, **changes):
    """An evaluation with every task; the further back, the less is found."""
    common = {"source": "builtin", "status": "ok", **changes}
    rows = [{"task": "loss", "length": 256, "loss": 1.5, "bits_per_byte": 2.1, **common}]
    edges = [0, 8, 16, 32, 64, 128, 256]
    for first, end in itertools.pairwise(edges):
        figures = {"first": first, "end": end, "targets": 100, "loss": 2 - 0.1 * end**0.3}
        rows.append({"task": "position", "length": 256, **figures, **common})
        rows.append(
            {"task": "recall_distance", "length": 256, "pairs": 16, **figures, "accuracy": 1 - first / 256, **common}
        )
    for length in (64, 256):
        for depth in (0.0, 0.5, 1.0):
            figures = {"depth": depth, "samples": 8, "accuracy": depth}
            rows.append({"task": "needle", "length": length, **figures, **common})
    for pairs in (8, 16):
        rows.append({"task": "recall", "length": 256, "pairs": pairs, "accuracy": 8 / pairs, **common})
    rows.append({"task": "needle", "length": 1024, "source": "builtin", "status": "not run: no memory"})
    path = run / "evaluation" / f"step_{step:08d}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"step": step, "rows": rows}))
    return path


def test_the_last_evaluation_is_shown(tmp_path):
    run = write_run(tmp_path / "run", steps=20)
    assert evaluation_charts([read_run(run)]) == []
    write_evaluation(run, 10, source="earlier")
    write_evaluation(run, 20)
    charts = {chart.key: chart for chart in evaluation_charts([read_run(run)])}
    assert list(charts) == ["position", "needle-0", "recall_pairs", "recall_distance"]
    (line,) = charts["position"].traces
    assert line["x"] == [8, 16, 32, 64, 128, 256] and line["y"][0] == pytest.approx(2 - 0.1 * 8**0.3, abs=1e-5)
    assert line["text"][1] == f"8 to 15: {2 - 0.1 * 16**0.3:.4f} (100 targets)"
    (heat,) = charts["needle-0"].traces
    assert heat["x"] == ["64", "256"], "a length that was not run is no column"
    assert heat["y"] == ["0%", "50%", "100%"] and heat["z"] == [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]
    assert charts["recall_pairs"].traces[0]["y"] == [1.0, 0.5]
    assert charts["recall_distance"].traces[0]["x"][:2] == ["0-7", "8-15"]


def test_needles_of_two_sources_are_not_mixed(tmp_path):
    run = write_run(tmp_path / "run", steps=20)
    path = write_evaluation(run, 20)
    content = json.loads(path.read_text())
    other = [
        row | {"source": "needle:3", "needles": 3, "accuracy": 1.0}
        for row in content["rows"]
        if row.get("depth") == 0.5
    ]
    path.write_text(json.dumps(content | {"rows": content["rows"] + other}))
    charts = {chart.key: chart for chart in evaluation_charts([read_run(run)])}
    (heat,) = charts["needle-0"].traces
    assert heat["y"] == ["50%"] and heat["z"] == [[1.0, 1.0]]


def test_runs_are_compared_in_one_chart(tmp_path):
    runs = [write_run(tmp_path / name, steps=20) for name in ("sparse", "dense", "other")]
    for run in runs[:2]:
        write_evaluation(run, 20)
    charts = {chart.key: chart for chart in evaluation_charts([read_run(run) for run in runs])}
    assert [trace["name"] for trace in charts["position"].traces] == ["sparse", "dense"]
    assert {trace["line"]["color"] for trace in charts["position"].traces} == {"@run0", "@run1"}
    assert {key for key in charts if key.startswith("needle")} == {"needle-0", "needle-1"}


def test_the_model_beside_is_drawn_beside(tmp_path):
    run = write_run(tmp_path / "sparse")
    path = write_evaluation(run, 20)
    content = json.loads(path.read_text())
    for row in content["rows"]:
        if row["task"] in ("loss", "position"):
            row |= {"beside_loss": row["loss"] - 0.1, "divergence": 0.05, "agreement": 0.9}
    path.write_text(json.dumps(content | {"beside": "models/SmolLM2"}))
    read = read_run(run)
    [chart] = [chart for chart in evaluation_charts([read]) if chart.key == "position"]
    assert [trace["name"] for trace in chart.traces] == ["256 tokens", "256 tokens, SmolLM2"]
    own, beside = (trace["y"] for trace in chart.traces)
    assert [round(a - b, 6) for a, b in zip(own, beside, strict=True)] == [0.1] * 6
    figures = key_figures(read)
    assert figures["loss, beside SmolLM2"] == "1.5000, 1.4000" and figures["same likeliest token"] == "90.00%"
    assert figures["divergence from it"] == "0.0500"
    # The model beside is broken.
    path.write_text(json.dumps(content | {"rows": [row | {"beside_loss": math.nan} for row in content["rows"]]}))
    broken = read_run(run)
    assert "same likeliest token" not in key_figures(broken)
    assert [len(chart.traces) for chart in evaluation_charts([broken]) if chart.key == "position"] == [1]
    path.write_text(json.dumps(content | {"beside": "models/SmolLM2"}))
    # Positions measured again beside another model, then a needle beside none: each figure keeps its name.
    rows = {task: [row for row in content["rows"] if row["task"] == task] for task in ("position", "needle")}
    record.write_evaluation(run, content | {"beside": "models/other"}, rows["position"])
    record.write_evaluation(run, content | {"beside": ""}, rows["needle"])
    read = read_run(run)
    [chart] = [chart for chart in evaluation_charts([read]) if chart.key == "position"]
    assert [trace["name"] for trace in chart.traces] == ["256 tokens", "256 tokens, other"]
    assert key_figures(read)["loss, beside SmolLM2"] == "1.5000, 1.4000"


def test_each_source_has_its_line_and_its_figures(tmp_path):
    run = write_run(tmp_path / "sparse")
    path = write_evaluation(run, 20)
    content = json.loads(path.read_text())
    rows = [row for row in content["rows"] if row["task"] in ("loss", "position")]
    for row in rows:
        row |= {"beside_loss": row["loss"] - 0.1, "divergence": 0.05, "agreement": 0.9}
    others = [row | {"source": "text:b", "loss": row["loss"] + 1, "divergence": 0.02} for row in rows]
    path.write_text(json.dumps(content | {"beside": "models/SmolLM2", "rows": content["rows"] + others}))
    read = read_run(run)
    [chart] = [chart for chart in evaluation_charts([read]) if chart.key == "position"]
    names = ["256 tokens, builtin", "256 tokens, text:b"]
    assert [trace["name"] for trace in chart.traces] == [name + end for name in names for end in ("", ", SmolLM2")]
    assert all(len(trace["x"]) == 6 for trace in chart.traces)
    figures = key_figures(read)
    assert figures["divergence from it, builtin"] == "0.0500" and figures["divergence from it, text:b"] == "0.0200"
    # Of several runs, each line begins with the name of its run.
    [chart] = [chart for chart in evaluation_charts([read, read]) if chart.key == "position"]
    assert chart.traces[0]["name"] == "sparse, builtin"


def test_recall_of_the_choice_is_drawn_by_layer_and_source(tmp_path):
    run = write_run(tmp_path / "sparse")
    path = write_evaluation(run, 20)
    content = json.loads(path.read_text())
    for source in ("text:a", "text:b"):
        figures = {"task": "choice", "length": 256, "recall_by_chance": 0.4, "source": source, "status": "ok"}
        content["rows"] += [figures | {"layer": layer, "recall": 0.9 + layer / 100} for layer in (0, 3)]
    path.write_text(json.dumps(content))
    [chart] = [chart for chart in evaluation_charts([read_run(run)]) if chart.key == "choice"]
    names = ["256 tokens, text:a", "256 tokens, text:b"]
    assert [trace["name"] for trace in chart.traces[::2]] == names
    assert [(trace["x"], trace["y"]) for trace in chart.traces[:2]] == [([0, 3], [0.9, 0.93]), ([0, 3], [0.4, 0.4])]


def test_a_file_that_is_no_evaluation_is_left_out_and_said(tmp_path):
    run = write_run(tmp_path / "run", steps=20)
    for content in ("", "[]", '{"rows": [3]}', '{"rows": [{"task": "loss"}]}', "{"):
        write_evaluation(run, 20).write_text(content)
        read = read_run(run)
        assert read.evaluations == [] and "evaluation/step_00000020.json" in " ".join(read.left_out_notes())
    path = write_evaluation(run, 20)
    path.write_text(path.read_text().replace("1.5", "NaN", 1))
    (evaluation,) = read_run(run).evaluations
    assert "loss" not in evaluation["rows"][0]


@pytest.mark.parametrize("wrong", [None, True, "x", [[1]]], ids=str)
def test_values_of_wrong_types_are_not_drawn(tmp_path, wrong):
    run = write_run(tmp_path / "run", steps=20)
    path = write_evaluation(run, 20)
    content = json.loads(path.read_text())
    names = {name for row in content["rows"] for name in row}
    assert len(names) >= 12
    for name in names:
        rows = [{**row, name: wrong} if name in row else row for row in content["rows"]]
        path.write_text(json.dumps({**content, "rows": rows}))
        evaluation_charts([read_run(run)])
