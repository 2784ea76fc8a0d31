"""The script that trains models side by side: its trainings differ in the attention alone, and its tables add up."""

import json
import sys
from dataclasses import replace

import pytest

from tests.children import load_script
from trifocal.cli import main
from trifocal.train import load_config


@pytest.fixture(scope="module")
def script():
    return load_script("benchmarks/quality.py")


PARTS = ["production", "production_8192", "production_32768", "seeds", "long", "recall", "needle"]


def of_stage(training):
    path, *flags = training.arguments(resume=False)
    return load_config(path, flags)


@pytest.mark.parametrize("part", PARTS)
def test_trainings_of_a_part_differ_in_the_attention_alone(script, part, tmp_path):
    found = script.trainings(part, tmp_path, [], [], {})
    assert len(found) == len(script.PARTS[part].seeds) * len(script.PARTS[part].variants)
    # The weights of a training on short rows are not there.
    configs = [of_stage(replace(one, short=None)) for one in found]
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
        assert (one.short is not None) == (part in ("long", "needle", "production_32768"))
        if one.short is not None:
            short = of_stage(replace(one.short, short=None))
            assert short.train.sequence_length < config.train.sequence_length
            assert (short.model, short.data.seed) == (config.model, config.data.seed)
        lengths = [int(stage.flags["train.sequence_length"]) for stage in one.stages]
        assert lengths == sorted(set(lengths))


def test_long_rows_start_from_another_part(script, tmp_path):
    """Which is trained, evaluated and written down for itself; nothing of its text is in the long rows."""
    (one,) = script.trainings("production_32768", tmp_path, [5], ["mix"], {})
    (first,) = script.trainings("production_8192", tmp_path, [5], ["mix"], {})
    assert one.short == first and first.folder == tmp_path / "production_8192/mix-5"
    texts = [stage.flags["data.source"] for stage in (first, one)]
    assert texts == [f"parquet:{tmp_path / name}.parquet#text" for name in ("short", "long")]


TINY = {
    "model.num_layers": 1, "model.dim": 16, "model.num_heads": 2, "model.head_dim": 8, "model.value_dim": 8,
    "model.mlp_dim": 16, "model.vocab_size": 32, "data.source": "recall:4", "train.sequence_length": 32,
    "train.global_batch_size": 2, "train.micro_batch_size": 2, "train.steps": 2, "train.precision": "fp32",
    "train.cuda_graphs": "false", "train.compile": "false", "run.device": "cpu", "evaluate.sequences": 4,
    "log.telemetry_interval_steps": 0, "checkpoint.interval_steps": 2, "evaluate.interval_steps": 2,
}  # fmt: skip


@pytest.fixture
def commands(script, monkeypatch):
    """The commands of the script, which run in this process."""
    commands = []

    def run_here(pairs, **settings):
        commands.extend(arguments for arguments, _ in pairs)
        for _, log in pairs:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
        return [main(arguments) for arguments, _ in pairs]

    monkeypatch.setattr(script, "run_all", run_here)
    return commands


def test_a_part_trains_evaluates_and_writes_its_tables(script, commands, tmp_path, monkeypatch):
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


def test_each_stage_starts_from_the_weights_of_the_one_before(script, commands, tmp_path, monkeypatch):
    tiny = {name: str(value) for name, value in TINY.items()}
    lengths = [{"train.sequence_length": length, "data.source": "recall:2"} for length in ("16", "24")]
    part = replace(script.PARTS["needle"], flags=tiny, short=tuple(lengths), evaluate=())
    monkeypatch.setitem(script.PARTS, "needle", part)
    arguments = ["quality.py", "--part", "needle", "--variants", "dense", "--gpus", "0", "--directory", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--output", str(tmp_path)])
    assert script.main() == 0
    folders = [str(tmp_path / "needle" / name) for name in ("dense-1337-16", "dense-1337-24", "dense-1337")]
    assert [command[command.index("--run.directory") + 1] for command in commands] == folders
    starts = [command[command.index("--model.from") + 1] for command in commands if "--model.from" in command]
    assert starts == folders[:2]
    (file,) = tmp_path.glob("quality_needle_*.md")
    assert file.read_text().count("weights before") == 2
