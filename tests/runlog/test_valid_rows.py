"""Rows that lack fields, or have wrong values in them: `watch` and `report` show the others."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.written_runs import beat

from trifocal.errors import UserError
from trifocal.report import write_report
from trifocal.report.live_view import render
from trifocal.runlog.jsonl import JsonLinesWriter
from trifocal.runlog.run import read_run
from trifocal.runlog.valid_rows import valid_heartbeats, valid_metrics

MakeRun = Callable[..., Path]
MISSING = object()
STRANGE = [MISSING, None, True, "text", "", [], [1.0, "x"], {}, {"forward": "x"}, -1, -1e9, 1e308, 10**400]
STRANGE += [float("nan"), float("inf"), float("-inf")]


def spoiled(row: dict[str, Any], value: object) -> list[dict[str, Any]]:
    """Copies of a row, each with one field replaced or missing."""
    kinds = ("kind",) if "kind" in row else ()
    names = [name for name in row if name not in kinds]
    if value is MISSING:
        return [{name: row[name] for name in row if name != gone} for gone in names if gone != "step"]
    return [row | {name: value} for name in names]


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: "missing" if value is MISSING else str(value)[:12])
def test_no_metric_row_and_no_beat_ends_watch_or_report(make_run: MakeRun, value: object) -> None:
    run = make_run(steps=200, gpu=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = {row["kind"]: row for row in rows}
    with JsonLinesWriter(run / "metrics.jsonl") as writer:
        for row in last.values():
            for bad in spoiled(row, value):
                writer.append(bad)
    needed = {"unix_time_seconds", "host", "pid", "status", "step", "phase", "total_seconds"}
    for rank, name in enumerate(beat()):
        with JsonLinesWriter(run / "heartbeat" / f"rank{rank + 1}.jsonl") as writer:
            row = beat(rank=rank + 1)
            if value is not MISSING:
                writer.append(row | {name: value})
            elif name not in needed:
                writer.append({key: row[key] for key in row if key != name})
    console = Console(file=io.StringIO(), width=120)
    console.print(render(read_run(run, whole_heartbeats=False), width=120))
    assert "tokens/s" in console.file.getvalue()  # type: ignore[attr-defined]
    write_report(run)


def test_rows_that_say_nothing_are_left_out_and_counted(make_run: MakeRun) -> None:
    run = make_run(steps=200)
    whole = len(read_run(run).rows)
    with JsonLinesWriter(run / "metrics.jsonl") as writer:
        writer.append({"kind": "train", "step": 201})
        writer.append({"kind": "event", "step": 201, "unix_time_seconds": 1e9, "name": "x", "severity": "info"})
        writer.append({"kind": "train", "step": 202, "unix_time_seconds": 1e9, "loss": "low", "gradient_norm": 2.0})
    found = read_run(run)
    assert len(found.rows) == whole + 1
    assert found.rows[-1] == {"kind": "train", "step": 202, "unix_time_seconds": 1e9, "gradient_norm": 2.0}
    sentence = "2 rows of metrics.jsonl lack required fields, and are left out"
    assert found.left_out_notes() == [sentence]
    assert sentence in write_report(run).read_text()
    console = Console(file=io.StringIO(), width=120)
    console.print(render(found, width=120))
    assert sentence in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_loss_that_is_not_finite_stays_and_a_gate_does_not() -> None:
    nan = float("nan")
    (row,) = valid_metrics([{"kind": "train", "step": 1, "unix_time_seconds": 1.0, "loss": nan}])
    assert row["loss"] != row["loss"]
    (row,) = valid_metrics([{"kind": "telemetry", "step": 1, "unix_time_seconds": 1.0, "layer": 0, "gate": nan}])
    assert row["gate"] is None


def test_a_healthy_beat_is_read_as_it_is() -> None:
    row = beat()
    assert valid_heartbeats([row]) == [row]


def test_a_line_that_is_nested_too_deeply_is_named(make_run: MakeRun) -> None:
    run = make_run(steps=20)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line \d+: expected a JSON object"):
        read_run(run)
