"""The script that trains models side by side: its trainings differ in the attention alone, and its tables add up."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import warm
from tests.children import ROOT, environment, load_script, wait_for_end
from trifocal.cli import main
from trifocal.train import RunConfig, load_config


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/quality.py")


PARTS = ["production", "production_8192", "production_32768", "seeds", "long", "recall", "needle"]


@pytest.mark.parametrize("part", PARTS)
def test_trainings_of_a_part_differ_in_the_attention_alone(script: ModuleType, part: str, tmp_path: Path) -> None:
    found = script.trainings(part, tmp_path, [], [], {})
    assert len(found) == len(script.PARTS[part].seeds) * len(script.PARTS[part].variants)
    # The weights of a training on short rows are not there.
    alone = [replace(one, short=None) for one in found]
    configs = [load_config(path, flags) for path, *flags in (one.arguments(resume=False) for one in alone)]
    names = ("attention", "layer_types", "selection", "sliding_window", "shared_kv", "compressor")
    own = {f"model.{name}" for name in (*names, "chooser")} | {"optimizer.index_lr_factor"}
    for one, config in zip(found, configs, strict=True):
        first = next(other for other in found if other.seed == one.seed)
        differ = {name for name in one.flags if one.flags[name] != first.flags.get(name)}
        assert differ <= own and (one is first) == (not differ)
        geometry = config.model.geometry
        if one.variant == "window":
            keys = geometry.window_size + geometry.num_selected_blocks * geometry.selection_block_size
            assert (config.model.attention, config.model.sliding_window) == ("window", keys)
            assert keys < config.train.sequence_length, "a window that sees all is no control"
        assert config.model.shared_kv == one.variant.startswith("shared")
        assert (config.model.compressor == "mlp") == (one.variant in ("learned", "index"))
        if one.variant.startswith("mix"):
            fourth = {"mix": "selected", "mix-dense": "dense"}[one.variant]
            assert config.model.attention_of_layers == ("window", "window", "window", fourth) * 3
            assert config.model.sliding_window == 512 and config.model.has_index == (one.variant == "mix")
        assert config.run.seed == config.data.seed == one.seed
        assert config.train.steps == one.steps and config.checkpoint.interval_steps < config.train.steps


def of_stage(training: Any) -> RunConfig:
    path, *flags = training.arguments(resume=False)
    return load_config(path, flags)


@pytest.mark.parametrize("part", ["long", "needle", "production_32768"])
def test_short_rows_train_the_same_model(script: ModuleType, part: str, tmp_path: Path) -> None:
    for one in script.trainings(part, tmp_path, [], [], {}):
        short, long = of_stage(one.short), of_stage(replace(one, short=None))
        assert short.train.sequence_length < long.train.sequence_length
        assert short.model == long.model
        assert short.data.seed == long.data.seed


def test_long_rows_start_from_another_part(script: ModuleType, tmp_path: Path) -> None:
    """Which is trained, evaluated and written down for itself; nothing of its text is in the long rows."""
    (one,) = script.trainings("production_32768", tmp_path, [5], ["mix"], {})
    (first,) = script.trainings("production_8192", tmp_path, [5], ["mix"], {})
    assert one.short == first and first.folder == tmp_path / "production_8192/mix-5"
    texts = [stage.flags["data.source"] for stage in (first, one)]
    assert texts == [f"parquet:{tmp_path / name}.parquet#text" for name in ("short", "long")]


def test_flags_win_over_the_part(script: ModuleType, tmp_path: Path) -> None:
    extra = {"train.steps": "80", "data.source": "builtin"}
    (one,) = script.trainings("long", tmp_path, [5], ["random"], extra)
    config = of_stage(replace(one, short=None))
    assert (config.train.steps, config.schedule.warmup_steps, config.run.seed) == (80, 4, 5)
    assert config.data.source == "builtin" and config.model.selection == "random"


TINY = {
    "model.num_layers": 1, "model.dim": 16, "model.num_heads": 2, "model.head_dim": 8, "model.value_dim": 8,
    "model.mlp_dim": 16, "model.vocab_size": 32, "data.source": "recall:4", "train.sequence_length": 32,
    "train.global_batch_size": 2, "train.micro_batch_size": 2, "train.steps": 2, "train.precision": "fp32",
    "train.cuda_graphs": "false", "train.compile": "false", "run.device": "cpu", "evaluate.sequences": 4,
    "log.telemetry_interval_steps": 0, "checkpoint.interval_steps": 2, "evaluate.interval_steps": 2,
}  # fmt: skip


@pytest.fixture
def commands(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the script, which run in this process."""
    commands: list[list[str]] = []

    def run_here(pairs: Any, **settings: Any) -> list[int]:
        commands.extend(arguments for arguments, _ in pairs)
        for _, log in pairs:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
        return [main(arguments) for arguments, _ in pairs]

    monkeypatch.setattr(script, "run_all", run_here)
    return commands


