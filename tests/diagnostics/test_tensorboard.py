"""TensorBoard reads the same rows."""

import sys
from pathlib import Path

import pytest

from trifocal.diagnostics import MetricsWriter, TensorBoardSink
from trifocal.errors import UserError


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_numbers_and_events_arrive(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path / "tensorboard")
    with MetricsWriter(tmp_path / "metrics.jsonl", sinks=[sink]) as metrics:
        metrics.write("train", 1, loss=2.5, executed_mfu=None)
        metrics.write("train", 2, loss=2.0)
        metrics.write("telemetry", 2, layer=3, gate_mean_cmp=0.5)
        metrics.event(2, "sample", "hello")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [(1, 2.5), (2, 2.0)]
    assert events.Scalars("telemetry/layer03/gate_mean_cmp")[0].value == 0.5
    assert "event/sample/text_summary" in events.Tags()["tensors"]


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'trifocal\[tensorboard\]'"):
        TensorBoardSink(tmp_path)
