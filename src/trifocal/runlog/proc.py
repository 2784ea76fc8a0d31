"""State and start of a process, from Linux's `/proc/PID/stat`."""

import os
from pathlib import Path


def process_state(pid: int) -> str:
    """Linux's letter for the state of a process; X if there is no such process, ? if unknown."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return "X"
    except PermissionError:
        # It exists, and belongs to another user.
        pass
    fields = _fields(pid)
    return fields[0] if fields else "?"


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; with its id it names one process. None if unknown."""
    fields = _fields(pid)
    # starttime is the 22nd field (proc(5)); the list begins with the third.
    return int(fields[19]) if len(fields) > 19 and fields[19].isdecimal() else None


def _fields(pid: int) -> list[str]:
    try:
        # After the program's name in brackets, which may have any characters.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
