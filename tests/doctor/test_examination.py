"""The whole examination and its output."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console
from tests.train.tiny import write_config

from trifocal.cli import main
from trifocal.doctor import Examination, Finding, examine, probes
from trifocal.doctor.printing import count, duration, show, size
from trifocal.runlog import hardware
from trifocal.train import load_config

COMPILE_PROBE = probes.CompileProbe


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Compiles nothing, and measures for a moment only."""
    rate = hardware.matmul_rate
    monkeypatch.setattr(probes, "CompileProbe", lambda needed: COMPILE_PROBE("pass", needed=needed))
    monkeypatch.setattr(hardware, "matmul_rate", lambda device, precision: rate(device, precision, 0.02))


def printed(examination, terminal):
    stream = io.StringIO()
    show(examination, Console(file=stream, force_terminal=terminal, width=160))
    return stream.getvalue()


def test_examine(tmp_path):
    config = load_config(write_config(tmp_path))
    told = []
    examination = examine({"tiny": config}, tmp_path, on_start=told.append)
    assert examination.exit_status == 0, examination.broken
    names = [finding.name for finding in examination.findings]
    for name in ("torch", "cpu", "compiler", "triton", "gloo", "disk", "extra data", "torch.compile", "speed"):
        assert name in names
    assert len(told) == len(set(told)) > 5
    [need] = examination.needs
    assert need.fits and need.step_seconds

    values = json.loads(json.dumps(examination.to_dict()))
    assert values["healthy"] is True and values["needs"][0]["memory_bytes"] == need.memory.total


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_printed(tmp_path, terminal):
    config = load_config(write_config(tmp_path))
    found = examine({"tiny": config}, tmp_path)
    broken = Finding("disk", "broken", "it is full [really]", "du -xhd1 /")
    text = printed(Examination((broken, *found.findings[:2]), found.needs), terminal)
    assert "bytes a token: " in text and "sequences of 8,192 tokens or " in text
    for part in ("disk", "it is full [really]", "du -xhd1 /", "tiny", "estimates", "One thing stops training"):
        assert part in text
    assert ("\x1b[" in text) == terminal
    healthy = printed(Examination(found.findings[:1], ()), terminal)
    assert "Nothing stops training here" in healthy and "estimates" not in healthy


def test_flags_are_never_broken_across_lines(tmp_path):
    """They are there to be copied, however narrow the terminal is."""
    config = load_config(write_config(tmp_path))
    [need] = examine({"tiny": config}, tmp_path).needs
    flags = "--train.activation_checkpointing all --train.micro_batch_size 1 --parallel.mode fsdp"
    command = "sudo apt-get install -y nvidia-driver-580 && sudo reboot"
    stream = io.StringIO()
    found = Examination((Finding("gpu", "broken", "it is old", command),), (replace(need, advice=flags),))
    show(found, Console(file=stream, force_terminal=True, width=60))
    assert flags in stream.getvalue() and command in stream.getvalue()


def test_exit_status():
    note, broken = Finding("a", "note", "slow"), Finding("b", "broken", "gone", "mend it")
    assert Examination((note,), ()).exit_status == 0
    assert Examination((note, broken), ()).exit_status == 1
    assert Examination((broken,), ()).broken == ["b: gone"]


def test_config_that_cannot_run_is_broken(tmp_path):
    """Where it was asked for; a preset that this machine is too small for is none of its faults."""
    path = write_config(tmp_path)
    path.write_text(
        path.read_text().replace("steps = 6", "steps = 60000").replace("interval_steps = 2", "interval_steps = 0")
    )
    config = load_config(path)
    assert examine({"tiny": config}, tmp_path).exit_status == 0
    assert examine({"tiny": config}, tmp_path, asked=("tiny",)).exit_status == 1


def test_compiler_that_a_config_needs(tmp_path, monkeypatch):
    path = write_config(tmp_path)
    path.write_text(path.read_text().replace("steps = 6", "steps = 6\ncompile = true"))
    monkeypatch.setattr(probes, "CompileProbe", lambda needed: COMPILE_PROBE("raise SystemExit(1)", needed=needed))
    config = load_config(path)
    assert examine({"tiny": config}, tmp_path).exit_status == 0
    assert examine({"tiny": config}, tmp_path, asked=("tiny",)).exit_status == 1


def test_command(tmp_path, capsys):
    config = str(write_config(tmp_path))
    path = tmp_path / "doctor.json"
    assert main(["doctor", config, "--json", str(path)]) == 0
    output = capsys.readouterr()
    assert re.search(r"^ok +torch: ", output.out, re.MULTILINE) and "needs  " + config in output.out
    assert "looking at" in output.err
    assert json.loads(path.read_text())["healthy"] is True

    assert main(["doctor", config, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["needs"][0]["name"] == config


def test_command_on_a_broken_machine(tmp_path, capsys, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(probes.os, "fsync", full)
    assert main(["doctor", str(write_config(tmp_path))]) == 1
    assert "disk: " in capsys.readouterr().out


def test_presets_are_found(capsys):
    assert main(["doctor"]) in (0, 1)
    output = capsys.readouterr().out
    for name in ("m7c_125m", "showcase", "wide_1b3"):
        assert f"needs  {name}:" in output


def test_config_that_is_not_there(capsys):
    assert main(["doctor", "nowhere.toml"]) == 2
    assert "nowhere.toml" in capsys.readouterr().err


def test_numbers_for_people():
    assert [size(number) for number in (5 * 2**20, 3 * 2**30)] == ["5 MiB", "3.0 GiB"]
    assert [count(number) for number in (300_000, 1_300_000_000)] == ["0.3 M", "1.30 B"]
    times = [duration(seconds) for seconds in (None, 0.0042, 0.5, 3, 90, 240, 90000, 1e7)]
    assert times == ["?", "4.2 ms", "500 ms", "3.0 s", "90 s", "4.0 min", "25 h", "116 d"]
