"""The folder of a run: making it, locking it, protecting other folders."""

import errno
import fcntl
import os
import shutil
import socket
import stat
import sys
import uuid
from contextlib import AbstractContextManager
from pathlib import Path

from trifocal.errors import UserError
from trifocal.fields import from_table
from trifocal.paths import check_run_folder, read_toml, shell_path
from trifocal.runlog.progress import try_print
from trifocal.runlog.whole_files import write_whole
from trifocal.train.config.sections import RunConfig
from trifocal.train.config.toml import to_toml

CONFIG_FILE = "config.toml"
RUN_FILE = ".trifocal_run"
"""In the folder of every run: a line with the format, and a line with a unique number."""
_RUN_LINE = "trifocal run, format 1\n"
PARTIAL = "partial_"
"""Prefix of folders that are incomplete."""


def read_mark(folder: Path) -> str:
    """Read the mark of a run; empty if there is none."""
    try:
        return (folder / RUN_FILE).read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""


def is_run(folder: Path) -> bool:
    """Whether a folder is marked as that of a run: no other folder is ever replaced or deleted."""
    return read_mark(folder).startswith(_RUN_LINE)


def remove_folder(folder: Path) -> None:
    """Rename a folder and delete it, if it exists: a crash in between leaves no half of it under its name."""
    if folder.exists():
        to_delete = folder.with_name(f"{PARTIAL}removing_{folder.name}")
        shutil.rmtree(to_delete, ignore_errors=True)
        folder.rename(to_delete)
        shutil.rmtree(to_delete)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


LOCK_FILE = ".lock"
# macOS tells ENOTSUP and EOPNOTSUPP apart.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
"""Errors of a file system that has no locks."""


class RunLock(AbstractContextManager["RunLock"]):
    """The system's lock on a file in a run's folder, renamed or not, until the context or the process ends."""

    def __init__(self) -> None:
        self._files: list[int] = []

    def acquire(self, folder: Path) -> None:
        """Lock a folder that exists; UserError if another process has it, a warning if its file system has no locks."""
        file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._files.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = os.pread(file, 1000, 0).decode(errors="replace").strip() or "another process"
            raise UserError(
                f"{folder} is in use: {who} trains there; see it with trifocal watch {shell_path(folder)}, or "
                "end it first"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            what = f"the file system of {folder} has no locks: do not start a second process on this run"
            try_print(f"trifocal: {what}", sys.stderr)
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def holds(self, folder: Path) -> bool:
        """Whether this process holds the lock of the folder at this path."""
        try:
            there = (folder / LOCK_FILE).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return any(os.path.samestat(os.fstat(file), there) for file in self._files)

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.pop())


def create_run_directory(config: RunConfig, lock: RunLock, *, overwrite: bool) -> None:
    """Make, lock and mark the folder of a new run, with its configuration; `overwrite` renames a run that is there."""
    folder = Path(config.run.directory)
    try:
        # A link leads to the same place when what is there has been renamed.
        place = folder.resolve()
        if place.exists() and any(place.iterdir()):
            old = _rename_run(folder, place, lock, overwrite=overwrite)
            # Printed, not logged: the new run may fail before it has a log.
            try_print(f"trifocal: the run that was in {place} is now in {old}", sys.stderr)
        place.mkdir(parents=True, exist_ok=True)
        lock.acquire(folder)
        (folder / RUN_FILE).write_text(f"{_RUN_LINE}{uuid.uuid4()}\n")
        save_config(config, folder)
    except OSError as error:
        raise UserError(f"cannot make run.directory {folder}: {error.strerror}") from error


def _rename_run(folder: Path, place: Path, lock: RunLock, *, overwrite: bool) -> Path:
    """Rename a run that nobody trains; refuse everything else that a folder may hold."""
    if not is_run(place):
        raise UserError(f"{folder} exists and is not a Trifocal run (no {RUN_FILE}); choose another --run.directory")
    if not overwrite:
        raise UserError(
            f"{folder} holds a run already; continue it (trifocal train --resume {shell_path(folder)}), replace it "
            f"(--overwrite), or begin another (--run.directory {shell_path(_first_free(folder, '-', 2))})"
        )
    if Path.cwd().is_relative_to(place):
        raise UserError(f"{folder} is not replaced: it is the current folder; start elsewhere")
    lock.acquire(folder)
    return place.rename(_first_free(place, ".old-", 1))


def _first_free(folder: Path, ending: str, number: int) -> Path:
    """The first path beside a folder that is free, with its name, this ending, and this number or a higher one."""
    while os.path.lexists(path := folder.with_name(f"{folder.name}{ending}{number}")):
        number += 1
    return path


def check_files(folder: Path) -> None:
    """Refuse links, pipes and devices in a run's folder, which would lead elsewhere; wandb's own links may stay."""
    for parent, folders, files in os.walk(folder):
        if Path(parent) == folder and "wandb" in folders and not (folder / "wandb").is_symlink():
            folders.remove("wandb")
        for path in (Path(parent, name) for name in (*folders, *files)):
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
                raise UserError(
                    f"{path} is {kind}, and a run would write there; replace it by a file or folder, or take it out of "
                    f"{folder}"
                )


def save_config(config: RunConfig, folder: Path) -> None:
    """Write `config.toml`, whole or not at all, even in a power cut: without it a run cannot be resumed."""
    write_whole(folder / CONFIG_FILE, to_toml(config), flush=True)
    flush(folder)


def load_run(folder: Path) -> RunConfig:
    """Load the configuration of a run; a folder without one is a `UserError`."""
    check_run_folder(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"there is no run at {folder}: it has no {CONFIG_FILE}")
    return from_table(RunConfig, read_toml(folder / CONFIG_FILE), str(folder / CONFIG_FILE))


def run_of(folder: Path) -> RunConfig | None:
    """The configuration in a folder that is marked as a run's; any other program may have a `config.toml` too."""
    return load_run(folder) if is_run(folder) and (folder / CONFIG_FILE).is_file() else None


def open_run_directory(folder: Path, lock: RunLock) -> None:
    """Lock the folder of a run that is to continue, if all of its files lie in it."""
    check_files(folder)
    try:
        lock.acquire(folder)
    except OSError as error:
        raise UserError(f"cannot lock {folder / LOCK_FILE}: {error.strerror}") from error
    if not is_run(folder):
        raise UserError(f"{folder} is not a Trifocal run (no {RUN_FILE}): copy or move the folder as a whole")
