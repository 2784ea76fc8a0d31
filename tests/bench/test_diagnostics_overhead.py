"""The script that measures the diagnostics' cost runs, and its table holds what it says."""

import json
import subprocess
import sys
from pathlib import Path

from tests.children import ROOT, environment


def test_the_script_writes_its_table(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "diagnostics_overhead.py"
    tiny = ("--train.sequence_length", "32", "--data.shuffle_sequences", "8", "--log.interval_steps", "1")
    command = [sys.executable, str(script), "--pairs", "2", "--steps", "2", "--output", str(tmp_path), *tiny]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(OMP_NUM_THREADS=1), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("diagnostics_overhead_showcase_cpu_*.json")
    rows = {(row["what"], row["by"]): row for row in json.loads(file.read_text())["rows"]}
    wall, processor = rows["all but the rare", "wall clock"], rows["all but the rare", "processor time"]
    assert wall["blocks"] == processor["blocks"] == 2
    assert wall["without_ms"] > 0 and wall["quartile_low"] <= wall["difference_percent"] <= wall["quartile_high"]
    assert 0 < rows["all but the rare", "counted"]["percent"] < 100
    assert rows["telemetry", "wall clock"]["every_steps"] == 100
    assert rows["telemetry", "wall clock"]["percent"] > 0 and rows["picture", "wall clock"]["percent"] > 0
