"""Every command of the docs is one that the programs take; nothing is run."""

import importlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
import tyro
from packaging.requirements import Requirement

import trifocal.cli.train as train_command
from tests.children import load_script
from tests.docs.pages import HISTORY, PAGES, ROOT, blocks, commands, name_of
from trifocal.cli import COMMANDS
from trifocal.cli.flags import parse_arguments
from trifocal.data.tokenizers import ByteTokenizer
from trifocal.fields import from_table
from trifocal.train.config import check
from trifocal.train.config.load import load_config, override
from trifocal.train.config.sections import RunConfig

CASES = [(name_of(page), line) for page in PAGES if page.name not in HISTORY for line in commands(page)]
BENCHMARKS = {f"benchmarks/{name}.py": name.upper() for name in ("attention", "kernels", "training", "decoding")}
# How the pages write something for the reader to fill in.
PLACEHOLDER = re.compile(r"[A-Z_]+(\.toml)?|…|\[.*|.*\]")


def take_train(arguments, monkeypatch):
    """The train command up to the point where training would start."""
    if arguments == ["--help"]:
        return
    showcase = load_config(ROOT / "configs/showcase.toml")
    started = []
    monkeypatch.setattr(train_command, "load_run", lambda directory: showcase)
    monkeypatch.setattr(train_command, "load_config", load_of_repository)
    monkeypatch.setattr(train_command, "_summary", lambda *_: "")
    monkeypatch.setattr(train_command, "train", lambda config, **_: started.append(config))
    monkeypatch.setattr(train_command, "resume", lambda _, *, config, **__: started.append(config))
    assert train_command.run(arguments) == 0
    [config] = started
    # Its settings fit one another; what this machine has is another matter.
    for of_machine in ("_check_precision", "_check_compiler", "_check_disk", "check_sinks"):
        monkeypatch.setattr(check, of_machine, lambda *_, **__: None)
    monkeypatch.setattr(check, "make_tokenizer", lambda *_, **__: ByteTokenizer())
    check.preflight(config, torch.device("cpu"), config.parallel.context)


def load_of_repository(path, overrides):
    # Without a file, the model of `model.from`, which is not there.
    known = path or "showcase"
    # The pages write my.toml for a file of the reader's, which trifocal new has printed.
    return override(
        load_config("showcase" if known == "my.toml" else ROOT / known if "/" in known else known), overrides
    )


def take_other(name, arguments):
    module = importlib.import_module(f"trifocal.cli.{name}")
    parse_arguments(getattr(module, f"{name.capitalize()}Arguments"), arguments, prog=f"trifocal {name}")


@pytest.mark.parametrize("page, line", CASES, ids=[" ".join(line)[:60] for _, line in CASES])
def test_command_is_taken(page, line, monkeypatch):
    # Redirections are the shell's, not the program's.
    program, *arguments = line[: line.index(">")] if ">" in line else line
    if program == "torchrun" and "trifocal" in arguments:
        program, *arguments = arguments[arguments.index("trifocal") :]
    if program == "trifocal":
        name, *rest = arguments
        if name.startswith("--"):
            assert name in ("--help", "--version")
            return
        assert name in COMMANDS
        if any(PLACEHOLDER.fullmatch(word) for word in rest):
            return
        if name == "train" and rest:
            take_train(rest, monkeypatch)
        elif rest:
            take_other(name, rest)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert arguments[0] in targets
    elif program == "python" and arguments[0] in BENCHMARKS:
        benchmark = getattr(load_script(arguments[0]), BENCHMARKS[arguments[0]])
        options = tyro.cli(benchmark.options, args=arguments[1:])
        for resolved in ("all_shapes", "cases"):
            assert getattr(options, resolved, lambda: True)()
    elif line[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extra in re.findall(r"(?:trifocal|\.)\[([\w,]+)\]", " ".join(arguments)):
            assert set(extra.split(",")) <= project["optional-dependencies"].keys()
    else:
        # Shell commands and scripts: the files of the repository that they name exist.
        for word in line:
            if re.match(r"(src|tests|docs|configs|benchmarks|\.ci)/", word):
                assert Path(ROOT / word.partition("::")[0]).exists(), word


def test_the_tests_are_installed_also_where_triton_does_not_exist():
    install = re.search(r"install .*\[dev\].*", (ROOT / "Makefile").read_text())[0]
    (triton,) = [word for word in shlex.split(install) if word.startswith("triton")]
    assert not Requirement(triton).marker.evaluate({"sys_platform": "darwin"})
    assert Requirement(triton).marker.evaluate({"sys_platform": "linux"})


SHARED = [
    (line[: line.index("trifocal")], line[line.index("trifocal") :])
    for _, line in CASES
    if line[0] == "torchrun" and "trifocal" in line and "--resume" not in line
]


@pytest.mark.parametrize("launcher, command", SHARED, ids=[" ".join(command) for _, command in SHARED])
def test_processes_can_share_the_batch_of_the_command(launcher, command):
    numbers = dict(word.split("=", 1) for word in launcher if re.fullmatch(r"--n\w[\w-]*=\d+", word))
    processes = int(numbers["--nproc-per-node"]) * int(numbers.get("--nnodes", 1))
    config = load_of_repository(command[2], command[3:])
    groups, rest = divmod(processes, config.parallel.context)
    assert rest == 0 and config.train.global_batch_size % groups == 0
    assert config.parallel.context == 1 or config.train.sequence_length % (2 * config.parallel.context) == 0


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=name_of)
def test_toml_blocks_are_configs(page):
    for body in blocks(page, "toml"):
        from_table(RunConfig, tomllib.loads(body), name_of(page))
