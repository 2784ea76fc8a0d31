"""Two measured steps of a configuration, and what helps where it does not fit."""

import pytest
import torch

from tests import warm
from tests.train.tiny import before_step, make_config
from trifocal.cli import main
from trifocal.doctor import measured
from trifocal.doctor.measured import need_of
from trifocal.models import DecoderLM
from trifocal.train.config.load import load_config, override
from trifocal.train.launch import train
from trifocal.train.out_of_memory import memory_remedies


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Processes that need not import everything first; test_examination.py has real ones."""
    warm.take_the_place_of_subprocess(monkeypatch, "trifocal.testing.processes")


def test_steps_on_the_data_of_the_config(tmp_path, monkeypatch):
    """A step's time counts all micro-batches, of which two are computed."""
    config = make_config(tmp_path, "--train.global_batch_size", "16")
    healthy, taken = measured.run_processes, []

    def run_processes(arguments, *rest, **limits):
        taken.append(load_config(arguments[-1]).train)
        healthy(arguments, *rest, **limits)

    monkeypatch.setattr(measured, "run_processes", run_processes)
    need = need_of("tiny", config)
    assert [(train.global_batch_size, train.micro_batch_size) for train in taken] == [(4, 2)]
    assert (need.problem, need.data, need.device, need.processes) == ("", "", "CPU", 1)
    parameters = sum(parameter.numel() for parameter in DecoderLM(config.model).parameters())
    assert (need.parameters, need.state_bytes) == (parameters, 16 * parameters)
    assert 50 * 2**20 < need.peak_bytes < need.memory_bytes
    assert need.step_seconds * need.tokens_per_second == pytest.approx(16 * 32)
    assert not (tmp_path / "run").exists()


def test_muon_has_a_smaller_state_and_smaller_checkpoints(tmp_path):
    flags = ("--data.source", "text:/nowhere", "--run.device", "cpu", "--parallel.context", "3")
    adamw, muon = (need_of("", make_config(tmp_path, *flags, "--optimizer.kind", kind)) for kind in ("adamw", "muon"))
    assert 0 < muon.state_bytes < adamw.state_bytes and 0 < muon.disk_bytes < adamw.disk_bytes


def test_data_that_cannot_be_read_are_named(tmp_path):
    need = need_of("tiny", make_config(tmp_path, "--data.source", "text:/nowhere"))
    assert "/nowhere" in need.problem and need.data == "measured on random tokens, as text:/nowhere cannot be read"
    assert need.step_seconds > 0


def test_memory_that_does_not_suffice(tmp_path):
    """The scores of 262,144 tokens take a terabyte, and the allocator refuses them at once."""
    config = make_config(tmp_path, "--data.source", "synthetic", "--train.sequence_length", str(2**18))
    need = need_of("tiny", config)
    assert "memory does not suffice" in need.problem and need.peak_bytes is None
    assert need.remedies == tuple(memory_remedies(config))


def test_steps_that_do_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "LIMIT_SECONDS", 0.0)
    need = need_of("tiny", make_config(tmp_path))
    assert need.problem.startswith("2 steps did not end in ") and need.step_seconds is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_that_is_not_there(tmp_path):
    need = need_of("tiny", make_config(tmp_path, "--run.device", "cuda"))
    assert "PyTorch sees no GPU" in need.problem and need.device == ""


def test_what_preflight_refuses(tmp_path):
    flags = ("--parallel.context", "2", "--train.sequence_length", "34")
    need = need_of("tiny", make_config(tmp_path, *flags))
    assert "--train.sequence_length 36" in need.problem and need.step_seconds is None


def test_remedies_leave_a_valid_config(tmp_path):
    config = make_config(tmp_path, "--train.global_batch_size", "12", "--train.micro_batch_size", "4")
    *flags, length, more = memory_remedies(config)
    assert flags == ["--train.micro_batch_size 3", "--train.activation_checkpointing all"]
    assert (length, more) == ("--train.sequence_length 16", "several GPUs with --parallel.mode fsdp")
    # Two devices have six sequences each, and take three at a time.
    assert memory_remedies(config, 2)[0] == "--train.micro_batch_size 2"
    assert "--parallel.mode fsdp" in memory_remedies(config, 2)
    lowered = override(config, " ".join([*flags, length, "--train.micro_batch_size 1"]).split())
    assert memory_remedies(lowered) == ["--train.sequence_length 8", more]
    shared = override(config, ["--parallel.context", "2", "--train.sequence_length", "40"])
    assert memory_remedies(shared, 2)[0] == "--train.micro_batch_size 3"
    assert memory_remedies(shared, 4)[-2:] == ["--parallel.context 4", "--train.sequence_length 20"]
    assert memory_remedies(shared, 2)[-1] == "--train.sequence_length 20"


def test_processes_that_share_rows(tmp_path, monkeypatch):
    """Two of them train as many rows as one; of four GPUs all are used where the batch has rows for two pairs.

    A CPU takes as many as share a row; on one GPU they cannot be started.
    """
    config = make_config(tmp_path, "--parallel.context", "2", "--train.global_batch_size", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    gpu = torch.device("cuda")
    assert measured._processes(config, gpu) == 2
    assert measured._processes(override(config, ["--train.global_batch_size", "2"]), gpu) == 4
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert measured._processes(override(config, ["--train.global_batch_size", "3"]), gpu) == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert measured._processes(config, gpu) == 1
    need = need_of("tiny", config)
    assert (need.problem, need.processes) == ("", 2)
    assert need.step_seconds * need.tokens_per_second == pytest.approx(32)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_training_names_the_same(tmp_path, monkeypatch, capsys, error):
    def fail(step, parts):
        raise error

    before_step(monkeypatch, fail)
    config = make_config(tmp_path)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(config)
    assert all(remedy in str(caught.value) for remedy in memory_remedies(config))
    assert main(["train", str(tmp_path / "run.toml"), "--run.directory", str(tmp_path / "other")]) == 1
    assert "--train.micro_batch_size 1" in capsys.readouterr().err
