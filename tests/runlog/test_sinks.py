"""TensorBoard, W&B and trackio read the same rows; one that fails or hangs is left out, and training goes on."""

import logging
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
from tests.train.tiny import make_config

from trifocal.errors import UserError
from trifocal.runlog import MetricsWriter, check_sinks, make_sinks, read_metrics
from trifocal.runlog.sinks import SINKS, SinkThread, TensorBoardSink, TrackioSink, WandbSink
from trifocal.train import load_config, resume, train


def write_rows(directory: Path, sinks: list[Any]) -> None:
    """A few rows of every kind."""
    with MetricsWriter(directory / "metrics.jsonl", sinks=sinks) as metrics:
        metrics.write("train", 1, loss=2.5, executed_mfu=None)
        metrics.write("train", 2, loss=2.0)
        metrics.write("telemetry", 2, layer=3, gate_mean_cmp=0.5, shares=[0.5, 0.5])
        metrics.event(2, "sample", "hello")
        metrics.event(2, "gate_shut", "layer 3 is shut", severity="warning", layer=3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_numbers_and_events(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_rows(tmp_path, [TensorBoardSink(tmp_path / "tensorboard")])
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [(1, 2.5), (2, 2.0)]
    assert events.Scalars("telemetry/layer03/gate_mean_cmp")[0].value == 0.5
    assert {"event/sample/text_summary", "event/gate_shut/text_summary"} <= set(events.Tags()["tensors"])


class FakeService(types.ModuleType):
    """The common part of wandb and trackio, noting every call; `fails` raises where they are reached."""

    class AlertLevel:
        WARN, ERROR = "warn", "error"

    def __init__(self, name: str, fails: str = "") -> None:
        super().__init__(name)
        # find_spec looks at it.
        self.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
        self.fails = fails
        self.calls: list[tuple[str, Any]] = []

    def _note(self, what: str, value: Any) -> None:
        self.calls.append((what, value))
        if what == self.fails:
            raise ConnectionError("no network")

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **arguments: Any) -> "FakeService":
        self._note("init", arguments)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self._note("define_metric", (name, step_metric))

    def log(self, values: dict[str, float], **arguments: Any) -> None:
        self._note("log", (values, arguments))

    def alert(self, **arguments: Any) -> None:
        self._note("alert", arguments)

    def finish(self) -> None:
        self._note("finish", None)

    def of(self, what: str) -> list[Any]:
        return [value for name, value in self.calls if name == what]


def test_wandb_gets_numbers_over_a_step_of_their_own_and_alerts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeService("wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for _ in range(2):
        write_rows(tmp_path / "run", [WandbSink(tmp_path / "run", project="p", config={"seed": 7})])
    first, second = wandb.of("init")
    assert (first["project"], first["name"], first["config"], first["resume"]) == ("p", "run", {"seed": 7}, "allow")
    assert first["id"] == second["id"] == (tmp_path / "run" / "wandb" / "run_id").read_text()
    assert wandb.of("define_metric")[0] == ("*", "step")
    values = [values for values, _ in wandb.of("log")][:3]
    assert values == [
        {"train/loss": 2.5, "step": 1},
        {"train/loss": 2.0, "step": 2},
        {"telemetry/layer03/gate_mean_cmp": 0.5, "step": 2},
    ]
    assert wandb.of("alert")[0] == {"title": "gate_shut", "text": "step 2: layer 3 is shut", "level": "warn"}
    assert len(wandb.of("finish")) == 2


def test_trackio_gets_numbers_and_alerts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = FakeService("trackio")
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    for resume_step in (None, 2):
        write_rows(tmp_path / "run", [TrackioSink(tmp_path / "run", project="p", config={}, resume_step=resume_step)])
    assert [(call["name"], call["resume"]) for call in trackio.of("init")] == [("run", "never"), ("run", "allow")]
    assert trackio.of("log")[:2] == [({"train/loss": 2.5}, {"step": 1}), ({"train/loss": 2.0}, {"step": 2})]
    assert trackio.of("alert")[0]["title"] == "gate_shut"
    assert len(trackio.of("finish")) == 2


def test_wandb_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_rows(tmp_path, [WandbSink(tmp_path, project="p", config={"seed": 7})])
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    for expected in (b"train/loss", b"telemetry/layer03/gate_mean_cmp", b"layer 3 is shut"):
        assert expected in content
    assert not [row for row in read_metrics(tmp_path / "metrics.jsonl", "event") if row["name"] == "sink_failed"]


def test_trackio_itself_in_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trackio = pytest.importorskip("trackio")
    write_rows(tmp_path / "run", [TrackioSink(tmp_path / "run", project="p", config={"seed": 7})])
    rows = trackio.SQLiteStorage.get_logs("p", "run")
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(1, 2.5), (2, 2.0)]


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_sink_without_a_network_is_said_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    wandb = FakeService("wandb", fails)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with caplog.at_level(logging.WARNING):
        result = train(make_config(tmp_path, "--log.sinks", "wandb", "--evaluate.interval_steps", "0"))
    assert result.finished
    assert len(wandb.of(fails)) == 1
    assert caplog.text.count("no network") == 1
    (event,) = [
        row for row in read_metrics(tmp_path / "run" / "metrics.jsonl", "event") if row["name"] == "sink_failed"
    ]
    assert event["severity"] == "warning"
    assert event["message"].startswith("WandbSink fails (ConnectionError: no network) and is left out")
    assert resume(tmp_path / "run", config=load_config(tmp_path / "run" / "config.toml")).finished


class Hanging:
    """A sink whose first call never comes back."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def write(self, row: dict[str, Any]) -> None:
        self.go_on.wait()

    def close(self) -> None:
        """Never reached."""


def test_a_sink_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trifocal.runlog.sinks.thread.MAX_WAITING_ROWS", 3)
    for rows, expected in ((2, "did not take the last rows within 0 s"), (8, "does not keep up, 3 rows wait")):
        sink, said = Hanging(), []
        begin = time.monotonic()
        thread = SinkThread(sink, said.append, close_seconds=0.3)
        for step in range(rows):
            thread.write({"kind": "train", "step": step})
        thread.close()
        assert time.monotonic() - begin < 60
        sink.go_on.set()
        (sentence,) = said
        assert sentence.startswith(f"Hanging {expected}")


def test_closing_waits_for_the_report_of_a_failure() -> None:
    """Else the report would go into a file that is closed."""

    class Broken:
        def write(self, row: dict[str, Any]) -> None:
            raise OSError("no connection")

        def close(self) -> None:
            pass

    reports: list[str] = []

    def slow_report(sentence: str) -> None:
        time.sleep(0.3)
        reports.append(sentence)

    thread = SinkThread(Broken(), slow_report)
    thread.write({"kind": "train"})
    thread.close()
    assert len(reports) == 1
    assert "no connection" in reports[0]


@pytest.mark.parametrize("name", SINKS)
def test_a_missing_package_names_the_extra_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    expected = rf"pip install 'trifocal\[{name}\]'"
    with pytest.raises(UserError, match=expected):
        check_sinks([name])
    with pytest.raises(UserError, match=expected):
        make_sinks([name], tmp_path, project="p", config={})
    with pytest.raises(UserError, match=expected):
        train(make_config(tmp_path, "--log.sinks", name))
    assert not (tmp_path / "run").exists()


def test_an_unknown_sink_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'log\.sinks must name some of tensorboard, wandb, trackio, got "wandbb"'):
        make_config(tmp_path, "--log.sinks", "tensorboard, wandbb")
    assert make_config(tmp_path, "--log.sinks", "wandb, tensorboard,wandb").log.sink_names() == ["wandb", "tensorboard"]
    with pytest.raises(ValueError, match="a sink must be one of"):
        make_sinks(["none"], tmp_path, project="p", config={})
