"""The page about diagnostics names every field, phase, alarm and threshold that the code has, and no other."""

import inspect
import os
import re
from pathlib import Path

import pytest
import torch

from tests.docs.pages import ROOT, text_of
from tests.train.tiny import make_config
from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import Geometry
from trifocal.runlog import Heartbeat, heartbeat, metrics, read_metrics, verdict
from trifocal.runlog.heartbeat import PHASES
from trifocal.telemetry import AttentionTelemetry, attention_picture
from trifocal.telemetry import attention_telemetry as telemetry
from trifocal.telemetry import statistics as attention_statistics
from trifocal.train import coordinator, train

PAGE = text_of(ROOT / "docs/diagnostics.md")

WORDS = {2.0: "twice", 0.1: "tenth"}


def table(heading: str) -> dict[str, str]:
    """Names and meanings of the table whose head begins with this word; a row may name several."""
    body = PAGE[re.search(rf"^\| {heading} \|", PAGE, re.MULTILINE).end() :].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ", 1) for line in body.splitlines()[2:]]
    return {name: meaning for names, meaning in rows for name in re.findall(r"`(\w+)`", names)}


def tables_of_fields() -> list[set[str]]:
    parts = re.split(r"^\| field \|", PAGE, flags=re.MULTILINE)[1:]
    firsts = [[line.split(" | ")[0] for line in part.split("\n\n")[0].splitlines()[2:]] for part in parts]
    return [{name for cell in cells for name in re.findall(r"`(\w+)`", cell)} for cells in firsts]


@pytest.fixture(scope="module")
def rows():
    geometry = Geometry(8, 4, 8, 4, 1, 2, 16)
    sizes = {"vocab_size": 64, "dim": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 64}
    model = DecoderLM(ModelConfig(**sizes, head_dim=8, value_dim=8, geometry=geometry))
    model.init_weights(0)
    return AttentionTelemetry(model).measure(torch.arange(100)[None] % 64)


def test_every_field_of_the_heartbeat_and_of_telemetry_is_explained(rows):
    heartbeat, attention = tables_of_fields()
    assert heartbeat == set(Heartbeat(Path(os.devnull)).snapshot())
    assert attention == set(rows[0])


def test_every_phase_is_explained():
    assert set(table("phase")) == set(PHASES)


def test_arrays_of_the_picture_are_those_of_its_module():
    module = dict(re.findall(r"^\| (\w+) \| (\w+), ", attention_picture.__doc__, re.MULTILINE))
    page = {name: meaning.partition(",")[0] for name, meaning in table("array").items()}
    assert page == module
    assert set(page) == {"header", *attention_picture._ARRAYS}


def test_alarms_and_their_thresholds():
    alarms = table("event \\| threshold")
    names = re.findall(r"^\| (gate_\w+|choices_\w+) \|", telemetry.__doc__, re.MULTILINE)
    assert set(alarms) == set(names)
    assert f"below {telemetry.CLOSED_GATE} " in alarms["gate_closed"]
    assert f"below {telemetry.SATURATED_ENTROPY} nats" in alarms["gate_saturated"]
    assert f"more than {telemetry.LOCAL_SHARE:.0%}".replace("%", " %") in alarms["choices_local"]
    assert f"below {attention_statistics.IGNORED_GATE} " in PAGE


def test_every_event_is_explained_and_its_threshold_is_that_of_the_code():
    calls = r"(?:_log_event|_event|_report|say|event)\(\s*(?:[\w.]+,\s*)?\"(\w+)\""
    code = "".join(
        path.read_text()
        for package in ("train", "runlog", "telemetry", "report")
        for path in ROOT.glob(f"src/trifocal/{package}/**/*.py")
    )
    names = set(re.findall(calls, code))
    explained = {name: line for line in events_table() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert set(explained) == names and len(names) > 12
    factor, seconds, rows = coordinator.SLOW_FACTOR, coordinator.SLOW_SECONDS, coordinator.SLOW_LOOKS
    slow = f"{factor:.0f} times as long .* {seconds} s longer, at {rows} rows"
    assert re.search(slow, explained["rank_slow"])


def events_table() -> list[str]:
    return PAGE[PAGE.index("| event | severity |") :].split("\n\n")[0].splitlines()[2:]


def test_the_metrics_of_a_run_are_those_of_the_page_and_of_their_module(tmp_path):
    run = train(make_config(tmp_path, "--train.steps", "1", "--log.sample_tokens", "2")).directory
    page = text_of(ROOT / "docs/training.md")
    explained: dict[str, set[str]] = {}
    kind = ""
    for line in page[page.index("| kind | field |") :].split("\n\n")[0].splitlines()[2:]:
        first, fields, *_ = line.strip("|").split(" | ")
        kind = first.strip(" `|") or kind
        explained.setdefault(kind, set()).update(re.findall(r"`(\w+)`", fields))
    documented = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", metrics.__doc__, re.MULTILINE))
    gpu_only = {"executed_mfu", "dense_equivalent_mfu"}
    for kind in ("train", "evaluation"):
        row = read_metrics(run / "metrics.jsonl", kind)[-1]
        fields = set(row) - {"kind", "step", "unix_time_seconds"} | (gpu_only if kind == "train" else set())
        assert explained[kind] == fields
        assert set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", documented[kind]))) == fields


def test_verdicts_and_their_thresholds():
    body = PAGE[PAGE.index("| verdict |") :].split("\n\n")[0]
    assert f"{verdict.SLOW_FACTOR:.0f} times its median and {verdict.SLOW_SECONDS:.0f} s longer" in body
    lately = f"its last {heartbeat._RECENT_TIMES} times were {WORDS[verdict.RECENT_SLOW_FACTOR]} the median"
    assert lately in body and f"a {WORDS[verdict.RECENT_SLOW_SHARE_OF_STEP]} of a step" in body
    assert f"rows are {verdict.LATE_INTERVALS:.0f} intervals late" in body
    assert f"no row for {verdict.SILENT_INTERVALS:.0f} intervals and {verdict.SILENT_SECONDS:.0f} s" in body
    assert set(re.findall(r"^\| (\w+)(?:, (\w+))? \|", body, re.MULTILINE)) >= {("slow", ""), ("finished", "failed")}


def test_the_limit_of_a_stall():
    defaults = {name: parameter.default for name, parameter in inspect.signature(Heartbeat).parameters.items()}
    meaning = PAGE[PAGE.index("| `stall_limit_seconds` |") :].partition("\n")[0]
    assert f"{heartbeat.STALL_FACTOR:.0f} times its median" in meaning
    assert f"{defaults['minimum_stall_seconds']:.0f} s at least" in meaning
    assert f"last {heartbeat._TYPICAL_TIMES} times" in PAGE


def test_the_screenshot_is_small():
    assert (ROOT / "docs/figures/report.png").stat().st_size < 200_000
