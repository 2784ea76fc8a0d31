"""Findings on machines that lack something, each with the command that mends it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trifocal.doctor import machine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch):
    """PyTorch sees one GPU; nothing is computed on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(
    "devices, visible, cuda, status, text, remedy",
    [
        (0, None, None, "ok", "CPU", ""),
        (1, None, None, "broken", "without CUDA", "pip install"),
        (1, "", "13.0", "note", "hidden", "unset CUDA_VISIBLE_DEVICES"),
        (1, None, "13.0", "broken", "too old", "nvidia-driver-580"),
        (1, None, "12.8", "broken", "too old", "nvidia-driver-525"),
    ],
)
def test_no_gpu(no_gpu, monkeypatch, devices, visible, cuda, status, text, remedy):
    def refuse_driver():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it.")

    monkeypatch.setattr(machine, "_nvidia_devices", lambda: [Path("/dev/nvidia0")] * devices)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", refuse_driver)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    [finding] = machine.check_gpus()
    assert finding.status == status and text in finding.text and remedy in finding.remedy


def test_gpu_that_does_not_compute(gpu, monkeypatch):
    def fail(index):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    [finding] = machine.check_gpus()
    assert finding.status == "broken" and "ECC" in finding.text and finding.remedy


@pytest.mark.parametrize(
    "capability, free, status, part",
    [
        ((9, 0), 0.99, "ok", "Some GPU, 80 GiB, compute capability 9.0"),
        ((7, 5), 0.99, "note", "too old for the kernels"),
        ((9, 0), 0.5, "note", "40 GiB of them taken already"),
    ],
)
def test_gpu(gpu, monkeypatch, capability, free, status, part):
    properties = SimpleNamespace(name="Some GPU", major=capability[0], minor=capability[1])
    total, ones = 80 * machine.GIB, torch.ones
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (int(free * total), total))
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    [finding] = machine.check_gpus()
    assert finding.status == status and part in finding.text
    monkeypatch.setattr(torch, "ones", lambda *shape, device: 2 * ones(*shape))
    assert machine.check_gpus()[0].status == "broken"


@pytest.mark.parametrize("with_gpu, status", [(True, "broken"), (False, "note")])
def test_no_compiler(no_compiler, monkeypatch, with_gpu, status):
    """Triton needs one for every kernel; a CPU only for torch.compile."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: with_gpu)
    monkeypatch.setattr(machine, "find_spec", lambda module: True)
    finding = machine.check_compiler()
    assert (finding.status, finding.remedy) == (status, "sudo apt-get install -y g++")


def test_compiler_is_found(monkeypatch, tmp_path):
    compiler = tmp_path / "my-c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "my-c++")
    assert machine.check_compiler().text == str(compiler)


def test_too_little_memory(no_gpu, monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 200 * 2**20)
    finding = machine.check_cpu()
    assert finding.status == "broken" and "0.2 of" in finding.text


def test_memory_of_a_container_counts(monkeypatch):
    read = Path.read_text
    files = {"memory.max": "1000000", "memory.current": "400000"}

    def read_text(path, *arguments, **options):
        if str(path).startswith("/sys/fs/cgroup"):
            return files[path.name]
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert machine.available_memory() == 600000
    files["memory.max"] = "max\n"
    assert machine.available_memory() > 600000
