"""Paths that a person gives, and paths in commands that a person is to type."""

import os
import shlex
from pathlib import Path

from trifocal.errors import UserError


def user_path(text: str | os.PathLike[str], name: str = "the path") -> Path:
    """The path that a person means: a `~` at its beginning is a home folder.

    Args:
        text: As it was given.
        name: Of the flag or key that gave it, for messages.

    Raises:
        UserError: If no file can have that name here: it has a NUL, is not UTF-8 text, or begins with an unknown user.
    """
    given = os.fspath(text)
    try:
        given.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name} {given!r} is not UTF-8 text; rename that folder, or choose another") from None
    if "\0" in given:
        raise UserError(f"{name} {given!r} has a NUL character, which no file name may have")
    expanded = os.path.expanduser(given)  # noqa: PTH111 (that of pathlib raises RuntimeError for an unknown user)
    if expanded.startswith("~"):
        user = expanded[1:].partition("/")[0]
        raise UserError(f"{name} {given}: there is no user {user!r}; a folder of that name is ./{given}")
    path = Path(expanded)
    # Pathlib drops the "./" of "./~x", which must not be taken for a home folder when it is written and read again.
    return path.absolute() if str(path).startswith("~") else path


def shell_path(path: str | os.PathLike[str]) -> str:
    """A path as an argument of a command: quoted for a shell, and never taken for a flag."""
    text = os.fspath(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)
