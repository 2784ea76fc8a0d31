"""The acceptance run: a tiny one passes, and a run that misses a criterion fails the whole."""

import json

import pytest

from tests import warm
from tests.children import load_script
from trifocal.data.sources.builtin import BuiltinSource

pytest.importorskip("pyarrow")
acceptance = load_script("benchmarks/acceptance.py")
GOOD = {
    "data": "text", "wanted_steps": 300, "steps": 300, "peak_gib": 3.8, "tokens_per_second": 300_000.0,
    "first_batch_seconds": 0.5, "first_loss": 5.9, "last_loss": 1.8, "diagnostics": "complete",
}  # fmt: skip


class FewModules(BuiltinSource):
    """Some of the modules: to parse them all takes five seconds."""

    def __init__(self, **options):
        super().__init__(**options)
        self.shards = self.shards[:100]


def test_a_tiny_run_holds_every_criterion(tmp_path, monkeypatch):
    """Both kinds of data and of sharing, in two processes: the small part of the whole that two cores can do."""
    warm.take_the_place_of_subprocess(monkeypatch, "lib.processes")
    monkeypatch.setattr(acceptance, "BuiltinSource", FewModules)
    results = []
    for mode, checkpointing, steps in (("ddp", "all", ["2", "0"]), ("fsdp", "none", ["0", "8"])):
        arguments = ["--directory", str(tmp_path / mode), "--tiny", "--steps", *steps, "--modes", mode]
        arguments += ["--checkpointing", checkpointing, "--output", str(tmp_path / f"{mode}_result"), "--commit", "abc"]
        assert acceptance.main(arguments) == 0
        (file,) = (tmp_path / f"{mode}_result").glob("acceptance_cpu_*.json")
        results += json.loads(file.read_text())["rows"]
    assert [(row["data"], row["mode"], row["steps"], row["result"]) for row in results] == [
        ("synthetic", "ddp", 2, "passed"), ("text", "fsdp", 8, "passed"),
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        acceptance.main(["--directory", str(tmp_path / "ddp"), "--tiny"])


def test_a_missed_criterion_is_named():
    assert acceptance.missed(GOOD, 257) == []
    for change, words in (
        ({"peak_gib": 49.0}, "peak memory 49.0 GiB"),
        ({"data": "synthetic", "last_loss": 0.0001}, "loss 0.000 below the entropy 5.549"),
        ({"diagnostics": "without telemetry"}, "diagnostics without telemetry"),
    ):
        (found,) = acceptance.missed(GOOD | change, 257)
        assert words in found
