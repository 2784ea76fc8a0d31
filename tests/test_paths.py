"""Paths as people give them, and as they paste them."""

import errno
import os
import shlex
from pathlib import Path

import pytest

from trifocal.errors import UserError
from trifocal.paths import expand_path, read_file, read_json, read_text, read_toml, shell_path, user_path


def test_home_is_expanded_only_at_the_beginning(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert user_path("~/runs/a") == user_path(Path("~/runs/a")) == Path("/home/ada/runs/a")
    assert user_path("runs/~") == Path("runs/~")
    odd = user_path("./~/a~")
    assert odd == Path.cwd() / "~" / "a~" and user_path(str(odd)) == odd


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("a\0b", r"--to 'a\\x00b' has a NUL character"),
        (os.fsdecode(b"\xff"), r"--to '\\udcff' is not UTF-8 text"),
        (None, "--to must be text or a pathlib.Path, got NoneType"),
        (b"a", "--to must be text or a pathlib.Path, got bytes"),
        ("~nobody_of_that_name/a", r"no user 'nobody_of_that_name'; .* \./~nobody_of_that_name/a"),
    ],
)
def test_what_no_path_can_be_is_refused(given, says):
    with pytest.raises(UserError, match=says):
        user_path(given, "--to")


def test_what_cannot_be_looked_at_is_refused(tmp_path, monkeypatch):
    """From Python 3.14 on, pathlib takes it for absent."""
    with pytest.raises(UserError, match=r"^--to x{300}: File name too long$"):
        user_path("x" * 300, "--to")
    file = tmp_path / "a"
    for path in (tmp_path, file, file / "in a file"):
        assert user_path(path) == path
        file.touch()
    stat = os.stat

    def denied(path, **options):
        if str(path).startswith(f"{tmp_path}/"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", denied)
    for path in (tmp_path, file):
        with pytest.raises(UserError, match=f"^--to {path}: Permission denied$"):
            user_path(path, "--to")
        assert expand_path(path) == path


@pytest.mark.parametrize("path", ["-x", "a b", "it's"])
def test_a_path_in_a_command_is_one_argument_and_no_flag(path):
    (argument,) = shlex.split(shell_path(path))
    assert Path(argument) == Path(path) and not argument.startswith("-")


def test_a_file_that_is_read_whole_is_regular_and_bounded(tmp_path):
    path, pipe = tmp_path / "a.json", tmp_path / "pipe"
    path.write_bytes(b"12345678")
    assert read_file(path, 8) == read_file(str(path)) == b"12345678"
    with pytest.raises(UserError, match=r"a\.json is too large: expected at most 7 bytes$"):
        read_file(path, 7)
    os.mkfifo(pipe)
    for other in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(UserError, match=f"^{other} is no regular file$"):
            read_file(other, 8)
    with pytest.raises(UserError, match=f"^cannot read {tmp_path}/missing: No such file or directory$"):
        read_file(tmp_path / "missing")


@pytest.mark.parametrize(
    ("read", "content", "says"),
    [
        (read_text, b"caf\xe9", r"is not UTF-8 text \(byte 3\)"),
        (read_json, b"[" * 100_000, "is not valid JSON: it is nested too deeply"),
        (read_json, b"[]", "must hold one JSON object, got list"),
        (read_toml, b"seed = ", "is not valid TOML: Invalid value"),
        (read_toml, b"#" * 2**16 + b"\n", "is too large"),
    ],
)
def test_a_file_of_another_kind_is_refused_in_a_line(tmp_path, read, content, says):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path} {says}") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    path = tmp_path / "file"
    for read, content, value in (
        (read_text, "é", "é"),
        (read_json, '{"a": "é"}', {"a": "é"}),
        (read_toml, "a = 1\n", {"a": 1}),
    ):
        path.write_text(content, encoding="utf-8-sig")
        assert read(path) == value
