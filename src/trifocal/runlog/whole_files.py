"""Files that are there whole or not at all."""

import os
from pathlib import Path


def partial_name(name: str) -> str:
    """What a file is called while it is written."""
    return f".{name}.partial"


def write_whole(path: Path, content: str | bytes, *, flush: bool = False) -> None:
    """Write a file under another name, and give it its own: nobody ever sees a part of it.

    Args:
        path: The file; one that is there is replaced, also where it is a link or a device: not for a path that a
            person gives.
        content: Bytes, or text for UTF-8.
        flush: Have it on the disk before it gets its name, so that a power cut leaves it or the earlier one.

    Raises:
        OSError: If the disk does not take it; the earlier file stays.
    """
    partial = path.with_name(partial_name(path.name))
    try:
        # What is there, of a process that was killed or planted by somebody else, is not written through.
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
