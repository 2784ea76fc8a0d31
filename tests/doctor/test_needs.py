"""The needs of configurations on machines of some size, and the change that makes them fit."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.train.tiny import make_config

from trifocal.doctor import needs
from trifocal.doctor.needs import USABLE_SHARE, Machine, advice, need_of, setup_of
from trifocal.generate.paged_cache import memory_for_caches, plan_cache
from trifocal.models import parameter_count, training_memory
from trifocal.train import load_config
from trifocal.train.arguments import override

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 2**30
RATES = {"fp32": 1e11, "bf16": 2e11}


def cpu(gib, rates=RATES):
    available = None if gib is None else int(gib * GIB)
    return Machine(
        device=torch.device("cpu"), processes=1, available_bytes=available, rates=rates, workspace_bytes=2**28
    )


@pytest.fixture
def gpus(monkeypatch):
    """Machines with GPUs of a size, which are never asked anything."""
    monkeypatch.setattr(needs, "_backend", lambda config, device: "triton")
    monkeypatch.setattr(needs, "preflight", lambda *arguments: None)
    monkeypatch.setattr(needs, "choose_device", lambda wanted: torch.device("cuda"))
    monkeypatch.setattr(needs, "installed", lambda module: True)
    monkeypatch.setattr(needs, "choose_mode", lambda wanted, group, model: ("ddp" if wanted == "auto" else wanted, ""))

    def make(gib, count=1):
        return Machine(
            device=torch.device("cuda"), processes=count, available_bytes=int(gib * GIB), rates=RATES, workspace_bytes=0
        )

    return make


def flags_of(text):
    """The flags of an advice, as `override` takes them."""
    return text.partition(" on ")[0].split()


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONFIGS.glob("*.toml"))])
def test_every_preset_on_a_large_gpu(gpus, name):
    pytest.importorskip("triton")
    config = load_config(CONFIGS / f"{name}.toml")
    need = need_of(name, config, gpus(140))
    assert need.fits and not need.advice and not need.problem
    assert need.parameters == parameter_count(config.model)
    assert need.memory.total > 16 * need.parameters
    assert need.step_seconds is not None and need.step_seconds > 0
    assert need.run_seconds == need.step_seconds * config.train.steps


def test_caches_of_generate(gpus):
    """The production model, bf16: selected keys and values of a token, and its share of a compressed block, by hand."""
    pytest.importorskip("triton")
    config = load_config(CONFIGS / "m7c_125m.toml")
    token = 12 * 2 * (64 + 64) * 2 * (1 + 1 / 16)
    need = need_of("m7c", config, gpus(80))
    assert need.cache_token_bytes == token
    # The rings: 511 + 8 window tokens, and 31 + 8 raw ones.
    ring = 12 * 2 * (64 + 64) * 2 * (519 + 39)
    free = int(80 * GIB * 0.92) - 6 * need.parameters - 3 * GIB
    assert need.cached_sequences == tuple(free // int(length * token + ring) for length in (8192, 65536))
    dense = need_of("m7c", override(config, ["--model.attention", "dense"]), gpus(80))
    assert dense.cache_token_bytes == 12 * 2 * (64 + 64) * 2
    assert need_of("m7c", config, gpus(1)).cached_sequences == (0, 0)


def test_generate_takes_what_the_doctor_counts(gpus):
    """One more sequence has no pages of its own: they are shared out among fewer, or fewer run."""
    pytest.importorskip("triton")
    config = load_config(CONFIGS / "m7c_125m.toml")
    (count, _) = need_of("m7c", config, gpus(10)).cached_sequences
    free = memory_for_caches(config.model, torch.bfloat16, torch.device("cuda"), 10 * GIB)
    pages = 8192 // 256
    for sequences, enough in ((count, True), (count + 1, False)):
        plan = plan_cache(config.model, torch.bfloat16, 8192, free_bytes=free, sequences=sequences)
        assert (plan.num_pages >= sequences * pages) == enough


def test_advice_is_the_smallest_change_that_fits(gpus):
    """Smaller micro-batches first, then recomputed activations; and the advice is right."""
    pytest.importorskip("triton")
    config = override(
        load_config(CONFIGS / "m7c_125m.toml"),
        ["--train.activation_checkpointing", "none", "--train.micro_batch_size", "4"],
    )
    for gib, expected in (
        (3.6, "--train.micro_batch_size 2"),
        (2.45, "--train.micro_batch_size 1"),
        (2.0, "--train.activation_checkpointing all --train.micro_batch_size 2"),
        (1.7, "--train.activation_checkpointing all --train.micro_batch_size 1"),
    ):
        machine = gpus(gib)
        usable = int(machine.available_bytes * USABLE_SHARE)
        assert not need_of("m7c", config, machine).fits
        text = advice(config, machine, usable)
        assert text == expected
        changed = override(config, flags_of(text))
        assert need_of("m7c", changed, machine).fits
        assert need_of("m7c", config, machine).advice == text


def test_compiled_layers_need_less(gpus):
    pytest.importorskip("triton")
    eager, compiled = (
        override(
            load_config(CONFIGS / "m7c_125m.toml"),
            ["--train.activation_checkpointing", "none", "--train.compile", which],
        )
        for which in ("false", "true")
    )
    assert need_of("m7c", compiled, gpus(80)).memory.total < 0.95 * need_of("m7c", eager, gpus(80)).memory.total


def test_sharding_over_the_gpus_here(gpus):
    pytest.importorskip("triton")
    config = override(load_config(CONFIGS / "wide_1b3.toml"), ["--parallel.mode", "ddp"])
    machine = gpus(16, 8)
    need = need_of("wide", config, machine)
    assert (need.fits, need.mode, need.processes) == (False, "ddp", 8)
    assert "--parallel.mode fsdp" in need.advice
    assert need_of("wide", override(config, flags_of(need.advice)), machine).fits


def test_more_gpus_than_there_are(gpus):
    pytest.importorskip("triton")
    config = load_config(CONFIGS / "wide_1b3.toml")
    need = need_of("wide", config, gpus(16))
    assert need.fits is False
    assert "--parallel.mode fsdp on" in need.advice and need.advice.endswith("such GPUs")
    count = int(need.advice.split()[-3])
    changed = override(config, flags_of(need.advice))
    assert changed.train.global_batch_size % (changed.train.micro_batch_size * count) == 0
    shared = setup_of(changed, gpus(16), count, "fsdp")
    assert training_memory(changed.model, shared).total <= 16 * GIB * USABLE_SHARE
    fewer = setup_of(changed, gpus(16), count // 2, "fsdp")
    assert training_memory(changed.model, fewer).total > 16 * GIB * USABLE_SHARE


def test_shorter_sequences_on_a_cpu(tmp_path):
    config = override(make_config(tmp_path), ["--train.sequence_length", "8192"])
    need = need_of("tiny", config, cpu(1.5))
    assert need.fits is False
    assert re.search("--train.micro_batch_size 1 --train.sequence_length (2048|4096)$", need.advice)
    assert need_of("tiny", override(config, flags_of(need.advice)), cpu(1.5)).fits


def test_nothing_helps(tmp_path):
    need = need_of("tiny", make_config(tmp_path), cpu(0.01))
    assert need.fits is False and need.advice == "a smaller model, or more memory"


def test_unknown_memory_and_speed(tmp_path):
    need = need_of("tiny", make_config(tmp_path), cpu(None, {}))
    assert need.cached_sequences is None and need.cache_token_bytes > 0
    assert (need.fits, need.step_seconds, need.run_seconds, need.advice) == (None, None, None, "")


def test_time_goes_with_work(tmp_path):
    """Twice the sequences take twice as long; twice the speed half."""
    config = make_config(tmp_path)
    twice = replace(config, train=replace(config.train, global_batch_size=2 * config.train.global_batch_size))
    once, more = (need_of("tiny", each, cpu(8)).step_seconds for each in (config, twice))
    assert more == pytest.approx(2 * once)
    fast = cpu(8, {name: 2 * rate for name, rate in RATES.items()})
    assert need_of("tiny", config, fast).step_seconds == pytest.approx(once / 2)


def test_missing_packages_of_a_source(tmp_path, monkeypatch):
    monkeypatch.setattr(needs, "installed", lambda module: False)
    config = override(make_config(tmp_path), ["--data.source", "fineweb-edu"])
    need = need_of("tiny", config, cpu(8))
    assert "fineweb-edu" in need.problem and need.remedy == "pip install 'trifocal[data]'"


def test_what_preflight_refuses(tmp_path):
    """With the flag that its message names."""
    config = override(make_config(tmp_path), ["--train.steps", "5000", "--checkpoint.interval_steps", "0"])
    need = need_of("tiny", config, cpu(8))
    assert "checkpoint.interval_steps" in need.problem
    cuda = override(make_config(tmp_path), ["--run.device", "cuda"])
    if not torch.cuda.is_available():
        assert "PyTorch sees no GPU" in need_of("tiny", cuda, cpu(8)).problem


def test_here():
    machine = Machine.here(RATES)
    assert machine.processes >= 1 and machine.workspace_bytes > 0
    assert machine.available_bytes is None or machine.available_bytes > 0
