"""Configurations that must fail are refused before any work; doubtful ones get a note."""

import os
import shutil

import pytest
import torch

from tests.train.tiny import before_step, make_config
from trifocal.errors import UserError
from trifocal.models import DecoderLM
from trifocal.train import resume, train
from trifocal.train.checkpoint.folders import checkpoint_path
from trifocal.train.config.check import choose_device, disk_bytes, preflight, state_bytes

CPU = torch.device("cpu")


MIXED = ("--data.source", "builtin", "text:x", "--data.weights_after", "1,2")
INDEX = ("--model.chooser", "index")
SHORT = ("--train.only", "chooser", "--train.sequence_length", "24", "--log.sample_interval_steps", "0")
GRADIENTS = ("--trace.what", "gradients")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--train.steps", "1001", "--checkpoint.interval_steps", "0"), "would lose everything in a crash"),
        (("--model.vocab_size", "256"), r"vocab_size 256 is smaller than the 257 tokens of data\.tokenizer \"bytes\""),
        (("--data.validation_fraction", "0"), "nothing to evaluate on"),
        (("--data.validation_fraction", "1e-9"), "has no document to validate on"),
        (("--train.activation_checkpointing", "1:3"), "the model has 2 layers"),
        (("--model.backend", "triton"), r"model\.backend is \"triton\": .*use \"auto\" or \"reference\""),
        (("--log.sample_interval_steps", "1", "--data.source", "synthetic"), "there is no text to sample"),
        (("--log.sample_interval_steps", "1", "--model.selection", "random"), "there is nothing to sample"),
        (("--run.directory", __file__ + "/run"), r"cannot make run\.directory \S+\.py/run: Not a directory"),
        (("--data.source", "text:/nowhere/at/all"), "nowhere"),
        (("--log.sample_prompt", "x" * 65536), "reads its config.toml up to 65,536; shorten log.sample_prompt$"),
        (("--data.source", "builtin", "text:/nowhere/at/all"), "nowhere"),
        ((*MIXED, "--data.change_step", "6"), r"within the run of 6 steps: set data\.change_step above 0 and below 6"),
        (MIXED, r"below 6, now 0, or schedule\.kind to \"wsd\""),
        (("--train.choice_loss_weight", "1"), 'model.chooser is "compressed", and the loss teaches an "index"; set it'),
        ((*INDEX, "--train.choice_loss_weight", "0"), "set train.choice_loss_weight above 0"),
        (
            (*INDEX, "--train.choice_loss_weight", "1", "--model.attention", "dense"),
            "choice_loss_weight is 1, but no layer chooses blocks; set it to 0",
        ),
        (("--train.only", "chooser"), "trains only the index, and the model has none; set model.chooser"),
        ((*INDEX, *SHORT, "--model.attention", "window"), "trains only the index, and no layer chooses blocks"),
        ((*INDEX, *SHORT), "the blocks cover all 24 tokens of .*such as --train.sequence_length 96"),
        ((*GRADIENTS, "--trace.steps", "5:7,3:4"), r"trace\.steps must be ranges"),
        ((*GRADIENTS, "--trace.steps", "0:3"), r"of steps, which count from 1, .*got \"0:3\""),
        (("--trace.what", "memory", "--trace.steps", "1:102"), "are 101 steps; memory can record 100 at once"),
        ((*GRADIENTS, "--train.cuda_graphs", "true"), "see nothing with train.cuda_graphs"),
        (
            (*MIXED, "--schedule.kind", "wsd", "--schedule.decay_fraction", "1"),
            r"below 6, now 0, or lower schedule\.decay_fraction",
        ),
    ],
)
def test_a_run_that_cannot_end_well_is_refused_before_any_work(tmp_path, flags, expected):
    with pytest.raises(UserError, match=expected) as caught:
        train(make_config(tmp_path, *flags))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_a_run_continues_only_where_its_checkpoints_can_be_written(tmp_path, monkeypatch):
    train(make_config(tmp_path, "--train.steps", "2"))
    checkpoints = tmp_path / "run" / "checkpoints"
    allowed = os.access
    # Permissions do not bind root.
    monkeypatch.setattr(os, "access", lambda path, mode: path != checkpoints and allowed(path, mode))
    with pytest.raises(UserError, match=r"no permission to write in \S+/run/checkpoints"):
        resume(tmp_path / "run", config=make_config(tmp_path, "--train.steps", "4"))


def test_processes_share_the_global_batch(tmp_path):
    preflight(make_config(tmp_path), CPU, num_processes=2)
    with pytest.raises(UserError, match=r"size 4 is not a multiple of 3 processes; the next one is .* 6$"):
        preflight(make_config(tmp_path), CPU, num_processes=3)


