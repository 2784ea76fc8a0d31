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
    """The system's lock on a file in a run's folder. It ends with the process; a renamed folder keeps it.

    The context releases all locks at its end.
    """

    def __init__(self) -> None:
        self._files: list[int] = []

    def acquire(self, folder: Path) -> str:
        """Acquire the lock of a folder that exists.

        Returns:
            A warning if the file system has no locks; otherwise empty.

        Raises:
            UserError: If another process trains there (names it), or the lock file is a link or a folder.
            OSError: If the folder cannot be written.
        """
        path = folder / LOCK_FILE
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR):
                raise UserError(
                    f"{path} is a link or a folder, expected the file that locks the run; delete it"
                ) from error
            raise
        self._files.append(file)
        note = _wait_for_lock(file, folder)
        if not self.holds(folder):
            raise UserError(f"{folder} was renamed or deleted by the process that trained there; start again")
        return note

    def holds(self, folder: Path) -> bool:
        """Whether this process holds the lock of the folder at this path."""
        try:
            there = (folder / LOCK_FILE).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return any(os.path.samestat(os.fstat(file), there) for file in self._files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.pop())


def _wait_for_lock(file: int, folder: Path) -> str:
    begin, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            host, _, process = os.pread(file, 1000, 0).decode(errors="replace").strip().partition(" ")
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return f"the file system of {folder} has no locks: do not start a second process on this run"
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
