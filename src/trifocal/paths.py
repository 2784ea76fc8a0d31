"""Paths that the user gives, and paths in commands that the user types."""

import os
import shlex
import stat
from pathlib import Path

from trifocal.errors import UserError


def check_path_text(text: str, name: str = "the path") -> None:
    """Refuse a path that cannot be opened, or cannot be written into messages and logs.

    Args:
        text: The path.
        name: Name of the flag or key that gave it, for messages.

    Raises:
        UserError: If the path has a NUL character, or is not UTF-8 text.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name} {text!r} is not UTF-8 text; rename the file or folder") from None
    if "\0" in text:
        raise UserError(f"{name} {text!r} has a NUL character, which no file name may have")


def user_path(text: str | os.PathLike[str], name: str = "the path") -> Path:
    """The path that the user means, of something that is to be read or written now; see `expand_path`.

    Raises:
        UserError: If the system does not tell what is there, for want of permission for example; or see `expand_path`.
    """
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
    """The path that the user means: a leading `~` is a home folder. Nothing is looked up on the disk.

    Args:
        text: The path given.
        name: Name of the flag or key that gave it, for messages.

    Raises:
        UserError: If the path has a NUL character, is not UTF-8 text, or begins with an unknown user.
    """
    given = os.fspath(text)
    check_path_text(given, name)
    expanded = os.path.expanduser(given)  # noqa: PTH111 (that of pathlib raises RuntimeError for an unknown user)
    if expanded.startswith("~"):
        user = expanded[1:].partition("/")[0]
        raise UserError(f"{name} {given}: there is no user {user!r}; a folder of that name is ./{given}")
    path = Path(expanded)
    # Pathlib drops the "./" of "./~x"; a later reader would take "~x" for a home folder.
    return path.absolute() if str(path).startswith("~") else path


def shell_path(path: str | os.PathLike[str]) -> str:
    """A path as an argument of a command: quoted for a shell, and never taken for a flag."""
    text = os.fspath(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def read_small_file(path: str | os.PathLike[str], limit_bytes: int) -> bytes:
    """The whole content of a regular file that must be small, such as a config or a vocabulary.

    A named pipe or a device is refused without waiting for it, and a file of any size costs at most `limit_bytes` of
    memory.

    Args:
        path: The file; a link is followed.
        limit_bytes: Largest size.

    Raises:
        UserError: If it is no regular file, or larger than the limit.
        OSError: If it cannot be opened or read.
    """
    file = Path(path)
    if not stat.S_ISREG(file.stat().st_mode):
        raise UserError(f"{file} is no regular file")
    with file.open("rb") as opened:
        content = opened.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise UserError(f"{file} is too large: expected at most {limit_bytes:,} bytes")
    return content
