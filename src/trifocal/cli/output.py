"""Files that a command writes at its end."""

from pathlib import Path

from trifocal.errors import UserError


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
