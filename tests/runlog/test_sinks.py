"""TensorBoard and W&B read the same rows; a sink that fails is left out, and training continues."""

import logging
import sys
import types

import pytest

from tests.train.tiny import make_config
from trifocal.errors import UserError
from trifocal.runlog import read_metrics
from trifocal.runlog.metrics import MetricsWriter
from trifocal.runlog.sinks import SINKS, TensorBoardSink, WandbSink, check_sinks
from trifocal.train import train


def write_rows(directory, sinks):
    """A few rows of every kind."""
    with MetricsWriter(directory / "metrics.jsonl", sinks=sinks) as metrics:
        metrics.write("train", 1, loss=2.5, executed_mfu=None)
        metrics.write("train", 2, loss=2.0)
        metrics.write("telemetry", 2, layer=3, gate_mean_cmp=0.5, shares=[0.5, 0.5])
        metrics.event(2, "sample", "hello")
        metrics.event(2, "gate_closed", "layer 3 is closed", severity="warning", layer=3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_back_every_number_and_every_event(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "tensorboard"
    write_rows(tmp_path, [TensorBoardSink(folder)])
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()
    found = {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in tags["scalars"]}
    assert found == {"train/loss": [(1, 2.5), (2, 2.0)], "telemetry/layer03/gate_mean_cmp": [(2, 0.5)]}
    texts = {tag: [(e.step, e.tensor_proto.string_val) for e in events.Tensors(tag)] for tag in tags["tensors"]}
    assert texts == {
        "event/sample/text_summary": [(2, [b"hello"])],
        "event/gate_closed/text_summary": [(2, [b"layer 3 is closed"])],
    }
    rows = read_metrics(tmp_path / "metrics.jsonl", "train")
    for point, row in zip(events.Scalars("train/loss"), rows, strict=True):
        assert point.wall_time == pytest.approx(row["unix_time_seconds"], abs=1e-3)
    # A resumed run hides what came after its checkpoint.
    with MetricsWriter(tmp_path / "metrics.jsonl", resume_step=1, sinks=[TensorBoardSink(folder, resume_step=1)]) as m:
        m.write("train", 2, loss=1.0)
    again = accumulator.EventAccumulator(str(folder))
    again.Reload()
    assert [(point.step, point.value) for point in again.Scalars("train/loss")] == [(1, 2.5), (2, 1.0)]


class FakeService(types.ModuleType):
    """The part of wandb that the sink uses, noting every call; `fails` raises where it is reached."""

    class AlertLevel:
        WARN, ERROR = "warn", "error"

    def __init__(self, name, fails=""):
        super().__init__(name)
        # find_spec looks at it.
        self.__spec__ = types.SimpleNamespace(name=name)
        self.fails = fails
        self.calls = []

    def _note(self, what, value):
        self.calls.append((what, value))
        if what == self.fails:
            raise ConnectionError("no network")

    def Settings(self, **settings):
        return settings

    def init(self, **arguments):
        self._note("init", arguments)
        return self

    def define_metric(self, name, step_metric):
        self._note("define_metric", (name, step_metric))

    def log(self, values, **arguments):
        self._note("log", (values, arguments))

    def finish(self):
        self._note("finish", None)

    def of(self, what):
        return [value for name, value in self.calls if name == what]


def test_wandb_gets_numbers_over_a_step_of_their_own(tmp_path, monkeypatch):
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
    assert len(wandb.of("finish")) == 2


@pytest.mark.parametrize("fails", ["init", "finish"])
def test_a_sink_without_a_network_is_said_once_and_the_run_continues(tmp_path, monkeypatch, caplog, fails):
    wandb, run = FakeService("wandb", fails), tmp_path / "run"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with caplog.at_level(logging.WARNING):
        if fails == "init":
            assert train(make_config(tmp_path, "--log.sinks", "wandb", "--evaluate.interval_steps", "0")).finished
        else:
            write_rows(run, [WandbSink(run, project="p", config={})])
    assert len(wandb.of(fails)) == 1
    assert caplog.text.count("no network") == 1
    (event,) = [row for row in read_metrics(run / "metrics.jsonl", "event") if row["name"] == "sink_failed"]
    assert event["severity"] == "warning"
    assert event["message"].startswith("WandbSink fails (ConnectionError: no network) and is left out")


@pytest.mark.parametrize("name", SINKS)
def test_a_missing_package_names_the_extra_before_the_run_begins(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    expected = rf"pip install 'trifocal\[{name}\]'"
    with pytest.raises(UserError, match=expected):
        check_sinks([name])
    with pytest.raises(UserError, match=expected):
        train(make_config(tmp_path, "--log.sinks", name))
    assert not (tmp_path / "run").exists()


def test_an_unknown_sink_is_refused(tmp_path):
    with pytest.raises(UserError, match=r'log\.sinks must name some of tensorboard, wandb, got "wandbb"'):
        make_config(tmp_path, "--log.sinks", "tensorboard, wandbb")
    assert make_config(tmp_path, "--log.sinks", "wandb, tensorboard,wandb").log.sink_names() == ["wandb", "tensorboard"]