def test_a_part_trains_evaluates_and_writes_its_tables(
    script: ModuleType, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = script.PARTS["recall"]
    short = (("--only", "recall", "loss", "position", "--samples", "2", "--pairs", "2", "4"),)
    monkeypatch.setitem(script.PARTS, "recall", replace(part, evaluate=short))
    flags = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    arguments = ["quality.py", "--part", "recall", "--directory", str(tmp_path / "runs"), "--output", str(tmp_path)]
    arguments += ["--variants", "dense", "window", "--seeds", "1", "2", "--gpus", "0"]
    monkeypatch.setattr(sys, "argv", [*arguments, *flags])
    assert script.main() == 0
    (file,) = tmp_path.glob("quality_recall_*.json")
    content = json.loads(file.read_text())
    assert [(row["variant"], row["seed"], row["steps"]) for row in content["rows"]] == [
        ("dense", 1, 2), ("window", 1, 2), ("dense", 2, 2), ("window", 2, 2),
    ]  # fmt: skip
    losses = {(row["variant"], row["seed"]): row["validation_loss"] for row in content["rows"]}
    assert content["rows"][0]["tokens"] == 2 * 2 * 32 and len(content["rows"][0]["curve"]) == 1
    means = {row["variant"]: row for row in content["means"]}
    apart = [losses["window", seed] - losses["dense", seed] for seed in (1, 2)]
    assert means["window"]["above_dense"] == pytest.approx(sum(apart) / 2)
    assert means["window"]["standard_error_of_that"] == pytest.approx(abs(apart[0] - apart[1]) / 2)
    assert means["dense"]["above_dense"] == 0
    assert {(row["variant"], row["pairs"]) for row in content["recall"]} == {
        (variant, pairs) for variant in ("dense", "window") for pairs in (2, 4)
    }
    assert [(row["variant"], row["seed"]) for row in content["loss_by_position"]] == list(losses)
    assert {"0-63"} <= content["recall_by_distance"][0].keys()
    assert "## Loss by position" in file.with_suffix(".md").read_text()

    # All trainings are over: nothing is trained again.
    commands.clear()
    monkeypatch.setattr(sys, "argv", [*arguments, "--resume", *flags])
    assert script.main() == 0
    assert {command[0] for command in commands} == {"evaluate"}


def test_needles_start_from_the_weights_of_short_haystacks(
    script: ModuleType, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = script.PARTS["needle"]
    assert int(part.short["train.sequence_length"]) < int(part.flags["train.sequence_length"])
    few = (("--only", "needle", "--lengths", "32", "--depths", "1", "--samples", "1"),)
    monkeypatch.setitem(script.PARTS, "needle", replace(part, evaluate=few))
    tiny = TINY | {"data.source": "needle:1"}
    flags = [word for name, value in tiny.items() for word in (f"--{name}", str(value))]
    arguments = ["quality.py", "--part", "needle", "--directory", str(tmp_path / "runs"), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--variants", "dense", "--gpus", "0", *flags])
    assert script.main() == 0
    assert [command[0] for command in commands] == ["train", "train", "evaluate"]
    short, whole = tmp_path / "runs/needle/dense-1337-short", tmp_path / "runs/needle/dense-1337"
    assert [str(short) in command for command in commands] == [True, True, False]
    assert load_config(whole / "config.toml").model.from_ == str(short)
    (row,) = json.loads(next(tmp_path.glob("quality_needle_*.json")).read_text())["rows"]
    assert (row["variant"], row["steps"]) == ("dense", 2)

    # A training on short rows that is not over: the other one does not begin.
    commands.clear()
    monkeypatch.setattr(script, "run_all", lambda pairs, **settings: [0] * len(pairs))
    other = ["--directory", str(tmp_path / "other"), "--variants", "dense", "--gpus", "0"]
    monkeypatch.setattr(sys, "argv", [*arguments[:3], *other, *flags])
    assert script.main() == 0
    assert not (tmp_path / "other").exists()


def test_sigterm_ends_the_trainings(tmp_path: Path) -> None:
    """They save and end; those that wait for a place do not begin."""
    flags = (
        "--run.device cpu --train.precision fp32 --train.compile false --train.cuda_graphs false --train.steps 10000 "
        "--train.global_batch_size 1 --train.micro_batch_size 1 --model.num_layers 1 --model.dim 32 "
        "--model.num_heads 2 --model.mlp_dim 32 --log.interval_steps 1"
    )
    what = "--part recall --gpus 0 --jobs 1 --variants sparse dense"
    script = str(ROOT / "benchmarks" / "quality.py")
    command = [sys.executable, script, *what.split(), "--directory", str(tmp_path), *flags.split()]
    process = warm.popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    begun = tmp_path / "recall" / "sparse-1337" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (begun.exists() and '"step":2,' in begun.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert wait_for_end(process, 40) == 143
    assert "which is saved" in (tmp_path / "recall" / "sparse-1337.log").read_text()
    assert not (tmp_path / "recall" / "dense-1337").exists()