@pytest.mark.parametrize(
    ("whole", "most", "groups", "at_once"), [(4, 4, 1, 4), (4, 4, 2, 2), (12, 4, 2, 3), (7, 4, 1, 1)]
)
def test_micro_batches_divide_the_share_of_a_process(tmp_path, whole, most, groups, at_once):
    flags = ("--train.global_batch_size", str(whole), "--train.micro_batch_size", str(most))
    config = make_config(tmp_path, *flags)
    assert config.train.sequences_at_once(groups) == at_once


def test_processes_that_share_sequences_need_equal_chunks(tmp_path):
    def check(num_processes, *flags):
        preflight(make_config(tmp_path, *flags), CPU, num_processes=num_processes)

    two = ("--parallel.context", "2")
    check(2, *two, "--train.micro_batch_size", "4")
    check(4, *two)
    for count, started in ((1, "1 process was"), (3, "3 processes were")):
        with pytest.raises(UserError, match=rf"context is 2, and {started} started; start a multiple of 2 \(torchrun"):
            check(count, *two)
    with pytest.raises(
        UserError, match=r"length 34 does not cut into the 4 equal chunks .*--train\.sequence_length 36$"
    ):
        check(2, *two, "--train.sequence_length", "34")
    with pytest.raises(UserError, match=r"not a multiple of 3 groups of 2 processes; the next one is .* 6$"):
        check(6, *two)


def test_bf16_needs_hardware_that_has_it(tmp_path, monkeypatch):
    config = make_config(tmp_path, "--train.precision", "bf16")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": True})
    preflight(config, CPU)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    with pytest.raises(UserError, match=r"has no bf16 arithmetic; use --train.precision fp32"):
        preflight(config, CPU)


def test_compiling_needs_a_compiler(tmp_path, monkeypatch):
    config = make_config(tmp_path, "--train.compile", "true")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UserError, match="needs a C\\+\\+ compiler"):
        preflight(config, CPU)


@pytest.mark.parametrize("flags", [(), ("--optimizer.kind", "muon"), ("--train.only", "chooser")], ids=str)
def test_the_state_is_what_a_training_keeps(tmp_path, monkeypatch, flags):
    """Muon keeps one number a weight of its matrices, AdamW two, and a frozen weight has none and no gradient."""
    config = make_config(tmp_path, *INDEX, "--train.sequence_length", "64", "--train.steps", "2", *flags)
    found = {}

    def look(step, parts):
        optimizer = parts["optimizer"]
        moments = [one for state in optimizer.state.values() for name, one in state.items() if name != "step"]
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        found[step] = sum(4 * one.numel() for one in moments), sum(4 * one.numel() for one in gradients)

    before_step(monkeypatch, look)
    train(config)
    weights = sum(4 * parameter.numel() for parameter in DecoderLM(config.model).parameters())
    assert state_bytes(config) == (weights + found[2][0], found[2][1])


def test_a_disk_too_small_for_the_checkpoints(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    needed = disk_bytes(config)
    # Two that are kept and one being written, of 12 bytes a parameter.
    assert needed == 3 * 12 * sum(parameter.numel() for parameter in DecoderLM(config.model).parameters())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    preflight(config, CPU)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(UserError, match=r"the checkpoints need .* or keep fewer \(checkpoint\.keep_last"):
        preflight(config, CPU)
    # `trifocal sparsify` keeps one, and has no flag for it.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    fewer = make_config(tmp_path, "--checkpoint.keep_last", "1")
    with pytest.raises(UserError, match=r"make room there$"):
        preflight(fewer, CPU)
    # Checkpoints of a run that continues are deleted behind the next one; those of another run are not.
    for step in (2, 4, 6):
        path = checkpoint_path(tmp_path / "run" / "checkpoints", step)
        path.mkdir(parents=True)
        (path / "weights").write_bytes(bytes(needed // 3))
    for free, begins in ((needed // 3 - 1, False), (needed // 3, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        with pytest.raises(UserError, match=r"make room there$"):
            preflight(fewer, CPU, begins=begins)
    preflight(fewer, CPU, begins=False)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(UserError, match="PyTorch sees no GPU"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto").type == choose_device("cuda").type == "cuda"
    assert choose_device("cpu") == choose_device(CPU) == CPU
    for other in ("gpu", "cuda:1"):
        with pytest.raises(UserError, match=r'the device must be "auto", "cpu" or "cuda", got'):
            choose_device(other)


def test_notes_say_what_is_fine_but_notable(tmp_path):
    assert preflight(make_config(tmp_path), CPU)[1] == []
    [note] = preflight(make_config(tmp_path, "--train.sequence_length", "8"), CPU)[1]
    assert "3 selected blocks of 8 tokens cover the whole sequence of 8" in note
    assert preflight(make_config(tmp_path, "--train.sequence_length", "3", "--model.attention", "dense"), CPU)[1] == []
