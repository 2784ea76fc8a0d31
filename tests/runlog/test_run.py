"""Damaged rows and files: `watch` and `report` show the rest, and say how much is left out."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from trifocal.errors import UserError
from trifocal.report import write_report
from trifocal.report.live_view import render
from trifocal.runlog import read_metrics
from trifocal.runlog import run as run_module
from trifocal.runlog.run import read_run

DEEP = "[" * 100_000


def shown(run):
    console = Console(file=io.StringIO(), width=120)
    console.print(render(read_run(run, live=True)))
    return console.file.getvalue()


def test_damaged_lines_are_left_out_and_counted(make_run):
    run = make_run(steps=200)
    whole = len(read_run(run).rows)
    with (run / "metrics.jsonl").open("a") as file:
        no_time, no_step = '{"kind": "train", "step": 201}', '{"kind": "mine", "step": null, "unix_time_seconds": 1.0}'
        no_words = '{"kind": "event", "step": 201, "unix_time_seconds": 1.0}'
        for line in (no_time, no_step, no_words, "[]", DEEP, "nonsense"):
            file.write(line + "\n")
    assert len(read_run(run).rows) == whole == len(read_metrics(run / "metrics.jsonl"))
    sentence = "6 damaged entries of metrics.jsonl left out"
    assert sentence in write_report(run).read_text() and sentence in shown(run)


@pytest.mark.parametrize(("limit", "live"), [("_LIVE_BYTES", True), ("_REPORT_BYTES", False)])
def test_of_a_large_log_the_end_is_read(make_run, monkeypatch, limit, live):
    run = make_run()
    rows = read_metrics(run / "metrics.jsonl")
    monkeypatch.setattr(run_module, limit, 3000)
    found = read_run(run, live=live).rows
    assert found == rows[-len(found) :] and 0 < len(found) < len(rows)


def test_a_damaged_file_is_left_out_of_the_report(make_run):
    run = make_run(steps=200, gpu=True)
    (run / "evaluation").mkdir()
    for file, content in (
        ("env.json", '{"trifocal": [1]}'),
        ("env.json", '{"gpus": [1]}'),
        ("env.json", '{"gpus": [{}]}'),
        ("evaluation/step_1.json", '{"rows": 5}'),
        ("heartbeat/rank1.jsonl", '{"rank": 1}\n'),
    ):
        (run / file).write_text(content)
        assert f"1 damaged entry of {file} left out" in read_run(run).left_out_notes()
    assert "1 damaged entry of env.json left out" in write_report(run).read_text()
    assert "finished" in shown(run)


def test_a_live_view_reads_no_samples(make_run, monkeypatch):
    """They may be large; nothing of the environment, the pictures and the evaluations is shown either."""
    run = make_run(steps=200)
    opened = []
    path_open = Path.open

    def noted(path, *args, **kwargs):
        opened.append(str(path.relative_to(run)))
        return path_open(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", noted)
    read_run(run, live=True)
    assert set(opened) == {"metrics.jsonl", "config.toml", "heartbeat/rank0.jsonl"}


@pytest.mark.parametrize(
    ("arrays", "header", "said"),
    [
        ({}, {"version": 1}, "expected version 2, got 1"),
        ({"header": np.frombuffer(DEEP.encode(), np.uint8)}, {}, "recursion"),
        ({"zeros": np.zeros(2**27, np.uint8)}, {}, "it expands to 134,"),
    ],
)
def test_a_damaged_picture_is_named_in_one_line(make_run, arrays, header, said):
    run = make_run(steps=200)
    path = run / "attention" / "step_00000200.npz"
    with np.load(path) as file:
        content = dict(file)
    header = json.loads(content["header"].tobytes()) | header
    content["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez_compressed(path, **content | arrays)
    with pytest.raises(UserError, match=r"step_00000200\.npz \(.*" + said + r".*\); remove it"):
        write_report(run)
