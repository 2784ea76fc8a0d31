"""Files that are complete or absent."""

import contextlib
import os
import secrets
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, flush: bool = False) -> None:
    """Write a file under its own temporary name, then rename it: readers never see a partial file. OSError if that
    fails; the earlier file stays.

    An existing file is replaced, even a link; see `write_output` for paths of the user. With `flush` it is on the disk
    before the rename, so that a power cut leaves the new or the earlier file.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            # That of a full disk, which writing raises, names no file.
            error.filename = str(path)
        raise


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file that the user named: whole, through a link to its target, and into a pipe or device as it comes."""
    if path.exists() and not path.is_file():
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, content)
