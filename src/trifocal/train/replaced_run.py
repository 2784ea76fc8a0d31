"""The run that `--overwrite` replaces: kept beside the new one until the new one's first step has ended.

Until then the new run may still fail: its data may not be readable, its model may not fit, its loss may not be finite.
So the old folder is only renamed. For a run in `NAME`:

| `NAME` | `.NAME.replaced` | state |
|---|---|---|
| a run | | nothing is being replaced |
| absent, or a start whose first step has not ended | the replaced run, whole | `restore_replaced` puts it back |

One rename leads from each state to the next, and nothing is copied: a kill or a full disk leaves one of the two, and
every start begins with `restore_replaced`. A folder is renamed to `.NAME.deleting` before it is deleted. The process
that replaces a run holds the locks of both folders, so that no other start restores the old one.
"""

import shutil
from pathlib import Path

from trifocal.errors import UserError
from trifocal.paths import shell_path
from trifocal.runlog.whole_files import is_partial
from trifocal.train.lock import LOCK_FILE, RunLock
from trifocal.train.run_files import CONFIG_FILE, RUN_FILE, flush_folder, is_run


def replaced_path(folder: Path) -> Path:
    """Path of the replaced run, while the start that replaces it has not ended its first step."""
    return _beside(folder, ".{}.replaced")


def failed_path(folder: Path) -> Path:
    """Path to which `restore_replaced` moves the folder of a start that did not end its first step."""
    return _beside(folder, "{}.failed")


def has_replaced(folder: Path) -> bool:
    """Whether a run in this folder is being replaced, or was when its process died."""
    return is_run(replaced_path(folder))


def path_after_restore(folder: Path) -> Path:
    """Path of the run that `restore_replaced` would leave in the folder."""
    return replaced_path(folder) if has_replaced(folder) else folder


def replaced_note(folder: Path) -> str:
    """The end of a message about a folder without a run: where the replaced one is; empty if there is none."""
    if not has_replaced(folder):
        return ""
    place = replaced_path(folder)
    return f" (the run that was there before is in {place}, and is put back by the next trifocal train there)"


def replace_run(folder: Path, lock: RunLock) -> None:
    """Rename the folder of a run aside, and make an empty one in its place.

    Args:
        folder: Of the run; a link to it stays one.
        lock: Of the folder, taken; takes that of the new folder too.

    Raises:
        UserError: If the folder cannot be renamed; it is where it was.
        OSError: If the new folder cannot be made; `restore_replaced` puts the run back.
    """
    real, replaced = folder.resolve(), replaced_path(folder)
    advice = "choose another --run.directory, or empty the folder yourself"
    if real.is_mount():
        raise UserError(f"the run in {folder} is not replaced: it is a mount point, which cannot be renamed; {advice}")
    if Path.cwd().is_relative_to(real):
        raise UserError(
            f"the run in {folder} is not replaced: it is the folder that you are in, and would be renamed; start from "
            "another one"
        )
    try:
        real.rename(replaced)
    except OSError as error:
        raise UserError(
            f"the run in {folder} is not replaced, and stays as it was: it cannot be renamed to {replaced} "
            f"({error.strerror}); {advice}"
        ) from error
    flush_folder(real.parent)
    real.mkdir()
    lock.acquire(real)


def restore_replaced(folder: Path, lock: RunLock) -> str:
    """Put a replaced run back: the first step of the start that was to replace it has not ended.

    The folder of that start is renamed to `NAME.failed`. If no run is being replaced, nothing happens.

    Args:
        folder: Of the run.
        lock: Takes the locks of both folders if a run is being replaced.

    Returns:
        A sentence that names the run; empty if no run was put back.

    Raises:
        UserError: If another process trains there; or if a folder cannot be renamed: the next call goes on.
    """
    real, replaced, failed = folder.resolve(), replaced_path(folder), failed_path(folder)
    shutil.rmtree(_deleting_path(folder), ignore_errors=True)
    if not has_replaced(folder):
        return ""
    kept = ""
    try:
        if real.is_dir():
            lock.acquire(real)
        lock.acquire(replaced)
        if is_run(real) and (real / CONFIG_FILE).is_file():
            if is_run(failed):
                _delete(failed, folder)
            real.rename(failed)
            kept = f"; its files are in {failed}"
        elif real.is_dir():
            # That start ended before its configuration was there.
            for path in list(real.iterdir()):
                if path.name in (LOCK_FILE, RUN_FILE) or is_partial(path.name, {CONFIG_FILE}):
                    path.unlink()
            real.rmdir()
        replaced.rename(real)
        flush_folder(real.parent)
    except OSError as error:
        if not has_replaced(folder):
            # The process that replaces it has gone on meanwhile.
            return ""
        raise UserError(
            f"the run that was in {folder} before could not be put back, and waits in {replaced}: {error}; mend that "
            "and start again"
        ) from error
    return f"the run that was in {folder} is there as before: the first step of its replacement did not end{kept}"


def delete_replaced(folder: Path, lock: RunLock) -> str:
    """Delete the run that is being replaced, if there is one: the new one's first step has ended.

    Args:
        folder: Of the new run.
        lock: Gives back the lock of the replaced run.

    Returns:
        A sentence that names the folder that could not be deleted; empty if all is deleted.

    Raises:
        OSError: If the replaced run cannot even be renamed; it will be put back.
    """
    if not has_replaced(folder):
        return ""
    # Before the folder is deleted: a network file system keeps an open file under another name.
    lock.release(replaced_path(folder))
    left = _delete(replaced_path(folder), folder)
    return f"{left} could not be deleted: it is not needed any more; rm -r {shell_path(left)}" if left else ""


def _beside(folder: Path, pattern: str) -> Path:
    # Links are resolved: one rename is enough only on the same file system.
    real = folder.resolve()
    # Not `with_name`, which refuses `/`.
    return real.parent / pattern.format(real.name)


def _deleting_path(folder: Path) -> Path:
    return _beside(folder, ".{}.deleting")


def _delete(doomed: Path, folder: Path) -> Path | None:
    """Rename a folder, then delete it, so that no half of it keeps its name.

    Returns:
        The folder, if it could not be deleted; None if all is gone.
    """
    deleting = _deleting_path(folder)
    doomed.rename(deleting)
    flush_folder(deleting.parent)
    shutil.rmtree(deleting, ignore_errors=True)
    return deleting if deleting.exists() else None
