"""Finding the files that a path means, opening them, and telling their contents apart."""

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

COMPRESSED: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""What opens compressed files, by the end of their name."""
DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
"""What reading a damaged compressed file raises (bz2 raises OSError)."""
_NOT_READ = (".zst", ".zip", ".lz4", ".7z", ".tar")
# A file up to the first size is hashed whole; of a longer one so many pieces, the first and the last among them.
_WHOLE_BYTES = 1 << 20
_PIECES = 16
_PIECE_BYTES = 1 << 16


def find_files(source: str, path: str, suffixes: Sequence[str], *, compressed: bool = False) -> dict[str, Path]:
    """The files that a file's path, a folder or a glob means.

    Args:
        source: The whole source string, for messages.
        path: A file; a folder, searched at every depth without hidden names; or a glob, `**` for any depth. A
            leading `~` is the home folder.
        suffixes: What counts in a folder.
        compressed: Files with .gz, .bz2 or .xz behind count too.

    Returns:
        Path by name, sorted by name. Names are relative to the folder, so that moved data keep theirs.

    Raises:
        UserError: If there is no such file, none that holds anything, or one whose name is no text.
    """
    start = expand_home(path, f"data.source {source}")
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
    else:
        raise UserError(f"data.source {source}: no such file or folder: {path}")
    for file in found:
        check_name(str(file), f"data.source {source}")
        if file.suffix in _NOT_READ:
            raise UserError(f"data.source {source}: {file.name} must be unpacked first; .gz, .bz2 and .xz are read")
    if not any(file.stat().st_size for file in found):
        what = f"{path} is empty" if len(found) == 1 else f"all {len(found)} files of {path} are empty"
        raise UserError(f"data.source {source}: {what}")
    return dict(sorted((file.relative_to(root).as_posix(), file) for file in found))


def expand_home(path: str, what: str) -> Path:
    """A path that a person wrote, with `~` replaced.

    Args:
        path: The path.
        what: Where it was given, for messages.

    Raises:
        UserError: If it cannot be a path.
    """
    check_name(path, what)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{what}: {path}: {error}") from error


def check_name(path: str, what: str) -> None:
    """Refuse a path that holds a NUL or is not UTF-8: it cannot be opened, or not be written into messages and logs.

    Raises:
        UserError: Naming the path, with the odd characters escaped.
    """
    if "\0" in path:
        raise UserError(f"{what.translate({0: '�'})}: a path cannot hold a NUL character")
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        what, shown = ascii(what)[1:-1], ascii(path)
        raise UserError(f"{what}: the name {shown} is not UTF-8; rename it") from None


def open_file(path: Path) -> BinaryIO:
    """A file's content, decompressed where its name says that it is compressed."""
    if path.suffix in COMPRESSED:
        return cast(BinaryIO, COMPRESSED[path.suffix](path))
    return path.open("rb")


def sizes(files: dict[str, Path]) -> list[tuple[str, int]]:
    """Name and size in bytes of each file."""
    return [(name, file.stat().st_size) for name, file in files.items()]


def content_hash(path: Path) -> str:
    """Eight hexadecimal digits that change with a file's content.

    A file of up to 1 MiB is read whole. Of a longer one 16 pieces of 64 KiB are read, spread evenly from the first
    byte to the last: a change between them is not seen.

    Raises:
        OSError: If it cannot be read.
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
