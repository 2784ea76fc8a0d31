"""Paths that the user gives, paths in commands that the user types, and files that are read whole."""

import errno
import json
import os
import shlex
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trifocal.errors import UserError, one_line

MAX_FILE_BYTES = 2**28
"""Largest file that is read whole: the vocabularies of the largest tokenizers have a tenth of it."""
MAX_TOML_BYTES = 2**16
"""Python's parser takes time that grows with the square of a key's length."""


def check_path_text(text: str, name: str = "the path") -> None:
    """Refuse a path that no file can have, or no message: with a NUL character, or not UTF-8 text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name} {text!r} is not UTF-8 text; rename the file or folder") from None
    if "\0" in text:
        raise UserError(f"{name} {text!r} has a NUL character, which no file name may have")


def user_path(text: str | os.PathLike[str], name: str = "the path") -> Path:
    """The path that the user means, see `expand_path`; UserError if the system does not tell whether it is there."""
    path = expand_path(text, name)
    # From Python 3.14 on, `exists`, `is_file` and `is_dir` say no in that case. The dot asks for access to a folder.
    try:
        os.stat(os.path.join(path, "."))  # noqa: PTH116, PTH118 (pathlib drops the dot)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise UserError(f"{name} {os.fspath(text)}: {error.strerror}") from error
    return path


def expand_path(text: str | os.PathLike[str], name: str = "the path") -> Path:
    """The path that the user means, `~` expanded, without a look at the disk; UserError, with `name`, if it is none."""
    if not isinstance(text, str | os.PathLike):
        raise UserError(f"{name} must be text or a pathlib.Path, got {type(text).__name__}")
    given = os.fspath(text)
    check_path_text(given, name)
    expanded = os.path.expanduser(given)  # noqa: PTH111 (that of pathlib raises RuntimeError for an unknown user)
    if expanded.startswith("~"):
        user = expanded[1:].partition("/")[0]
        raise UserError(f"{name} {given}: there is no user {user!r}; a folder of that name is ./{given}")
    path = Path(expanded)
    # Pathlib drops the "./" of "./~x"; a later reader would take "~x" for a home folder.
    return path.absolute() if str(path).startswith("~") else path


def check_run_folder(path: Path) -> None:
    """Raise UserError unless the path of a run is that of a folder."""
    if not path.is_dir():
        reason = "it is a file" if path.exists() else "no such folder"
        raise UserError(f"there is no run at {path}: {reason}")


def shell_path(path: str | os.PathLike[str]) -> str:
    """A path as an argument of a command: quoted for a shell, and never taken for a flag."""
    text = os.fspath(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make a UserError, with the path, of what the system says against reading there."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {os.fspath(path)}: {os.strerror(error.errno or errno.EIO)}") from error


def read_file(path: str | os.PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The content of a regular file of at most `max_bytes`; a named pipe is refused without waiting for it."""
    file = Path(path)
    with reading(file):
        if not stat.S_ISREG(file.stat().st_mode):
            raise UserError(f"{file} is no regular file")
        with file.open("rb") as opened:
            content = opened.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UserError(f"{file} is too large: expected at most {max_bytes:,} bytes")
    return content


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> str:
    """The text of a file in UTF-8, without a byte order mark; as `read_file`, and refuses what is not UTF-8."""
    try:
        # Some editors begin a file with a byte order mark.
        return read_file(path, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{os.fspath(path)} is not UTF-8 text (byte {error.start})") from error


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text in UTF-8; raises ValueError for every text that Python cannot read."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file; as `read_text`, and refuses any other content."""
    text = read_text(path)
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UserError(f"{os.fspath(path)} is not valid JSON: {one_line(error)}") from error
    if not isinstance(values, dict):
        raise UserError(f"{os.fspath(path)} must hold one JSON object, got {type(values).__name__}")
    return values


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a TOML file; as `read_text`, and refuses what is not TOML."""
    text = read_text(path, MAX_TOML_BYTES)
    try:
        return tomllib.loads(text)
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = one_line(error)
    raise UserError(f"{os.fspath(path)} is not valid TOML: {reason}; trifocal new base_125m prints an example")
