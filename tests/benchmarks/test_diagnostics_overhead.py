"""The script that measures the diagnostics' cost runs, its table holds what it says, and its method is unbiased."""

import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import warm
from tests.children import ROOT, environment, load_script, wait_for_end

SCRIPT = ROOT / "benchmarks" / "diagnostics_overhead.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/diagnostics_overhead.py")


def test_the_script_writes_its_table(tmp_path: Path) -> None:
    tiny = ("--train.sequence_length", "32", "--data.shuffle_sequences", "8")
    command = [sys.executable, str(SCRIPT), "--pairs", "8", "--steps", "2", "--output", str(tmp_path), *tiny]
    with (tmp_path / "error").open("wb") as error:
        process = warm.popen(command, env=environment(OMP_NUM_THREADS=1), stdout=subprocess.DEVNULL, stderr=error)
    assert wait_for_end(process, 120) == 0, (tmp_path / "error").read_text()
    (file,) = tmp_path.glob("diagnostics_overhead_showcase_cpu_*.json")
    rows = {(row["what"], row["by"]): row for row in json.loads(file.read_text())["rows"]}
    whole = rows["all but the rare", "processor time"]
    assert whole["pairs"] == 8 and whole["low_95"] <= whole["high_95"] and whole["step_ms"] > 0
    parts = [rows[what, "processor time"]["percent"] for what in ("step", "row", "beat")]
    assert whole["percent"] == pytest.approx(sum(parts)), "what it adds up to"
    assert rows["step", "processor time"]["pairs"] == 5 and rows["null", "processor time"]["pairs"] == 1
    telemetry, picture = rows["telemetry", "processor time"], rows["picture", "processor time"]
    assert telemetry["every_steps"] == 100 and telemetry["percent"] > 0 and picture["percent"] > 0
    whole, rest = rows["everything", "processor time"], rows["all but the rare", "processor time"]
    for column in ("percent", "low_95", "high_95"):
        assert whole[column] == pytest.approx(rest[column] + telemetry["percent"] + picture["percent"])


def test_costs_are_found_under_noise_that_is_skewed_and_wild(script: ModuleType) -> None:
    """Steps of 100 ms with pauses of up to seconds; diagnostics cost 1 ms a step, 5 a row, 20 a beat."""
    generator, order = random.Random(1), script.schedule(4000)
    costs = {"": 0.0, "step": 1e-3, "row": 6e-3, "beat": 21e-3}

    def turn(kind: str) -> tuple[str, float, float]:
        noise = generator.expovariate(1 / 5e-3) + (generator.random() < 0.05) * generator.paretovariate(1)
        return script.Turn(kind, 0.0, 0.1 + costs[kind] + noise)

    turns = [turn(kind) for _, *kinds in order for kind in kinds]
    found = script.Differences(turns, order, "processor_seconds", 1, {"row": 1 / 10, "beat": 1 / 50})
    base = sorted(found.without)[len(found.without) // 2]
    estimate, intervals = found.estimate(), found.intervals(200)
    expected = {"step": 1e-3, "row": 5e-4, "beat": 4e-4, "null": 0.0, "all but the rare": 1.9e-3}
    for what, seconds in expected.items():
        low, high = intervals[what]
        # Twice an interval's half: the seed decides within one.
        assert estimate[what] == pytest.approx(100 * seconds / base, abs=high - low), what
        assert low < estimate[what] < high
    low, high = intervals["all but the rare"]
    assert high - low < 1.0, "of 1.9"
