"""The commands as a person types them: output, exit status, and one clear line for bad input."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.children import environment
from tests.train.tiny import before_step, write_config
from trifocal._version import __version__
from trifocal.cli import COMMANDS, main
from trifocal.cli.train import numbered
from trifocal.errors import UserError
from trifocal.train import run_logger
from trifocal.train.config.sections import RunConfig, RunSection

ENVIRONMENT = environment()


def refused(capsys, *arguments):
    """Run a command that must refuse: exit status 2, one line on standard error, no traceback."""
    capsys.readouterr()
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert re.fullmatch(r"trifocal: [^\n]+\n", output.err), output.err
    assert "Traceback" not in output.err + output.out
    return output.err


def test_a_closed_pipe_is_no_error(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    # Names in the working directory, such as a folder named wandb, are no packages, as for the command `trifocal`.
    (tmp_path / "difflib.py").write_text("raise SystemExit('shadowed')")
    command = [sys.executable, "-m", "trifocal", "--version"]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_an_encoding_without_a_character_is_no_error():
    command, variables = [sys.executable, "-m", "trifocal", "--help"], ENVIRONMENT | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=variables, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"") and b"usage: trifocal COMMAND ?" in done.stdout


def test_no_folder_for_temporary_files_is_said_in_a_line(capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    for command in ("train", "watch", "doctor"):
        assert "no folder for temporary files can be written; free space in /tmp" in refused(capsys, command)


def test_help_and_version(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.endswith(f"trifocal {__version__}\n")


def test_a_run_from_start_to_page(tmp_path, capsys):
    config = write_config(tmp_path)
    directory = tmp_path / "other"
    flags = ["--run.directory", str(directory), "--log.sample_interval_steps", "6", "--log.sample_tokens", "5"]
    assert main(["train", *flags, str(config)]) == 0
    text = capsys.readouterr().out
    assert f"finished 6 steps in {directory}" in text
    assert "validation loss" in text and "bits per byte" in text and "a sample:\n  | def " in text
    for advice in (
        f"trifocal generate {directory} --prompt",
        f"trifocal report {directory}",
        f"trifocal train --resume {directory} --train.steps 12",
        "trifocal check",
    ):
        assert advice in text
    assert main(["train", "--resume", str(directory), "--train.steps", "8"]) == 0
    assert "finished 8 steps" in capsys.readouterr().out
    assert main(["train", str(config), *flags, "--overwrite"]) == 0
    capsys.readouterr()
    assert main(["report", str(directory)]) == 0
    assert (directory / "report.html").stat().st_size > 1000
    assert str(directory / "report.html") in capsys.readouterr().out


BAD_TRAIN = [
    ([], "expected one TOML file or preset, got none"),
    (["absent.toml"], "cannot read absent.toml: No such file"),
    (["CONFIG", "--checkpoint", "step_1"], "--checkpoint goes with --resume"),
    (["CONFIG", "--resume", "RUN"], "--resume takes the run's own config"),
    (["--resume", "/nowhere"], "there is no run at /nowhere: no such folder"),
    (["--resume", "RUN", "--checkpoint", "step_7"], "has no checkpoint 'step_7'; it has step_00000004, step_00000006"),
]


@pytest.mark.parametrize(("arguments", "expected"), BAD_TRAIN, ids=lambda value: str(value)[:60])
def test_train_refuses_bad_input(tmp_path, run, capsys, arguments, expected):
    places = {"CONFIG": write_config(tmp_path), "RUN": run}
    filled = []
    for argument in arguments:
        for name, path in places.items():
            argument = argument.replace(name, str(path))
        filled.append(argument)
    before = (run / "config.toml").read_text()
    assert expected in refused(capsys, "train", *filled)
    assert (run / "config.toml").read_text() == before
    assert not (tmp_path / "run").exists(), "what was refused leaves no folder in the way of the next try"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "--prompt", "x"], "missing argument: RUN_DIR"),
        (["generate", "RUN"], "give the text to continue as --prompt TEXT, or a file of texts as --prompts FILE"),
        (["generate", "RUN", "--prompts", "y"], "--prompts FILE and --output OUT.jsonl go together"),
        (["generate", "RUN", "--prompt", "\udcff"], "--prompt is not UTF-8 text"),
        (
            ["generate", "RUN", "--prompt", "x", "--max-new-tokens", str(10**10)],
            "the prompt and its new tokens make 10,000,000,001, which do not fit into the memory of cpu",
        ),
        (["generate", "RUN", "--prompt", "x", "--top-p", "1.5"], "--top-p must be from 0 to 1, got 1.5"),
        (
            ["generate", "RUN", "--prompt", "x", "--samples", "4", "--max-sequences", "3"],
            "--max-sequences must be at least --samples, got 3 and 4",
        ),
        (["generate", "RUN", "--prompt", "x", "--seed", str(2**64)], f"--seed must fit 64 bits, got {2**64}"),
        (["generate", "RUN", "--prompt", "x", "--temprature", "1"], 'the nearest valid one is "--temperature"'),
        (["generate", "RUN", "def "], "unexpected argument 'def '; trifocal generate --help shows the flags"),
        (["trian"], 'unknown command "trian"; the nearest valid one is "train"'),
        (["new", "zzz"], 'unknown preset "zzz"; valid are base_125m, base_long, demo'),
    ],
    ids=lambda value: str(value)[:60],
)
def test_other_commands_refuse_bad_input(run, capsys, arguments, expected):
    assert expected in refused(capsys, *(str(run) if argument == "RUN" else argument for argument in arguments))


def test_generate_without_a_checkpoint_or_with_a_damaged_one(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "weights")
    (copy / "checkpoints" / "step_00000006" / "rank0.json").unlink()
    message = refused(capsys, "generate", str(copy), "--prompt", "a b")
    assert "rank0.json is missing" in message
    before = copy / "checkpoints" / "step_00000004"
    assert message.endswith(f"the newest intact one before it is {before}\n")
    # A reader takes the path that is named, from whatever the damaged one was reached.
    damaged = copy / "checkpoints" / "step_00000006"
    assert message == refused(capsys, "generate", str(damaged), "--prompt", "a b")
    assert message == refused(capsys, "convert", str(damaged), str(tmp_path / "converted"), "--to", "selected")
    assert main(["generate", str(before), "--prompt", "a b", "--max-new-tokens", "1"]) == 0
    capsys.readouterr()
    # No weights of a damaged checkpoint go further, also where they could be read.
    assert "rank0.json is missing" in refused(capsys, "export", str(copy), str(tmp_path / "exported"))
    assert not (tmp_path / "exported").exists()
    message = refused(capsys, "train", "--resume", str(copy))
    assert message.endswith(
        f"continue from the one before with: trifocal train --resume {copy} --checkpoint step_00000004\n"
    )
    shutil.rmtree(copy / "checkpoints")
    assert "has no checkpoint" in refused(capsys, "generate", str(copy), "--prompt", "x")
    assert "has no checkpoint" in refused(capsys, "train", "--resume", str(copy))
    (copy / "config.toml").write_text("[run\n")
    assert "is not valid TOML" in refused(capsys, "generate", str(copy), "--prompt", "x")


def test_a_full_disk_is_one_line(tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "run" / "env.json"))

    monkeypatch.setattr(run_logger, "write_environment", full)
    assert "No space left on device" in refused(capsys, "train", str(write_config(tmp_path)))


def test_a_run_that_goes_wrong_is_one_line_and_status_1(tmp_path, capsys, monkeypatch):
    """Where an evaluation looks at the model behind a step that was not sound, and that step is not saved."""

    def explode(step, arguments):
        if step == 3:
            next(arguments["loss_function"].parameters()).data.fill_(float("inf"))

    before_step(monkeypatch, explode)
    looks = ["--log.interval_steps", "5", "--evaluate.interval_steps", "3"]
    assert main(["train", str(write_config(tmp_path)), *looks]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(r"trifocal: step 3: loss nan is not finite; first parameter [^\n]+\n", error)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]
    assert '"evaluation"' not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_folder_of_a_sweep_gets_its_number(tmp_path, monkeypatch):
    config = RunConfig(run=RunSection(directory=str(tmp_path / "demo-{n}")))
    for number in (1, 2, 3):
        directory = Path(numbered(config).run.directory)
        assert directory == tmp_path / f"demo-{number}"
        directory.mkdir()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(UserError, match="under a launcher give the folder a name"):
        numbered(config)


@pytest.mark.parametrize("command", ["check", "doctor"])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    worked = []
    monkeypatch.setattr("trifocal.checks.registry.run_check", lambda *_: worked.append("check"))
    monkeypatch.setattr("trifocal.cli.doctor.examine", lambda *_, **__: worked.append("doctor"))
    assert main([command, "--json", str(tmp_path / "file" / "x.json")]) == 2
    assert re.fullmatch(r"trifocal: cannot write \S+/x\.json: .*\n", capsys.readouterr().err)
    assert main([command, "--json", str(tmp_path)]) == 2
    assert worked == []


def test_a_disk_that_fills_up_leaves_no_file(tmp_path, capsys):
    new = tmp_path / "check.json"
    arguments = ("check", "--device", "cpu", "--only", "unknown-flags", "--json")
    assert "cannot write /dev/full: No space left" in refused(capsys, *arguments, "/dev/full")
    assert "no-such-check" in refused(capsys, "check", "--only", "no-such-check", "--json", str(new))
    assert list(tmp_path.iterdir()) == []
    assert main([*arguments, str(new)]) == 0
    assert json.loads(new.read_text())["results"]
