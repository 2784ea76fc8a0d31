"""The description of the machine agrees with the machine."""

import json
import mmap
import os
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from trifocal.runlog.environment import write_environment
from trifocal.runlog.hardware import peak_bf16_flops
from trifocal.runlog.memory_statistics import memory_statistics


def test_versions_settings_and_hash(monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HOME_SECRET", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    description = write_environment(tmp_path / "env.json", "abc")
    assert json.loads((tmp_path / "env.json").read_text()) == description
    # The build's name behind the + is left out in the packages of some indexes.
    assert description["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert description["packages"]["numpy"] == np.__version__
    # SHA-256 of "abc", FIPS 180-2, appendix B.1.
    assert description["config_sha256"].startswith("ba7816bf8f01cfea414140de5dae2223")
    assert description["variables"]["NCCL_DEBUG"] == "INFO"
    assert description["variables"]["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert description["variables"]["WORLD_SIZE"] == "2"
    assert "HOME_SECRET" not in description["variables"]
    assert description["host"] == socket.gethostname()
    assert description["cpu"]["memory_bytes"] > 1e8
    assert description["cpu"]["logical_cores"] == os.cpu_count()
    answer = subprocess.run(["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert description["trifocal"]["git_commit"] == (answer.stdout.strip() or None)


def test_secrets_are_left_out(monkeypatch, tmp_path):
    for name in ("NVIDIA_API_KEY", "TORCH_HUB_TOKEN", "CUDA_secret", "TRITON_Password", "MKL_CREDENTIALS"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("TORCH_HOME_MIRROR", "https://me:hunter2@mirror/x")
    monkeypatch.setattr("sys.argv", ["train.py", "--token=hunter2"])
    write_environment(tmp_path / "env.json")
    assert "hunter2" not in (tmp_path / "env.json").read_text()


def test_memory_follows_an_allocation():
    size = 50_000_000
    before = memory_statistics("cpu")
    # An array could take memory that this process has freed and not given back.
    with mmap.mmap(-1, size) as block:
        block.write(bytes(size))
        after = memory_statistics("cpu")
    assert after.allocated_bytes - before.allocated_bytes > 0.9 * size
    assert after.peak_allocated_bytes >= after.allocated_bytes
    assert after.reserved_bytes is None


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A10G", 70.0),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_peaks_of_the_data_sheets_without_a_guess(name, tflops):
    assert peak_bf16_flops(name) == (tflops and pytest.approx(tflops * 1e12))
