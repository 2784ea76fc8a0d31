"""The runner, the report and the command around the checks."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests import warm
from tests.children import environment, wait_for_end
from tests.written_runs import wait_for
from trifocal.checks import registry
from trifocal.checks.measurement import Measurement, Skipped
from trifocal.cli import main

CPU = torch.device("cpu")


def check(name, measure):
    return registry.Check(name, (1, 8), "is for a test", measure)


def raising(_device):
    raise RuntimeError("out of\nluck")


PASSING = check("passing", lambda _: Measurement(0.5, 1.0, "s", ("fine",)))
FAILING = check("failing", lambda _: Measurement(2.0, 1.0, "s", ("half of it", "the other half")))
SKIPPING = check("skipping", lambda _: Skipped("no such device"))
RAISING = check("raising", raising)


@pytest.fixture
def four_checks(monkeypatch):
    monkeypatch.setattr(registry, "CHECKS", (PASSING, FAILING, SKIPPING, RAISING))


@pytest.mark.parametrize(
    ("figure", "passed"), [(1.0, True), (1.1, False), (-5.0, True), (float("nan"), False), (float("-inf"), False)]
)
def test_what_passes(figure, passed):
    assert Measurement(figure, 1.0, "").passed is passed


@pytest.mark.usefixtures("four_checks")
def test_all_run_whatever_happens_to_one():
    report = registry.Report(CPU, tuple(registry.run_check(check, CPU) for check in registry.chosen_checks(())))
    assert [result.status for result in report.results] == ["passed", "failed", "skipped", "failed"]
    assert report.results[3].details == ("RuntimeError: out of luck",)
    assert report.exit_status == 1
    assert report.summary().startswith("1 passed, 2 failed, 1 skipped in ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(capsys):
    assert main(["check", "--device", "cuda"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_random_generators_are_left_as_they_were():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    registry.run_check(check("drawing", lambda _: Measurement(float(torch.rand(())), 2.0, "")), CPU)
    assert torch.equal(torch.rand(3), expected)


def test_json_takes_figures_that_are_not_finite():
    result = registry.run_check(check("endless", lambda _: Measurement(float("inf"), 1.0, "")), CPU)
    assert json.loads(registry.Report(CPU, (result,)).to_json())["results"][0]["figure"] == "inf"


@pytest.mark.usefixtures("four_checks")
def test_command(capsys, tmp_path):
    assert main(["check", "--device", "cpu", "--only", "skipping,passing", "--json", str(tmp_path / "c.json")]) == 0
    out = capsys.readouterr().out
    assert "[1/2] passing: is for a test (guards 1, 8)" in out
    assert "  passed in 0.0 s: 0.5 s, at most 1\n    fine" in out
    assert "  skipped in 0.0 s\n    no such device" in out
    assert "1 passed, 0 failed, 1 skipped in 0 s on cpu" in out
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["exit_status"] == 0 and content["environment"]["packages"]["numpy"] == np.__version__
    names = ("name", "guards", "status", "figure", "bound", "unit", "details")
    assert [content["results"][0][key] for key in names] == ["passing", [1, 8], "passed", 0.5, 1.0, "s", ["fine"]]
    assert main(["check", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "half of it" in out and out.endswith("failed: failing\nfailed: raising\n")


def test_a_check_that_is_not_there_is_refused(capsys):
    assert main(["check", "--only", "rope-distence"]) == 2
    message = 'trifocal: unknown check "rope-distence"; the nearest valid one is "rope-distance"\n'
    assert capsys.readouterr().err == message


def test_sigterm_leaves_no_folder(tmp_path):
    """Also while a check trains: the trainer takes signals for itself."""
    code = f"""
import sys, tempfile
from trifocal.cli import main
tempfile.tempdir = {str(tmp_path)!r}
sys.exit(main(["check", "--device", "cpu", "--only", "random-token-floor"]))
"""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = warm.popen([sys.executable, "-c", code], env=environment(), **quiet)
    wait_for(lambda: [*tmp_path.glob("trifocal-check-*/run/metrics.jsonl")] or process.poll() is not None, 240)
    process.send_signal(signal.SIGTERM)
    assert wait_for_end(process, 100) in (130, 143)
    assert not list(tmp_path.glob("trifocal-check-*"))
