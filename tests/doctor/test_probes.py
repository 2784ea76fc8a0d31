"""Probes that fail: the message, and the command that mends it."""

import errno

import pytest
import torch

from trifocal.doctor import probes


@pytest.fixture
def gpu(monkeypatch):
    """PyTorch sees one GPU, and Triton is installed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(probes, "find_spec", lambda module: True)


def run_instead(monkeypatch, outcome):
    def run(device):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(probes, "_run_small_kernel", run)


def test_triton_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probes.check_triton().status == "ok"


@pytest.mark.parametrize(
    "message, remedy",
    [
        ("Failed to find C compiler. Please specify via CC environment variable.", "sudo apt-get install -y g++"),
        ("main.c:5:10: fatal error: Python.h: No such file or directory", "sudo apt-get install -y python3-dev"),
    ],
)
def test_kernel_that_does_not_compile(gpu, monkeypatch, message, remedy):
    run_instead(monkeypatch, RuntimeError(message))
    finding = probes.check_triton()
    assert (finding.status, finding.remedy) == ("broken", remedy)


@pytest.mark.parametrize("right, status", [(True, "ok"), (False, "broken")])
def test_kernel_that_runs(gpu, monkeypatch, right, status):
    run_instead(monkeypatch, right)
    assert probes.check_triton().status == status


def test_triton_is_missing_beside_a_gpu(gpu, monkeypatch):
    monkeypatch.setattr(probes, "find_spec", lambda module: None)
    finding = probes.check_triton()
    assert (finding.status, finding.remedy) == ("note", "pip install triton")


def test_disk_here(tmp_path):
    """Also of a folder that is yet to be made; nothing is left behind."""
    finding = probes.check_disk(tmp_path / "runs" / "later")
    assert finding.status in ("ok", "note") and str(tmp_path) in finding.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code, remedy", [(errno.ENOSPC, "du -xhd1"), (errno.EROFS, "--run.directory")])
def test_disk_that_takes_nothing(tmp_path, monkeypatch, code, remedy):
    def fail(descriptor):
        raise OSError(code, "refused")

    monkeypatch.setattr(probes.os, "fsync", fail)
    finding = probes.check_disk(tmp_path)
    assert finding.status == "broken" and remedy in finding.remedy
    assert list(tmp_path.iterdir()) == []


def test_disk_that_is_almost_full(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 10**8})
    monkeypatch.setattr(probes.shutil, "disk_usage", lambda folder: usage)
    assert probes.check_disk(tmp_path).status == "note"


def test_run_directory_in_a_file(tmp_path):
    (tmp_path / "runs").write_text("")
    finding = probes.check_disk(tmp_path / "runs" / "later")
    assert finding.status == "broken" and "not a folder" in finding.text
