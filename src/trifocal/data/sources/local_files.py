"""Files of a source: find them and open them."""

from __future__ import annotations

import bz2
import glob
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from trifocal.errors import UserError
from trifocal.paths import check_path_text, user_path

COMPRESSED: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""Function that opens a compressed file, by suffix."""
OTHER_COMPRESSED = {".zst", ".zip", ".lz4", ".7z", ".br", ".Z", ".tar", ".tgz"}
DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
"""Errors of damaged compressed files (bz2 raises OSError)."""


def find_files(source: str, path: str, suffixes: Sequence[str], *, compressed: bool = False) -> dict[str, Path]:
    """The files of a path, a folder or a glob.

    Args:
        source: The whole source string, for messages.
        path: A file; a folder, searched at every depth without hidden names and without folders in it that this user
            may not read; or a glob, `**` for any depth. A leading `~` is the home folder.
        suffixes: Suffixes of the files to take from a folder.
        compressed: Also take these suffixes followed by .gz, .bz2 or .xz.

    Returns:
        Path by name, sorted by name. Names are relative to the folder, so that moved data keep theirs.

    Raises:
        UserError: If there is no such file, a folder cannot be read, or a name is not UTF-8.
    """
    start = user_path(path, "data.source")
    if start.is_file():
        root, found = start.parent, [start]
    elif start.is_dir():
        root = start
        ends = tuple(suffix + packed for suffix in suffixes for packed in ("", *(COMPRESSED if compressed else ())))
        try:
            found = [
                file
                for folder, folders, files in os.walk(start, onerror=_unless_forbidden)
                for file in _visible(Path(folder), folders, files)
                if file.name.endswith(ends) and file.is_file()
            ]
        except OSError as error:  # A folder in it went away meanwhile.
            raise UserError(f"data.source {source}: {error.filename} cannot be read: {error.strerror}") from error
        if not found:
            raise UserError(
                f"data.source {source}: no {' or '.join(suffixes)} file in folder {path}; a glob such as "
                f"{path.rstrip('/')}/**/*.* reads other names"
            )
    elif glob.has_magic(path):
        # Path.glob takes no absolute pattern.
        found = [Path(name) for name in glob.glob(str(start), recursive=True) if Path(name).is_file()]  # noqa: PTH207
        if not found:
            raise UserError(f"data.source {source}: no file matches {path}")
        root = Path(os.path.commonpath([file.parent for file in found]))
    elif start.exists():
        raise UserError(f"data.source {source}: {path} is no regular file")
    else:
        raise UserError(f"data.source {source}: no such file or folder: {path}")
    for file in found:
        check_path_text(str(file), "data.source")
    return dict(sorted((file.relative_to(root).as_posix(), file) for file in found))


def _unless_forbidden(error: OSError) -> None:
    # Path.rglob would pass over every folder that cannot be read, from Python 3.13 on.
    if not isinstance(error, PermissionError):
        raise error


def _visible(folder: Path, folders: list[str], files: list[str]) -> list[Path]:
    """The files of a folder without hidden ones; hidden folders are taken out of the list, which `os.walk` follows."""
    folders[:] = [name for name in folders if not name.startswith(".")]
    return [folder / name for name in files if not name.startswith(".")]


def open_file(path: Path) -> BinaryIO:
    """A file's content, decompressed if its suffix is that of a compressed file.

    Raises:
        UserError: If it is compressed in another way.
    """
    if path.suffix in OTHER_COMPRESSED:
        raise UserError(f"{path}: {path.suffix} files are not read; unpack it, or compress it as .gz, .bz2 or .xz")
    if path.suffix in COMPRESSED:
        return cast(BinaryIO, COMPRESSED[path.suffix](path))
    return path.open("rb")


def sizes(files: dict[str, Path]) -> list[tuple[str, int]]:
    """Name and size in bytes of each file."""
    return [(name, file.stat().st_size) for name, file in files.items()]
