"""Files that a command writes at its end."""

import os
from pathlib import Path

from trifocal.errors import UserError
from trifocal.train.preflight import existing_folder


def check_output(path: str) -> None:
    """See before any work that a file can be written there; its folder is made where it is missing.

    Args:
        path: The file; empty for none.

    Raises:
        UserError: If it cannot be written.
    """
    if not path:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a"):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def check_output_folder(folder: Path) -> None:
    """See before any work that files can be written into a folder; nothing is made, for the work may yet be refused.

    Args:
        folder: The folder, or one that is to be made.

    Raises:
        UserError: If it is no folder, or there is no permission.
    """
    existing = existing_folder(folder)
    if not existing.is_dir():
        raise UserError(f"cannot write into {folder}: {existing} is not a folder")
    if not os.access(existing, os.W_OK):
        raise UserError(f"cannot write into {folder}: no permission to write in {existing}")
