"""The first signal asks, its echo is the same request, a later one insists; compilers outlive a signal to the group."""

import itertools
import os
import signal
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from tests import warm
from tests.children import environment, wait_for_end
from tests.train.tiny import write_config
from trifocal.data import make_tokenizer, prefetch
from trifocal.data.sources.text import TextSource
from trifocal.inference import Engine
from trifocal.runlog import read_metrics
from trifocal.train import load_config, loop, setup, stop, train, validation_loss
from trifocal.train.checkpoint.folders import list_checkpoints
from trifocal.train.checkpoint.manifest import is_intact
from trifocal.train.coordinator import StepCoordinator
from trifocal.train.setup import TrainSetup
from trifocal.train.step.step import TrainStep
from trifocal.train.stop import StoppedBeforeFirstStep, StopSignals
from trifocal.train.validation_loss import read_validation_batches


def kill(*numbers):
    """Send signals to this process, and let the thread that takes them take them."""
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.1)


def test_a_signal_twice_at_once_is_one_request(monkeypatch):
    left = []
    monkeypatch.setattr(stop.os, "_exit", left.append)
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        signals.something_to_save = True
        assert signals.received is None
        kill(signal.SIGTERM, signal.SIGTERM, signal.SIGINT)
        assert signals.received == "SIGTERM"
        assert not left
        monkeypatch.setattr(stop, "SAME_REQUEST_SECONDS", 0.0)
        kill(signal.SIGINT)
        assert left == [128 + signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_closed_terminal_asks_unless_nohup_was_asked():
    for handler, expected in ((signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, None)):
        before = signal.signal(signal.SIGHUP, handler)
        try:
            with StopSignals() as signals:
                signals.something_to_save = True
                kill(signal.SIGHUP)
                assert signals.received == expected
            assert signal.getsignal(signal.SIGHUP) == handler
        finally:
            signal.signal(signal.SIGHUP, before)


def test_before_the_first_step_a_wait_ends_at_once():
    begin = time.monotonic()
    with pytest.raises(StoppedBeforeFirstStep, match="SIGTERM") as stopped, StopSignals():
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        # A wait in the way of a future's result.
        threading.Event().wait(20)
    assert stopped.value.status == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 10


def test_a_signal_counts_though_its_exception_is_dropped(monkeypatch):
    """Python drops what is raised in a weak reference's callback; PyTorch's compiler has many of them."""

    def dropped(_):
        kill(signal.SIGTERM)

    monkeypatch.setattr(stop, "_AGAIN_SECONDS", 0.1)
    # pytest's own imports a module for its message, which the second interruption would meet on a busy machine.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    thing = threading.Event()
    reference = weakref.ref(thing, dropped)
    with pytest.raises(StoppedBeforeFirstStep, match="SIGTERM"), StopSignals() as signals, signals.as_stop_request():
        del thing
        assert reference() is None and signals.received
        threading.Event().wait(20)


def test_the_way_out_is_not_interrupted_again(monkeypatch):
    monkeypatch.setattr(stop, "_AGAIN_SECONDS", 0.01)
    with StopSignals() as signals:
        with pytest.raises(StoppedBeforeFirstStep), signals.as_stop_request():
            kill(signal.SIGTERM)
        threading.Event().wait(0.1)


def test_an_error_that_a_library_makes_of_a_signal_is_the_signal(tmp_path, monkeypatch):
    def traced(*_, **__):
        try:
            kill(signal.SIGTERM)
        except KeyboardInterrupt as interruption:
            raise RuntimeError("a function of autograd could not be traced") from interruption

    monkeypatch.setattr(TrainStep, "run", traced)
    with pytest.raises(StoppedBeforeFirstStep, match="SIGTERM"):
        train(load_config(write_config(tmp_path)))


def test_an_error_of_a_step_stays_after_a_signal_that_saves():
    with pytest.raises(RuntimeError, match="a failure"), StopSignals() as signals, signals.as_stop_request():
        signals.something_to_save = True
        kill(signal.SIGTERM)
        raise RuntimeError("a failure")


@pytest.mark.parametrize("work", ["evaluation", "validation data", "sample", "training data"])
def test_work_beside_steps_ends_when_a_signal_asks(tmp_path, monkeypatch, work):
    """Each would never end here. The step is saved, and the work leaves nothing. For training data the trainer waits
    already when the signal comes.
    """
    overrides = {"evaluate.interval_steps": 3, "log.sample_interval_steps": 3, "data.prefetch_batches": 1}
    if work == "training data":
        overrides |= {"evaluate.interval_steps": 0, "log.sample_interval_steps": 0, "train.steps": 30}
    config = load_config(write_config(tmp_path), overrides)
    made, blocked = [], threading.Event()

    class Signals(StopSignals):
        def __enter__(self):
            made.append(self)
            return super().__enter__()

    def ask(*_):
        made[0].received = "SIGTERM"

    def for_ever(*_, **__):
        ask()
        threading.Event().wait()

    def blocking_read(self, *args):
        if made and made[0].something_to_save:
            blocked.set()
            threading.Event().wait()
        yield from read(self, *args)

    def while_it_waits(self):
        if blocked.is_set():
            ask()
        return stop_requested(self)

    read, stop_requested = TextSource.read, StepCoordinator.stop_requested
    with monkeypatch.context() as patch:
        patch.setattr(loop, "StopSignals", Signals)
        if work == "evaluation":
            patch.setattr(validation_loss, "batch_loss", lambda *_: ask() or torch.zeros(()))
            batches = read_validation_batches(config, make_tokenizer("bytes"))
            patch.setattr(TrainSetup, "validation_batches", lambda self: batches * 10_000)
        elif work == "validation data":
            patch.setattr(TrainSetup, "validation_batches", lambda self: self._read_validation_batches())
            patch.setattr(setup, "read_validation_batches", lambda *_: for_ever() if made else [])
        elif work == "sample":
            patch.setattr(Engine, "run", lambda *_: (ask() or SimpleNamespace(token=1) for _ in itertools.count()))
        else:
            patch.setattr(TextSource, "read", blocking_read)
            patch.setattr(StepCoordinator, "stop_requested", while_it_waits)
            patch.setattr(prefetch, "STALL_LIMIT_SECONDS", 60)
        result = train(config)
    assert not result.finished and made[0].something_to_save
    step = result.step if work == "training data" else 3
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")][-1] == f"step_{step:08}"
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl", "evaluation")) == (work == "sample")
    assert result.sample is None and not (tmp_path / "run" / "samples").exists()


# A step waits for PyTorch's own pool of compiling processes, which has a job that takes its time.
COMPILING = """
import os, sys, time
from pathlib import Path
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from trifocal.cli import main
from trifocal.train.setup import TrainSetup
from trifocal.train.step.step import TrainStep

os.setpgid(0, 0)
config.compile_threads = 2
run = TrainStep.run

def compiling(self, step, *args, **kwargs):
    if step == int(sys.argv[2]):
        assert AsyncCompile.process_pool().submit(time.sleep, 0.1).result() is None
        job = AsyncCompile.process_pool().submit(time.sleep, float(sys.argv[3]))
        Path(sys.argv[1]).touch()
        job.result()
    return run(self, step, *args, **kwargs)

TrainStep.run = compiling
raise SystemExit(main(["train", *sys.argv[4:]]))
"""


@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 1), (signal.SIGTERM, 2), (signal.SIGUSR1, 2)])
def test_a_signal_to_the_group_while_a_pool_compiles(tmp_path, number, step):
    """In the first step of a start it stops at once; later the compilers continue, and the step is saved. SIGUSR1,
    which a scheduler may send to all processes, ends none of them.
    """
    marker, run = tmp_path / "marker", tmp_path / "run"
    seconds = 150 if step == 1 else 3
    command = [str(marker), str(step), str(seconds), str(write_config(tmp_path)), "--train.steps", "40"]
    with (tmp_path / "error").open("wb") as error:
        arguments = [sys.executable, "-c", COMPILING, *command]
        process = warm.popen(arguments, stdout=error, stderr=error, env=environment(OMP_NUM_THREADS=1))
    try:
        deadline = time.monotonic() + 120
        while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert marker.exists(), (tmp_path / "error").read_text()
        os.killpg(process.pid, number)
        # Far less than the compiler's minutes.
        assert wait_for_end(process, 100) == (128 + number if step == 1 else 0), (tmp_path / "error").read_text()
    finally:
        process.kill()
    assert "Traceback" not in (tmp_path / "error").read_text()
    if step == 1:
        assert not run.exists()
    else:
        newest = list_checkpoints(run / "checkpoints")[-1]
        last = 40 if number == signal.SIGUSR1 else 2
        assert is_intact(newest) and newest.name == f"step_{last:08}"
        assert read_metrics(run / "metrics.jsonl", "train")[-1]["step"] == last


def test_an_interrupt_that_comes_behind_the_first_step_changes_nothing():
    signals = StopSignals()
    signals._number = signal.SIGTERM
    with pytest.raises(StoppedBeforeFirstStep):
        signals._raise(signal.SIGURG, None)
    signals.something_to_save = True
    try:
        signals._raise(signal.SIGURG, None)
    except StoppedBeforeFirstStep:
        pytest.fail("there is a step to save")
