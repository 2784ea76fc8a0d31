"""Files that a command writes at its end."""

from trifocal.errors import UserError
from trifocal.paths import user_path


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
        file = user_path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a"):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
