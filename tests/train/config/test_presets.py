"""The presets that come with the package."""

import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trifocal.cli import main
from trifocal.fields import dotted_fields
from trifocal.models import DecoderLM
from trifocal.models.conversion import MIX
from trifocal.train import RunConfig, load_config
from trifocal.train.config import check
from trifocal.train.config.load import comment, override, presets, summary

ROOT = Path(__file__).parents[3]
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.toml"))


def test_a_wheel_has_every_file_that_is_no_python(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    # Where the repository lies, setuptools would leave its traces.
    for name in ("pyproject.toml", "README.md", "LICENSE", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "src" / "trifocal").mkdir(parents=True)
    for name in ("__init__.py", "_version.py", "py.typed"):
        (tmp_path / "src" / "trifocal" / name).symlink_to(ROOT / "src" / "trifocal" / name)
    (tmp_path / "src" / "trifocal" / "configs").symlink_to((ROOT / "src" / "trifocal" / "configs").readlink())
    for name in ("demo_model", "report", "serve"):
        (tmp_path / "src" / "trifocal" / name).symlink_to(ROOT / "src" / "trifocal" / name)
    code = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    (tmp_path / "dist").mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [wheel] = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in NAMES:
            shipped = archive.read(f"trifocal/configs/{name}.toml")
            assert shipped == (ROOT / "configs" / f"{name}.toml").read_bytes()
        package = ROOT / "src" / "trifocal"
        others = [path for name in ("demo_model", "report", "serve") for path in (package / name).glob("*.*")]
        assert {"model.safetensors", "page.css", "page.js", "page.html"} <= {path.name for path in others}
        for path in others:
            assert archive.read(f"trifocal/{path.relative_to(package)}") == path.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_new_prints_every_key_with_a_comment_and_trains_as_the_preset_does(tmp_path, monkeypatch, capsys, name):
    assert main(["new", name]) == 0
    text = capsys.readouterr().out
    # So that any terminal and any shell can redirect it.
    assert text.isascii()
    lines = text.splitlines()
    keys = [index for index, line in enumerate(lines) if re.match(r"\w+ = ", line)]
    assert len(keys) == len(dotted_fields(RunConfig))
    assert all(lines[index - 1].startswith("# ") for index in keys)
    assert not [line for line in lines[lines.index("") :] if "  " in line]
    (tmp_path / "my.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    config = load_config(name)
    assert load_config("my.toml") == config == load_config(ROOT / "configs" / f"{name}.toml")
    # The pattern of a mix is printed, which fits another number of layers.
    (tmp_path / "my.toml").write_text(text.replace(f"num_layers = {config.model.num_layers}\n", "num_layers = 4\n"))
    assert load_config("my.toml").model.attention_of_layers == (4 * config.model.attention_of_layers)[:4]
    # A path that exists comes before a preset.
    (tmp_path / name).write_text("[run]\nseed = 5\n")
    assert load_config(name).run.seed == 5


def test_new_lists_the_presets_with_a_line_each(capsys):
    assert main(["new"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, path in presets().items():
        assert re.fullmatch(rf"{name} +\S.{{20,}}", next(line for line in lines if line.startswith(f"{name} "))), name
        assert len(summary(path)) < 160


def test_an_unknown_preset_is_refused_with_the_nearest(capsys):
    assert main(["new", "m7c_125"]) == 2
    assert capsys.readouterr().err == 'trifocal: unknown preset "m7c_125"; the nearest valid one is "m7c_125m"\n'
    assert main(["train", "showcas"]) == 2
    assert capsys.readouterr().err.endswith('preset "showcas"; the nearest valid one is "showcase"\n')
    assert main(["train", "nowhere/showcase.toml"]) == 2
    assert capsys.readouterr().err.endswith("no such file; for the preset of this name write showcase\n")


@pytest.mark.parametrize("name", NAMES)
def test_another_attention_is_one_key_away(name, monkeypatch):
    monkeypatch.setattr(check, "state_bytes", lambda config: (0, 0))
    preset = load_config(name)
    production = name.startswith(("m7c", "wide", "base"))
    assert preset.model.has_index == (production or name in ("demo", "python"))
    # The reports' model and the paper's layer keep the paper's attention; the recommended ones are mixes.
    mixed = name.startswith(("wide", "base", "demo", "python"))
    kinds = MIX * (preset.model.num_layers // 4) if mixed else ("nsa",) * preset.model.num_layers
    assert preset.model.attention_of_layers == kinds
    for key, value in (("chooser", "compressed"), ("attention", "dense"), ("attention", "window")):
        # This machine need not have bf16 or a compiler.
        here = ["--train.precision", "fp32", "--train.compile", "false"]
        config = load_config(name, [f"--model.{key}", value, *here])
        assert config.train.choice_weight(config.model) == 0 and not config.model.has_index
        assert config.model.attention_of_layers == (kinds if key == "chooser" else (value,) * len(kinds))
        back = {"layer_types": preset.model.layer_types, key: getattr(preset.model, key)}
        assert replace(config.model, **back) == preset.model
        check.preflight(config, torch.device("cpu"))
        with torch.device("meta"):
            DecoderLM(config.model)


def test_the_second_stage_of_long_rows_is_the_same_model():
    """But for the folder, which the first stage makes."""
    [line] = re.findall("^# trifocal train base_long (--model.from .*)$", comment(presets()["base_long"]), re.MULTILINE)
    first = load_config("base_long")
    second = override(first, line.split())
    assert second.model == first.model and second.model.from_ == first.run.directory != second.run.directory
    assert (second.train.sequence_length, second.optimizer.learning_rate) == (32768, first.optimizer.learning_rate / 2)
    rows = (first.train.global_batch_size, second.train.global_batch_size)
    assert rows[0] * first.train.sequence_length == rows[1] * second.train.sequence_length
