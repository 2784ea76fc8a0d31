"""Detecting that another process is gone, frozen or has failed, while the training thread waits for it.

Each process writes a note into the common store every second: its phase, the phase's duration, and how it ended. A
thread reads the notes of all. A process is lost when it is gone from this machine, when its notes stop for
`silence_seconds`, or when it has failed. A collective that waits for a lost process may never return, so this process
ends after a pause, in which the training thread may raise an error itself.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from trifocal.distributed.processes import DistributedContext
from trifocal.errors import UserError, one_line

Row = dict[str, Any]

LOST_STATUS = 1
"""Exit status of a process that ends because of another."""
_INTERVAL_SECONDS = 1.0
_PAUSE_SECONDS = 5.0


class PeerLost(RuntimeError):
    """Another process of the run is gone, frozen or has failed; the message names it."""


@dataclass
class _Seen:
    """The last note of another process."""

    note: Row
    changed: float
    """When the note last changed, on this process's clock."""
    existed: bool = False
    """Whether this process could see its process id; containers with the same host name may not see each other's."""


class PeerMonitor:
    """Reports the state of this process to the others, and watches them; a context manager around training.

    `describe` gives the state: `step`, `phase`, `phase_seconds`, `where` in the code, and `stop`, whether this process
    is asked to stop: the others then know though they wait for data, not for this process. `exists` says whether a
    process of this machine is there; one that waits for its parent is gone. In the watching thread `on_lost` gets a
    sentence before `leave` ends this process, and `on_stop` is called when the note of another one has `stop`.
    """

    def __init__(
        self,
        processes: DistributedContext,
        describe: Callable[[], Row],
        exists: Callable[[int], bool],
        *,
        silence_seconds: float = 20.0,
        on_lost: Callable[[str], None] = lambda sentence: None,
        on_stop: Callable[[], None] = lambda: None,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._processes = processes
        self._describe, self._exists = describe, exists
        self._silence_seconds = silence_seconds
        self._on_lost, self._on_stop = on_lost, on_stop
        self._leave = leave
        self._beat = 0
        self._exchanged = self._looked = time.monotonic()
        self._seen: dict[int, _Seen] = {}
        self._first_gone: int | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._explaining = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trifocal-peers", daemon=True)

    def explain(self) -> PeerLost | None:
        """The error to raise for a failed collective, once a process is known to be lost; None if no other one is."""
        if self._processes.size == 1:
            return None
        self._explaining.set()
        deadline = time.monotonic() + self._silence_seconds + 2 * _INTERVAL_SECONDS
        while time.monotonic() < deadline:
            if sentence := self._look():
                return PeerLost(f"{sentence}; rank {self._processes.rank} stops too")
            time.sleep(_INTERVAL_SECONDS / 4)
        self._explaining.clear()
        return None

    def _run(self) -> None:
        lost_since: float | None = None
        while not self._stop.wait(_INTERVAL_SECONDS):
            sentence = self._look()
            if sentence is None or self._explaining.is_set():
                lost_since = None
                continue
            lost_since = lost_since or time.monotonic()
            if time.monotonic() - lost_since >= _PAUSE_SECONDS:
                message = f"{sentence}; rank {self._processes.rank} stops too"
                with contextlib.suppress(Exception):
                    self._on_lost(message)
                with contextlib.suppress(OSError):
                    print(f"trifocal: {message}", file=sys.stderr, flush=True)
                self._leave(LOST_STATUS)
                return

    def _look(self) -> str | None:
        """Write a note, read those of the others, and describe a lost process, if there is one."""
        with self._lock:
            now, unreachable = time.monotonic(), None
            # While this process itself was stopped, it heard nobody: others may continue later than it.
            stopped = max(0.0, now - self._looked - _INTERVAL_SECONDS)
            self._exchanged += stopped
            for seen in self._seen.values():
                seen.changed += stopped
            try:
                self._exchange(now)
            except RuntimeError as error:
                # The store may have ended with its process.
                unreachable = error
            self._looked = time.monotonic()
            # A process that is gone comes first: the others may have failed because of it.
            if gone := self._gone():
                return gone
            if unreachable is None:
                self._exchanged = now
                for rank, seen in sorted(self._seen.items()):
                    silence = now - seen.changed
                    if seen.note["status"] == "running" and silence > self._silence_seconds:
                        who = f"rank {rank} (process {seen.note['pid']} on {seen.note['host']})"
                        return f"{who} has been silent for {silence:.0f} s, {_last_seen(seen.note)}"
            failed = [(seen.note["time"], rank) for rank, seen in self._seen.items() if seen.note["status"] == "failed"]
            if failed:
                rank = min(failed)[1]
                return f"rank {rank} has failed: {self._seen[rank].note['message']}"
            if unreachable is not None and now - self._exchanged > self._silence_seconds:
                return f"the rendezvous store does not answer ({one_line(unreachable)})"
            return None

    def _exchange(self, now: float) -> None:
        """Write a note, and read the notes of the others."""
        self._leave_note("running")
        store = self._processes.store
        assert store is not None
        others = [rank for rank in range(self._processes.size) if rank != self._processes.rank]
        notes = [json.loads(text) for text in store.multi_get([f"rank{rank}" for rank in others])]
        if any(note.get("stop") for note in notes):
            self._on_stop()
        for rank, note in zip(others, notes, strict=True):
            seen = self._seen.get(rank)
            if seen is None or seen.note["beat"] != note["beat"] or seen.note["status"] != note["status"]:
                self._seen[rank] = _Seen(note, now, existed=seen is not None and seen.existed)

    def _gone(self) -> str | None:
        """A process of this machine, the first found, that ended without a last note: others may end because of it."""
        host = socket.gethostname()
        for rank, seen in sorted(self._seen.items(), key=lambda item: (item[0] != self._first_gone, item[0])):
            if seen.note["status"] == "running" and seen.note["host"] == host:
                exists = self._exists(seen.note["pid"])
                if seen.existed and not exists:
                    self._first_gone = rank
                    return f"rank {rank} (process {seen.note['pid']}) is gone, {_last_seen(seen.note)}"
                seen.existed |= exists
        return None

    def table(self) -> str:
        """The last known state of every other process, in a line."""
        with self._lock:
            notes = {rank: seen.note for rank, seen in sorted(self._seen.items())}
        return "; ".join(
            f"rank {rank}: {note['phase']} for {note['phase_seconds']:.0f} s at step {note['step']}{_place(note)}"
            for rank, note in notes.items()
        )

    def _leave_note(self, status: str, message: str = "") -> None:
        self._beat += 1
        what = self._describe()
        note = {
            "beat": self._beat,
            "status": status,
            "message": message,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
            **{name: what[name] for name in ("step", "phase", "phase_seconds")},
            "where": what.get("where", ""),
            "stop": what.get("stop", False),
        }
        store = self._processes.store
        assert store is not None
        store.set(f"rank{self._processes.rank}", json.dumps(note))

    def __enter__(self) -> Self:
        if self._processes.size > 1:
            self._leave_note("running")
            # After this barrier every process has written a note.
            self._processes.sum([0.0])
            self._look()
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._processes.size == 1:
            return
        self._stop.set()
        self._thread.join()
        message = f"{type(error).__name__}: {one_line(error)}" if error is not None else ""
        with contextlib.suppress(RuntimeError):
            self._leave_note("finished" if error is None else "failed", message)
            if error is not None and not isinstance(error, UserError) and not getattr(error, "agreed", False):
                # The store may end with this process: leave the others time to read the note.
                time.sleep(2 * _INTERVAL_SECONDS)


def _last_seen(note: Row) -> str:
    return f"last seen in {note['phase']} for {note['phase_seconds']:.0f} s at step {note['step']}{_place(note)}"


def _place(note: Row) -> str:
    return f", {note['where']}" if note["where"] else ""
