"""Files of a source: find them and open them."""

from __future__ import annotations

import contextlib
import glob
import gzip
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from trifocal.errors import UserError, one_line
from trifocal.paths import check_path_text, user_path

OTHER_COMPRESSED = {".bz2", ".xz", ".zst", ".zip", ".lz4", ".7z", ".br", ".z", ".tar", ".tgz"}
_KINDS_NAMED = 5


def find_files(
    source: str, path: str, suffixes: Sequence[str], *, compressed: bool = False
) -> tuple[dict[str, Path], str]:
    """The regular files of a path, a folder at any depth, or a glob, sorted, by names relative to their folder, so that
    moved data keep theirs. In a folder, those with a suffix, if `compressed` also followed by .gz; and a list of what
    else is there, such as `2 .zst, 1 .json`.
    """
    start, left_out = user_path(path, "data.source"), ""
    if start.is_file():
        root, found = start.parent, [start]
    elif start.is_dir():
        root = start
        ends = tuple(suffix + packed for suffix in suffixes for packed in (("", ".gz") if compressed else ("",)))
        files = _files_under(source, start)
        # A link to nothing may have been a folder of such files: it is refused below.
        found = [file for file in files if file.name.lower().endswith(ends) or not file.exists()]
        others = Counter(sorted(file.suffix.lower() or "without suffix" for file in set(files).difference(found)))
        left_out = ", ".join(f"{count:,} {kind}" for kind, count in others.most_common(_KINDS_NAMED))
        left_out += ", …" if len(others) > _KINDS_NAMED else ""
        if not found:
            raise UserError(
                f"data.source {source}: no {' or '.join(suffixes)} file in folder {path} (it has "
                f"{left_out or 'none'}); a glob such as {path.rstrip('/')}/**/*.* reads other names"
            )
    elif glob.has_magic(path):
        # Path.glob takes no absolute pattern.
        found = [Path(name) for name in glob.glob(str(start), recursive=True) if not Path(name).is_dir()]  # noqa: PTH207
        if not found:
            raise UserError(f"data.source {source}: no file matches {path}")
        root = Path(os.path.commonpath([file.parent for file in found]))
    elif start.exists():
        raise UserError(f"data.source {source}: {path} is no regular file")
    else:
        raise UserError(f"data.source {source}: no such file or folder: {path}")
    for file in found:
        check_path_text(str(file), "data.source")
        if not file.exists():
            raise _cannot_read(source, str(file), "a link to nothing")
        if not file.is_file():
            raise _cannot_read(source, str(file), "no regular file")
        if not os.access(file, os.R_OK):
            raise _cannot_read(source, str(file), "no permission")
    return dict(sorted((file.relative_to(root).as_posix(), file) for file in found)), left_out


def _cannot_read(source: str, path: str, reason: str | None) -> UserError:
    return UserError(f"data.source {source}: {path} cannot be read ({reason}); mend it, or name the others by a glob")


def _files_under(source: str, start: Path) -> list[Path]:
    """The files at every depth, without hidden names; a folder with several links to it is read once."""

    def refuse(error: OSError) -> None:
        raise _cannot_read(source, error.filename, error.strerror) from error

    found, seen = [], set()
    # Path.rglob would pass over every folder that cannot be read, from Python 3.13 on.
    for folder, folders, files in os.walk(start, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        # Sorted, so that every machine finds the folder under the same name.
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        found += [] if real in seen else [Path(folder, name) for name in files if not name.startswith(".")]
        seen.add(real)
    return found


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file's content, unpacked if its name ends in .gz; UserError where it is damaged."""
    suffix = path.suffix.lower()
    if suffix in OTHER_COMPRESSED:
        raise UserError(f"{path}: {suffix} files are not read; unpack it, or compress it as .gz")
    try:
        if suffix == ".gz" and path.stat().st_size == 0:
            # Python reads it as no text.
            raise EOFError("it has 0 bytes")
        with cast(BinaryIO, gzip.open(path)) if suffix == ".gz" else path.open("rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is a damaged {path.suffix} file: {one_line(error)}") from error


def sizes(files: dict[str, Path]) -> list[tuple[str, int]]:
    """Name and size in bytes of each file."""
    return [(name, file.stat().st_size) for name, file in files.items()]
