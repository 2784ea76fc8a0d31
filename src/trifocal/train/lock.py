"""A lock on the folder of a run: two runs in one folder would delete each other's files."""

import errno
import fcntl
import os
import socket
import sys
import time
from pathlib import Path
from typing import Self

from trifocal.errors import UserError
from trifocal.paths import shell_path

LOCK_FILE = ".lock"
WAIT_SECONDS = 2.0
REMOTE_WAIT_SECONDS = 120.0
"""Time to wait for a lock that is held: a killed process may take a moment to end, and a network file system keeps the
locks of a dead machine for a minute or two."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class RunLock:
    """Keeps other processes from training in the folder of a run.

    It is the system's lock on a file in the folder: it ends with the process, and the file may stay. A renamed folder
    keeps it. The context releases all locks at its end.
    """

    def __init__(self) -> None:
        self._files: list[int] = []

    def acquire(self, folder: Path) -> str:
        """Acquire the lock of a folder; nothing happens if it is held already.

        Args:
            folder: The folder; it exists.

        Returns:
            A warning if the file system has no locks; otherwise empty.

        Raises:
            UserError: If another process trains there; names it.
            OSError: If the folder cannot be written.
        """
        if self.holds(folder):
            return ""
        path = folder / LOCK_FILE
        while True:
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except IsADirectoryError:
                raise UserError(f"{path} is a folder, in place of the file that locks the run; delete it") from None
            try:
                note = _lock(file, folder)
                self._files.append(file)
            except BaseException:
                os.close(file)
                raise
            if self.holds(folder):
                return note
            # The holder has renamed or deleted the folder meanwhile: another process may lock a new one.
            os.close(self._files.pop())

    @property
    def is_held(self) -> bool:
        """Whether any lock is held."""
        return bool(self._files)

    def holds(self, folder: Path) -> bool:
        """Whether this process holds the lock of the folder at this path."""
        return self._file_of(folder) is not None

    def release(self, folder: Path) -> None:
        """Release the lock of a folder, if it is held."""
        file = self._file_of(folder)
        if file is not None:
            self._files.remove(file)
            os.close(file)

    def _file_of(self, folder: Path) -> int | None:
        try:
            there = (folder / LOCK_FILE).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return next((file for file in self._files if os.path.samestat(os.fstat(file), there)), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.pop())


def _lock(file: int, folder: Path) -> str:
    begin, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return f"the file system of {folder} has no locks: do not start a second process on this run"
        host, _, process = os.pread(file, 1000, 0).decode(errors="replace").strip().partition(" ")
        remote = bool(host) and host != socket.gethostname()
        if time.monotonic() - begin >= (REMOTE_WAIT_SECONDS if remote else WAIT_SECONDS):
            who = f"process {process} on {host}" if process else "another process"
            raise UserError(
                f"{folder} is in use: {who} trains there; see it with trifocal watch {shell_path(folder)}, end it "
                "first, or choose another --run.directory"
            )
        if remote and not told:
            told = True
            print(f"{folder} is in use by process {process} on {host}; waiting for it to end", file=sys.stderr)
        time.sleep(0.1)
    os.ftruncate(file, 0)
    os.pwrite(file, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
    return ""
