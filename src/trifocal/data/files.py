"""Finding the files that a path means."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from trifocal.errors import UserError


def find_files(source: str, path: str, suffixes: Sequence[str]) -> dict[str, Path]:
    """The files that a file's path, a folder or a glob means.

    Args:
        source: The whole source string, for messages.
        path: A file; a folder, searched at every depth without hidden names; or a glob, `**` for any depth.
        suffixes: What counts in a folder.

    Returns:
        Path by name, sorted by name. Names are relative to the folder, so that moved data keep theirs.

    Raises:
        UserError: If there is no such file, or none that holds anything.
    """
    place = Path(path).expanduser()
    if place.is_file():
        root, found = place.parent, [place]
    elif place.is_dir():
        root = place
        found = [file for file in place.rglob("*") if file.suffix in suffixes and file.is_file()]
        found = [file for file in found if not any(p.startswith(".") for p in file.relative_to(root).parts)]
        if not found:
            raise UserError(
                f"data.source {source}: no {' or '.join(suffixes)} file in folder {path}; "
                f"a glob such as {path.rstrip('/')}/**/*.* reads other names"
            )
    elif glob.has_magic(path):
        # Path.glob takes no absolute pattern.
        names = glob.glob(str(place), recursive=True)  # noqa: PTH207
        found = [Path(name) for name in names if Path(name).is_file()]
        if not found:
            raise UserError(f"data.source {source}: no file matches {path}")
        root = _common_folder(found)
    else:
        raise UserError(f"data.source {source}: no such file or folder: {path}")
    if not any(file.stat().st_size for file in found):
        what = f"{path} is empty" if len(found) == 1 else f"all {len(found)} files of {path} are empty"
        raise UserError(f"data.source {source}: {what}")
    return dict(sorted((file.relative_to(root).as_posix(), file) for file in found))


def sizes(files: dict[str, Path]) -> list[tuple[str, int]]:
    """Name and size in bytes of each file: what tells the data of a resumed run from others."""
    return [(name, file.stat().st_size) for name, file in files.items()]


def _common_folder(found: list[Path]) -> Path:
    parents = [file.parent.parts for file in found]
    depth = 0
    while all(len(parts) > depth and parts[depth] == parents[0][depth] for parts in parents):
        depth += 1
    return Path(*parents[0][:depth])
