"""The shape of the code: which room may import which, what an import costs, how long a file may be."""

import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.children import environment

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "trifocal").rglob("*.py"))


def python(code):
    """Run code in a fresh interpreter that sees the sources; what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    return done.stdout.strip()


def test_rooms_import_in_one_direction():
    """The contracts of pyproject.toml: arrows between rooms; reference and kernels never import each other."""
    command = Path(sys.executable).with_name("lint-imports")
    if not command.exists():
        command = Path(shutil.which("lint-imports") or pytest.skip("import-linter is not installed"))
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout
    assert "2 kept, 0 broken" in done.stdout


def test_every_room_has_its_place_in_the_contract():
    """A new folder without a place would be free to import anything."""
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in SOURCES if path.parent.parent.name == "trifocal"}
    assert rooms
    for room in rooms:
        assert re.search(rf"trifocal\.{room}\b", contract), room


LIBRARY = "trifocal.ops, trifocal.nn, trifocal.models, trifocal.generate"


def test_import_takes_no_triton_no_compiler_and_no_cuda():
    code = (
        f"import trifocal, {LIBRARY}, sys, torch; trifocal.nsa_attention; "
        "rooms = {'.'.join(name.split('.')[:2]) for name in sys.modules}; "
        "print(sorted(rooms & {'triton', 'torch._dynamo', 'torch._inductor'}), torch.cuda.is_initialized())"
    )
    assert python(code) == "[] False"


def test_public_names_are_there_after_import_and_nothing_is_loaded_before():
    code = (
        "import trifocal, sys; before = 'torch' in sys.modules; names = dir(trifocal); "
        "print(before, 'torch' in sys.modules, set(trifocal.__all__) <= set(names), "
        "trifocal.nn.NSAttention.__name__, trifocal.models.DecoderLM.__name__)"
    )
    assert python(code) == "False False True NSAttention DecoderLM"
    assert "nsa_attention" in python("import trifocal; help(trifocal)")


def test_every_room_can_be_imported_first():
    """In a fresh process each, forked after torch is loaded: another order of imports hides a circle."""
    rooms = sorted({path.parent.name for path in SOURCES if path.parent.parent.name == "trifocal"})
    code = (
        "import importlib, os, torch\n"
        f"for room in {rooms!r}:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        importlib.import_module(f'trifocal.{room}')\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0, room\n"
        "print('all')"
    )
    assert python(code) == "all"


def test_import_is_quick_beyond_torch():
    """Under 2 s of processor time beyond torch itself; the faster of two, as the first may meet a cold disk."""
    code = f"import torch, time; begin = time.process_time(); import {LIBRARY}; print(time.process_time() - begin)"
    assert min(float(python(code)) for _ in range(2)) < 2.0


def test_command_line_answers_without_torch():
    """`trifocal --help` is not worth waiting for."""
    assert python("import sys, trifocal.cli as cli; cli.main(['--help']); print('torch' in sys.modules)").endswith(
        "False"
    )


def test_optional_packages_are_imported_lazily():
    """Every module can be imported with the core dependencies alone."""
    optional = ("datasets", "pyarrow", "tokenizers", "transformers", "tensorboard", "plotly", "matplotlib", "triton")
    modules = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES
        if "triton" not in path.parts and path.name != "__main__.py"
    ]
    code = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({optional!r}))\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print('all')"
    )
    assert python(code) == "all"


def test_files_stay_readable():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert statistics.median(lengths.values()) < 200
    for path, length in lengths.items():
        kernel = "triton" in path.relative_to(ROOT).parts
        assert length <= (700 if kernel else 400), f"{path.relative_to(ROOT)} has {length} lines"


def test_every_public_module_says_what_it_is():
    for path in SOURCES:
        text = path.read_text(encoding="utf-8").lstrip()
        assert text.startswith('"""') or not text, f"{path.relative_to(ROOT)} has no docstring"
