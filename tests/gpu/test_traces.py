"""Traces on a GPU: times of the device, its memory, and a profile with kernels."""

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from tests.train.test_traces import QUICK, table
from tests.train.tiny import make_config
from trifocal.train import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def traced(folder: Path, what: str, *flags: str) -> Path:
    """A run on the GPU with its steps 2 and 3 traced."""
    given = ("--trace.what", what, "--trace.steps", "2:4", *QUICK, "--run.device", "cuda", *flags)
    assert train(make_config(folder, *given)).finished
    return folder / "run" / "traces" / "steps_2-3"


def test_times_of_the_device_and_the_allocators_history(tmp_path: Path) -> None:
    folder = traced(tmp_path, "gradients,modules,dtypes,memory", "--train.activation_checkpointing", "all")
    for row in table(folder / "gradients_rank0.csv"):
        assert float(row["device_milliseconds"]) > 0
    modules = table(folder / "modules_rank0.csv")
    assert {row["event"] for row in modules} == {"forward", "recompute", "backward"}
    assert all(float(row["device_milliseconds"]) >= 0 for row in modules if row["event"] == "forward")
    assert int(table(folder / "memory_rank0.csv")[-1]["saved_for_backward_bytes"]) > 0
    snapshot = pickle.loads((folder / "memory_snapshot_rank0.pickle").read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"])
    assert {row["dtype"] for row in table(folder / "dtypes_rank0.csv") if row["kind"] == "parameter"} == {"float32"}


@pytest.mark.parametrize("graphs", ["false", "true"])
def test_the_profile_has_kernels(tmp_path: Path, graphs: str) -> None:
    folder = traced(tmp_path, "profiler", "--train.cuda_graphs", graphs)
    assert "Self CUDA" in (folder / "operations_rank0.txt").read_text()
    with gzip.open(folder / "profile_rank0.json.gz", "rt") as file:
        kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
    assert "kernel" in kinds
