"""The presets that come with the package."""

import re
import subprocess
import sys
import zipfile
from importlib import resources
from pathlib import Path

import pytest

from trifocal.cli import main
from trifocal.train import load_config
from trifocal.train.presets import presets, summary

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.toml"))


def test_the_package_has_every_file_of_configs() -> None:
    folder = resources.files("trifocal") / "configs"
    assert sorted(file.name for file in folder.iterdir()) == sorted(f"{name}.toml" for name in NAMES)
    assert list(presets()) == NAMES


def test_a_wheel_has_every_file_of_configs(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    # Where the repository lies, setuptools would leave its traces.
    for name in ("pyproject.toml", "README.md", "LICENSE", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "src" / "trifocal").mkdir(parents=True)
    for name in ("__init__.py", "_version.py", "py.typed"):
        (tmp_path / "src" / "trifocal" / name).symlink_to(ROOT / "src" / "trifocal" / name)
    (tmp_path / "src" / "trifocal" / "configs").symlink_to((ROOT / "src" / "trifocal" / "configs").readlink())
    code = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    (tmp_path / "dist").mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [wheel] = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in NAMES:
            shipped = archive.read(f"trifocal/configs/{name}.toml")
            assert shipped == (ROOT / "configs" / f"{name}.toml").read_bytes()


def test_new_prints_a_preset_that_trains_as_the_file_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "demo"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "my.toml").write_text(text)
    assert load_config(tmp_path / "my.toml") == load_config(ROOT / "configs" / "demo.toml")
    # So that any terminal and any shell can redirect it.
    assert all((ROOT / "configs" / f"{name}.toml").read_text().isascii() for name in NAMES)


def test_new_lists_the_presets_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in NAMES:
        assert re.fullmatch(rf"{name} +\S.{{20,}}", next(line for line in lines if line.startswith(f"{name} "))), name
        assert len(summary(name)) < 160


def test_an_unknown_preset_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "m7c_125"]) == 2
    assert capsys.readouterr().err == 'trifocal: unknown preset "m7c_125"; the nearest valid one is "m7c_125m"\n'


def test_the_demo_selects_a_part_of_what_it_sees() -> None:
    config = load_config(ROOT / "configs" / "demo.toml")
    geometry = config.model.geometry
    assert 4 * geometry.num_selected_blocks * geometry.selection_block_size <= config.train.sequence_length
