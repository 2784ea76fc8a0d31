"""The doctor on a GPU; without one this test is skipped."""

from pathlib import Path

from tests.devices import NEEDS_GPU
from trifocal.doctor import examine
from trifocal.train import load_config

pytestmark = list(NEEDS_GPU)

ROOT = Path(__file__).parents[2]


def test_examine_finds_a_healthy_gpu(tmp_path):
    config = load_config(ROOT / "configs" / "m7c_125m.toml", {"data.source": "builtin"})
    examination = examine({"m7c_125m": config}, tmp_path)
    findings = {finding.name: finding for finding in examination.findings}
    for wanted in ("torch", "gpu 0", "triton", "gloo", "nccl"):
        assert findings[wanted].status in ("ok", "note"), findings[wanted]
    assert findings["triton"].status == findings["nccl"].status == "ok"
    [need] = examination.needs
    assert need.device and 0 < need.peak_bytes < need.memory_bytes and need.step_seconds
