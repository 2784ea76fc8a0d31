"""What files and folders of a run are called; folders that are there whole or not at all, also after a crash."""

import os
import shutil
from pathlib import Path

CONFIG_FILE = "config.toml"
PARTIAL = "partial_"
"""How the names of what is not whole begin."""


def delete(path: Path) -> None:
    """Delete a file, a link, or a folder with all that it holds; where there is nothing, nothing happens."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder, if it is there; after a crash in the middle nothing is left under its name."""
    if folder.exists():
        shutil.rmtree(rename_to_remove(folder))


def rename_to_remove(folder: Path) -> Path:
    """Give a folder the name under which it is deleted; a crash in the middle of that leaves no half of it elsewhere.

    Returns:
        Where it is now.
    """
    doomed = folder.with_name(f"{PARTIAL}removing_{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    return doomed


def flush_folder(folder: Path) -> None:
    """Have the names in a folder on the disk for good."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
