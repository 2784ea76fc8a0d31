"""The page about the five reports: a run writes what it names, and its figures are those of the results."""

import json
import re

from tests.docs.pages import ROOT, text_of
from tests.train.tiny import make_config
from trifocal.runlog import read_metrics
from trifocal.runlog.run import read_run
from trifocal.train import train

PAGE = text_of(ROOT / "docs/reports.md")
RESULTS = ROOT / "benchmarks" / "results"


def table(head):
    body = PAGE[PAGE.index(f"| {head} |") :].split("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in body.splitlines()[2:]]


CODES = [code for _, here in table("there") for code in re.findall(r"`([^`]+)`", here)]


def test_a_run_writes_every_file_and_field(tmp_path):
    flags = ("--trace.what", "memory,dtypes,gradients", "--trace.steps", "1:4", "--log.telemetry_interval_steps", "2")
    run = train(make_config(tmp_path, *flags)).directory
    files = [code for code in CODES if re.search(r"\.(jsonl|json|csv)$", code)]
    assert len(files) >= 7
    for file in files:
        assert (run / file).is_file(), file
    (row, *_) = read_metrics(run / "metrics.jsonl", "telemetry")
    page, beat = text_of(ROOT / "docs/diagnostics.md"), read_run(run).heartbeats[0][-1]
    assert [name for name in (*row, *beat) if f"`{name}`" not in page] == []
    fields = [code for code in CODES if re.fullmatch(r"(selected|fewer|gate|heads)_\w+", code)]
    assert len(fields) == 6 and set(fields) <= row.keys()


def test_figures_are_those_of_the_results():
    measured = {criterion: here for criterion, _, here in table("criterion")}
    rows = json.loads((RESULTS / "scale_4_500_h200_2026-11-21.json").read_text())["rows"]
    runs = {(row["part"], row["mode"]): row for row in rows}
    for mode in ("ddp", "fsdp"):
        row = runs["speed", mode]
        assert row["outcome"] == "ended" and row["warnings"] == 0
        assert measured[f"steps without a crash, {mode.upper()}"].startswith(f"{row['steps']} of 500")
        memory = measured[f"memory of a GPU with checkpointing, {mode.upper()}"]
        assert memory == f"{row['peak_gib_a_gpu']:.2f} GiB" and row["checkpointing"] == "all"
        assert measured[f"tokens/s, {mode.upper()}"].startswith(f"{row['tokens_per_second']:,.0f} on 4 GPUs")
    assert measured["tokens/s, one GPU"] == f"{runs['one', 'none']['tokens_per_second']:,.0f}"
    production = json.loads((RESULTS / "production_h200_2026-11-22.json").read_text())
    assert "50000 steps" in production["notes"][0]
    assert "20 passed, 0 failed" in text_of(RESULTS / "check_h100_2026-11-25.md")
