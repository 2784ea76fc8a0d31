"""What Linux says of a process in `/proc/PID/stat`."""

import os
from pathlib import Path


def process_state(pid: int) -> str:
    """Linux's letter for what a process of this machine does; X if there is none, ? where that cannot be known."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return "X"
    except PermissionError:
        # Somebody else's, but it is there.
        pass
    fields = _fields(pid)
    return fields[0] if fields else "?"


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None where that cannot be known.

    Numbers of processes are used again; number and start together name one process.
    """
    fields = _fields(pid)
    # The 22nd of all, proc(5); the list begins with the third.
    return int(fields[19]) if len(fields) > 19 and fields[19].isdecimal() else None


def _fields(pid: int) -> list[str]:
    try:
        # After the program's name in brackets, which may hold anything.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
