"""Files of a source: find them, open them, hash their contents."""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import lzma
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from trifocal.errors import UserError
from trifocal.paths import check_path_text, user_path

COMPRESSED: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""Function that opens a compressed file, by suffix."""
DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
"""Errors of damaged compressed files (bz2 raises OSError)."""
_NOT_READ = (".zst", ".zip", ".lz4", ".7z", ".tar")
# A file up to the first size is hashed whole; of a longer one this many pieces, including the first and the last.
_WHOLE_BYTES = 1 << 20
_PIECES = 16
_PIECE_BYTES = 1 << 16


def find_files(source: str, path: str, suffixes: Sequence[str], *, compressed: bool = False) -> dict[str, Path]:
    """The files of a path, a folder or a glob.

    Args:
        source: The whole source string, for messages.
        path: A file; a folder, searched at every depth without hidden names; or a glob, `**` for any depth. A
            leading `~` is the home folder.
        suffixes: Suffixes of the files to take from a folder.
        compressed: Also take these suffixes followed by .gz, .bz2 or .xz.

    Returns:
        Path by name, sorted by name. Names are relative to the folder, so that moved data keep theirs.

    Raises:
        UserError: If there is no such file, all are empty, or a name is not UTF-8.
    """
    start = user_path(path, "data.source")
    if start.is_file():
        root, found = start.parent, [start]
    elif start.is_dir():
        root = start
        ends = tuple(suffix + packed for suffix in suffixes for packed in ("", *(COMPRESSED if compressed else ())))
        every = [file for file in start.rglob("*") if file.is_file()]
        every = [file for file in every if not any(p.startswith(".") for p in file.relative_to(root).parts)]
        found = [file for file in every if file.name.endswith(ends)]
        if not found:
            packed = [file.name for file in every if file.suffix in _NOT_READ]
            hint = (
                f"{packed[0]} must be unpacked first" if packed else f"a glob such as {path.rstrip('/')}/**/*.* reads"
            )
            hint += "" if packed else " other names"
            raise UserError(f"data.source {source}: no {' or '.join(suffixes)} file in folder {path}; {hint}")
    elif glob.has_magic(path):
        # Path.glob takes no absolute pattern.
        names = glob.glob(str(start), recursive=True)  # noqa: PTH207
        found = [Path(name) for name in names if Path(name).is_file()]
        if not found:
            raise UserError(f"data.source {source}: no file matches {path}")
        root = _common_folder(found)
    elif start.exists():
        raise UserError(f"data.source {source}: {path} is no regular file")
    else:
        raise UserError(f"data.source {source}: no such file or folder: {path}")
    for file in found:
        check_path_text(str(file), "data.source")
        if file.suffix in _NOT_READ:
            raise UserError(f"data.source {source}: {file.name} must be unpacked first; .gz, .bz2 and .xz are read")
    if not any(file.stat().st_size for file in found):
        what = f"{path} is empty" if len(found) == 1 else f"all {len(found)} files of {path} are empty"
        raise UserError(f"data.source {source}: {what}")
    return dict(sorted((file.relative_to(root).as_posix(), file) for file in found))


def open_file(path: Path) -> BinaryIO:
    """A file's content, decompressed if its suffix is that of a compressed file."""
    if path.suffix in COMPRESSED:
        return cast(BinaryIO, COMPRESSED[path.suffix](path))
    return path.open("rb")


def sizes(files: dict[str, Path]) -> list[tuple[str, int]]:
    """Name and size in bytes of each file."""
    return [(name, file.stat().st_size) for name, file in files.items()]


def content_hash(path: Path) -> str:
    """Eight hexadecimal digits that change with a file's content.

    A file of up to 1 MiB is read whole. Of a longer file, 16 pieces of 64 KiB are read, spread evenly from the first
    byte to the last: a change between them is missed.

    Raises:
        OSError: If the file cannot be read.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=4)
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
        else:
            for piece in range(_PIECES):
                file.seek((size - _PIECE_BYTES) * piece // (_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def _common_folder(found: list[Path]) -> Path:
    parents = [file.parent.parts for file in found]
    depth = 0
    while all(len(parts) > depth and parts[depth] == parents[0][depth] for parts in parents):
        depth += 1
    return Path(*parents[0][:depth])
