"""Files that are complete or absent."""

import os
from pathlib import Path


def partial_name(name: str) -> str:
    """Name of a file while it is being written."""
    return f".{name}.partial"


def write_whole(path: Path, content: str | bytes, *, flush: bool = False) -> None:
    """Write a file under another name, then rename it: no reader sees a part of it.

    Args:
        path: The file. An existing one is replaced, even a link or a device, so this is not for paths of the user.
        content: Bytes, or text to encode in UTF-8.
        flush: Flush to the disk before the rename, so that a power cut leaves the new or the earlier file.

    Raises:
        OSError: If writing fails; the earlier file stays.
    """
    partial = path.with_name(partial_name(path.name))
    try:
        # A leftover of a killed process, or a link that somebody planted, must not be written through.
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
