"""The doctor on a GPU, and its memory formula against the caching allocator; without one these tests are skipped."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.models.measured_memory import allocated_peak_on_gpu

from trifocal.doctor import examine
from trifocal.doctor.needs import Machine
from trifocal.models import ModelConfig, TrainingSetup, training_memory
from trifocal.train import load_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROOT = Path(__file__).parents[2]
PRODUCTION = ModelConfig(num_layers=4)
LAYERS = (0, 4)


def setup(length, batch, **changes):
    return TrainingSetup(
        sequence_length=length, micro_batch_size=batch, precision="bf16", device="cuda",
        workspace_bytes=Machine.here({}).workspace_bytes, **changes,
    )  # fmt: skip


CASES = {
    "kernels, kept": (PRODUCTION, lambda: setup(2048, 8, backend="triton")),
    "kernels, checkpointed": (PRODUCTION, lambda: setup(2048, 8, backend="triton", checkpointed_layers=LAYERS)),
    "kernels, compiled, kept": (PRODUCTION, lambda: setup(2048, 8, backend="triton", compiled=True)),
    "kernels, compiled, checkpointed": (
        PRODUCTION, lambda: setup(2048, 8, backend="triton", compiled=True, checkpointed_layers=LAYERS)
    ),
    "reference, compiled, kept": (replace(PRODUCTION, backend="reference"), lambda: setup(2048, 2, compiled=True)),
    "kernels, packed": (PRODUCTION, lambda: setup(2048, 8, backend="triton", packed=True)),
    "kernels, long": (PRODUCTION, lambda: setup(32768, 1, backend="triton", checkpointed_layers=LAYERS)),
    "reference, kept": (replace(PRODUCTION, backend="reference"), lambda: setup(2048, 2)),
    "reference, checkpointed": (
        replace(PRODUCTION, backend="reference"), lambda: setup(2048, 2, checkpointed_layers=LAYERS)
    ),
    "dense": (replace(PRODUCTION, attention="dense"), lambda: setup(2048, 8)),
}  # fmt: skip


# PyTorch's own tracer warns about its own calls.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_memory_formula(case):
    config, make = CASES[case]
    setting = make()
    estimate = training_memory(config, setting)
    assert estimate.total == pytest.approx(allocated_peak_on_gpu(config, setting), rel=0.10), estimate


def test_examine_finds_a_healthy_gpu(tmp_path):
    name = "m7c_125m"
    examination = examine({name: load_config(ROOT / "configs" / f"{name}.toml")}, tmp_path)
    findings = {finding.name: finding for finding in examination.findings}
    for wanted in ("gpu 0", "driver", "triton", "gloo", "nccl", "speed"):
        assert findings[wanted].status in ("ok", "note"), findings[wanted]
    assert findings["triton"].status == findings["nccl"].status == "ok"
    [need] = examination.needs
    assert need.backend == "triton" and need.fits and need.step_seconds
