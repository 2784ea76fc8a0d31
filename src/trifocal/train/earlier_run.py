"""The run that a new one replaces: kept, inside its folder, until the new one's first step has ended.

Until then nobody knows whether the new run can start at all: whether its data can be read, its model fits, its loss is
finite. So the earlier run is only set aside. What lies in the folder says how far things are, and one rename leads from
each row to the next:

| in the folder is | it holds | what lies beside it |
|---|---|---|
| none of these | | a run |
| `replaced_run.moving/` | a part of the earlier run, on its way in or out | the rest of the earlier run |
| `replaced_run/` | the earlier run, whole; commands read it there like any run | the new run |
| `replaced_run.deleting/` | what is left of the earlier run | the new run, whose first step has ended |

So the process may be killed at any moment, and nothing is copied, so that a full disk does not matter: `put_back`, with
which every start on the folder begins, sees what to do. It is the files that are renamed and not the folder, which may
be a link, a volume, or the place where somebody works; and the folder's lock, which stays where it is, keeps every
other start out from the first rename to the last.
"""

import shutil
from pathlib import Path

from trifocal.errors import UserError
from trifocal.train.files import CONFIG_FILE, delete, flush_folder
from trifocal.train.lock import LOCK_FILE, RunLock

EARLIER_RUN = "replaced_run"
FAILED_START = "failed_start"
"""Keeps what a failed start has left, when the earlier run is put back; until a later start has succeeded."""
_MOVING = f"{EARLIER_RUN}.moving"
_DELETING = f"{EARLIER_RUN}.deleting"
_OF_NO_RUN = frozenset({LOCK_FILE, EARLIER_RUN, _MOVING, _DELETING, FAILED_START})


def is_set_aside(folder: Path) -> bool:
    """Whether a run in this folder is being replaced, or was when its process died."""
    # A folder of that name without a run is somebody else's.
    return (folder / _MOVING).exists() or (folder / EARLIER_RUN / CONFIG_FILE).is_file()


def whole_run(folder: Path) -> Path:
    """Where the configuration is of the run that `put_back` would leave in the folder."""
    places = (folder / EARLIER_RUN, folder / _MOVING)
    return next((place for place in places if (place / CONFIG_FILE).is_file()), folder)


def where_set_aside(folder: Path) -> str:
    """The end of a sentence about a folder without a usable run: where one is; empty if there is none."""
    if not is_set_aside(folder):
        return ""
    place = folder / (_MOVING if (folder / _MOVING).exists() else EARLIER_RUN)
    return f" (the run that was there before is in {place}, and is put back by the next trifocal train there)"


def set_aside(folder: Path, lock: RunLock) -> None:
    """Set the run in a folder aside.

    Args:
        folder: Of the run; nothing is set aside there yet.
        lock: Of the folder, taken.

    Raises:
        UserError: If it cannot be moved; it is where it was.
    """
    moving = folder / _MOVING
    try:
        moving.mkdir()
        for path in _contents(folder):
            path.rename(moving / path.name)
        flush_folder(moving)
        moving.rename(folder / EARLIER_RUN)
        flush_folder(folder)
    except OSError as error:
        put_back(folder, lock, own=True)
        raise UserError(f"the run in {folder} cannot be moved aside, and stays as it was: {error}") from error


def put_back(folder: Path, lock: RunLock, *, own: bool = False) -> str:
    """Put the run that was set aside in a folder back, and what the one that was to replace it has left out of its way.

    What is left of a run that was replaced is deleted. Where neither is there, nothing happens.

    Args:
        folder: Of the run.
        lock: Taken if there is something to do.
        own: Whether this process has set the run aside itself: what its start has left is deleted then, but for dumps.

    Returns:
        What was put back, in a sentence; empty if nothing.

    Raises:
        UserError: If another process trains there, which has set the run aside itself; or if a file cannot be moved:
            the next call goes on.
    """
    if not (is_set_aside(folder) or (folder / _DELETING).exists()):
        return ""
    try:
        lock.take(folder)
        shutil.rmtree(folder / _DELETING, ignore_errors=True)
        if not is_set_aside(folder):
            return ""
        _move_back(folder, own=own)
    except OSError as error:
        raise UserError(
            f"the run that was in {folder} before could not be put back, and waits in it: {error}; mend that and start "
            "again"
        ) from error
    left = folder / FAILED_START
    kept = f"; what the other one left is in {left}" if left.exists() else ""
    return f"the run that was in {folder} is there as before: the first step of its replacement did not end{kept}"


def _move_back(folder: Path, *, own: bool) -> None:
    earlier, moving = folder / EARLIER_RUN, folder / _MOVING
    if not moving.exists():
        # Every start makes an empty file there, for stacks.
        keep = not own or any(path.is_dir() or path.stat().st_size for path in (folder / "dumps").glob("*"))
        for path in _contents(folder):
            if keep:
                _move_to_failed_start(path)
            else:
                delete(path)
        flush_folder(folder)
        earlier.rename(moving)
    # Where somebody went on with the run while it was set aside.
    (moving / LOCK_FILE).unlink(missing_ok=True)
    for path in sorted(moving.iterdir()):
        target = folder / path.name
        if target.exists() or target.is_symlink():
            # A process of the failed start that had not ended yet has written something more.
            _move_to_failed_start(target)
        path.rename(target)
    flush_folder(folder)
    moving.rmdir()


def let_go(folder: Path) -> str:
    """Delete the run that was set aside in a folder, if there is one: the new one's first step has ended.

    Returns:
        What could not be deleted, in a sentence; empty if all is gone.

    Raises:
        OSError: If the earlier run cannot even be renamed; it is still set aside.
    """
    if (folder / EARLIER_RUN).exists():
        (folder / EARLIER_RUN).rename(folder / _DELETING)
        flush_folder(folder)
    for name in (_DELETING, FAILED_START):
        shutil.rmtree(folder / name, ignore_errors=True)
        if (folder / name).exists():
            return f"{folder / name} could not be deleted: nobody needs it any more"
    return ""


def _contents(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name not in _OF_NO_RUN)


def _move_to_failed_start(path: Path) -> None:
    place = path.parent / FAILED_START
    place.mkdir(exist_ok=True)
    delete(place / path.name)
    path.rename(place / path.name)
