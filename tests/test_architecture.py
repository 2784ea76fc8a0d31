"""The shape of the code: imports between packages and the cost of an import."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.children import environment

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "trifocal").rglob("*.py"))
FILES = {
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES
}


def test_packages_import_in_one_direction():
    """The contracts of pyproject.toml: arrows point one way; oracle, reference and kernels stay apart."""
    command = Path(sys.executable).with_name("lint-imports")
    if not command.exists():
        command = Path(shutil.which("lint-imports") or pytest.skip("import-linter is not installed"))
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout
    assert "4 kept, 0 broken" in done.stdout


def test_every_package_has_its_place_in_the_contract():
    """A new folder without a place would be free to import anything."""
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = {path.parent.name for path in SOURCES if path.parent.parent.name == "trifocal"}
    assert packages
    for package in packages:
        assert re.search(rf"trifocal\.{package}\b", contract), package


def imported(name, path, files):
    """Those that run when a file imports others: they, and the `__init__.py` of their packages, unless it lies there.

    Imports inside functions and for types count.
    """
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= members & files.keys() or {node.module}
    packages = {
        ".".join(parts[:length]) for parts in (other.split(".") for other in names) for length in range(1, len(parts))
    }
    return (names | {package for package in packages if not name.startswith(f"{package}.")}) & files.keys() - {name}


def circles(arrows):
    """The arrows from file to file that are left when all are gone that lead to a dead end or come from one."""
    while True:
        starts, ends = {start for start, _ in arrows}, {end for _, end in arrows}
        left = {(start, end) for start, end in arrows if start in ends and end in starts}
        if left == arrows:
            return sorted(left)
        arrows = left


def test_no_file_imports_another_in_a_circle():
    arrows = {(start, end) for start, path in FILES.items() for end in imported(start, path, FILES)}
    assert circles(arrows) == []


def test_packages_are_imported_when_they_are_used():
    """Neither PyTorch for `trifocal --help`, nor Triton or CUDA for the library; only `hf` needs optional packages."""
    optional = ("datasets", "huggingface_hub", "pyarrow", "tokenizers", "transformers", "tensorboard", "plotly")
    modules = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES
        if {"triton", "hopper", "hf"}.isdisjoint(path.relative_to(ROOT).parts) and path.name != "__main__.py"
    ]
    code = (
        "import contextlib, importlib, io, sys, trifocal, trifocal.cli as cli\n"
        "with contextlib.redirect_stdout(io.StringIO()): cli.main(['--help'])\n"
        "print('torch' in sys.modules, set(trifocal.__all__) <= set(dir(trifocal)))\n"
        f"sys.modules.update(dict.fromkeys({optional!r}))\n"
        "import torch, trifocal.ops, trifocal.nn, trifocal.models, trifocal.inference\n"
        "print('triton' in sys.modules, torch.cuda.is_initialized())\n"
        "from trifocal import DecoderLM, Geometry, NSAttention, generate, load_model, load_tokenizer\n"
        "from trifocal import nsa, nsa_attention\n"
        "print(trifocal.nn.NSAttention is NSAttention, trifocal.generate is generate)\n"
        "sys.modules.update(triton=None, matplotlib=None)\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "try:\n"
        "    import trifocal.hf\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "help(trifocal)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    *found, text = done.stdout.split("\n", 4)
    assert found == [
        "False True", "False False", "True True", "trifocal.hf needs an extra: pip install 'trifocal[hf]'",
    ]  # fmt: skip
    assert "nsa_attention" in text


def test_every_public_module_says_what_it_is():
    for path in SOURCES:
        text = path.read_text(encoding="utf-8").lstrip()
        assert text.startswith('"""') or not text, f"{path.relative_to(ROOT)} has no docstring"
