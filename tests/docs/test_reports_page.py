"""The page about the five reports: a run writes every file and field that it names."""

import re

from tests.docs.pages import ROOT, text_of
from tests.train.tiny import make_config
from trifocal.runlog import read_metrics
from trifocal.runlog.run import read_run
from trifocal.train import train

PAGE = text_of(ROOT / "docs/reports.md")


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
