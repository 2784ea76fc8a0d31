"""The whole examination and its output."""

import json
import re
from dataclasses import replace

from tests.devices import needs_gpu
from tests.train.tiny import write_config
from trifocal.cli import main
from trifocal.doctor import probes
from trifocal.doctor.examination import Examination, examine
from trifocal.doctor.machine import Finding
from trifocal.doctor.measured import Need
from trifocal.train import load_config

NEED = Need(name="tiny", parameters=10**6, state_bytes=16 * 10**6, disk_bytes=10**7)
FLAGS = ("--train.activation_checkpointing all", "--parallel.mode fsdp")


def test_what_is_printed():
    finding = Finding("disk", "broken", "it is full [really]", "sudo apt-get install -y nvidia-driver-580 && reboot")
    need = replace(NEED, problem="the memory does not suffice", remedies=FLAGS)
    text = "\n".join(Examination((finding,), (need,)).lines())
    for part in (finding.text, finding.remedy, "1.0 M parameters", *FLAGS, "not measured", "2 things stop training"):
        assert part in text
    assert "\n1 thing stops training:" in "\n".join(Examination((finding,), ()).lines())
    measured = replace(NEED, device="GPU", processes=2, peak_bytes=2**30, step_seconds=0.5, tokens_per_second=4096.0)
    text = "\n".join(Examination((), (replace(measured, memory_bytes=2**31),)).lines())
    assert "measured on 2 x GPU: 1.00 GiB of 2.00 GiB at its peak, 0.5 s a step, 4,096 tokens/s" in text
    assert "Nothing stops training here" in text


def test_command(tmp_path, capsys):
    config = str(write_config(tmp_path))
    path = tmp_path / "doctor.json"
    assert main(["doctor", config, "--json", str(path)]) == 0
    output = capsys.readouterr()
    assert re.search(r"^ok +torch: ", output.out, re.MULTILINE) and "needs  " + config in output.out
    assert "looking at" in output.err
    found = json.loads(path.read_text())
    assert found["healthy"] is True and found["needs"][0]["peak_bytes"] > 0
    names = [finding["name"] for finding in found["findings"]]
    assert {"torch", "cpu", "compiler", "triton", "disk"} <= set(names)


def test_command_on_a_broken_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(probes.os, "fsync", full)
    path = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(path)]) == 1
    found = json.loads(path.read_text())
    assert found["healthy"] is False and found["needs"] == []
    assert any(sentence.startswith("disk: ") for sentence in found["broken"])


@needs_gpu
def test_a_healthy_gpu(tmp_path):
    config = load_config("m7c_125m", {"data.source": "builtin"})
    examination = examine({"m7c_125m": config}, tmp_path)
    findings = {finding.name: finding for finding in examination.findings}
    assert findings["triton"].status == "ok" and findings["gpu 0"].status in ("ok", "note")
    [need] = examination.needs
    assert need.device and 0 < need.peak_bytes < need.memory_bytes and need.step_seconds
