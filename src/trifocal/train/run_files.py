"""Names of a run's files and folders; deleting and flushing them so that a crash leaves no half of one."""

import contextlib
import os
import shutil
import uuid
from pathlib import Path

CONFIG_FILE = "config.toml"
RUN_FILE = ".trifocal_run"
"""In the folder of every run: a line with the format, and a line with a unique number."""
_RUN_LINE = "trifocal run, format 1\n"
PARTIAL = "partial_"
"""Prefix of folders that are incomplete."""


def mark_run(folder: Path) -> None:
    """Mark a folder as that of a run, if it is not marked."""
    if not is_run(folder):
        (folder / RUN_FILE).write_text(f"{_RUN_LINE}{uuid.uuid4()}\n")


def read_mark(folder: Path) -> str:
    """Read the mark of `mark_run`; empty if there is none."""
    try:
        return (folder / RUN_FILE).read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""


def is_run(folder: Path) -> bool:
    """Whether a folder is marked as that of a run: no other folder is ever replaced or deleted."""
    return read_mark(folder).startswith(_RUN_LINE)


def delete_contents(folder: Path) -> None:
    """Empty a folder and delete it, unless it is a link or a volume; what cannot be deleted stays."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        folder.rmdir()


def remove_folder(folder: Path) -> None:
    """Rename a folder and delete it, if it exists: a crash in between leaves no half of it under its name."""
    if folder.exists():
        shutil.rmtree(rename_to_remove(folder))


def rename_to_remove(folder: Path) -> Path:
    """Rename a folder that is to be deleted, so that a crash leaves no half of it under its name.

    Returns:
        The new path.
    """
    doomed = folder.with_name(f"{PARTIAL}removing_{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    return doomed


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
