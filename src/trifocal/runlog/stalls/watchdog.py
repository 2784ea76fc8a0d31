"""Finds a stall from inside the process, and writes a dump about it.

When a phase passes the limit that the heartbeat has learned for it (never in `start`, `compile` or `wait`, never before
the phase has ended once), or on SIGUSR1, `dumps/` gets a folder with

- `summary.md`: one page in words: the stuck ranks, their phase, its age, the place in the code, and the ranks that they
  wait for;
- the files of runlog/stalls/dump.py, from every rank with a live watchdog.

Training continues, also on a full disk. A stall has one dump for all of its ranks and its whole length.
"""

import contextlib
import faulthandler
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import torch

from trifocal.errors import UserError
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.runlog.jsonl import Row, logger
from trifocal.runlog.progress import duration
from trifocal.runlog.run import read_run
from trifocal.runlog.stalls.dump import read_answers, write_details, write_stacks
from trifocal.runlog.stalls.stacks import StackDump
from trifocal.runlog.stalls.summary import stall_summary
from trifocal.runlog.whole_files import write_whole

# A rank that stalls this soon after another adds to the other's dump.
_SAME_STALL_SECONDS = 60.0
# The other ranks check for dumps with every row of their heartbeats.
_ANSWER_INTERVALS = 2.0
_ANSWER_SECONDS = 15.0
_POLL_SECONDS = 0.2
# A rank holds the lock of `dumps/` for milliseconds, unless it is frozen just then.
_LOCK_SECONDS = 2.0


class Watchdog:
    """Watches the process's own heartbeat; a context manager inside the heartbeat's.

    Args:
        heartbeat: The heartbeat of this process; the watchdog runs in its thread.
        run_directory: Dumps go to `dumps` in it.
        device: Device of the process.
        on_stall: Called in the heartbeat's thread with a sentence that names the dump, once for each stall. Without it
            the sentence is logged as a warning.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        run_directory: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        on_stall: Callable[[str], None] | None = None,
    ) -> None:
        self.directory = Path(run_directory)
        self._heartbeat = heartbeat
        self._device = torch.device(device)
        self._on_stall = on_stall
        self._rank = heartbeat.rank
        self._stacks = StackDump(self.directory / "dumps", self._rank)
        self._stacks_size = self._stacks.size()
        self._stalled: tuple[str, float] | None = None
        self._seen: set[Path] = set(self._folders())

    def observe(self, row: Row) -> None:
        """Check one heartbeat row; called by the heartbeat's thread."""
        # If no Python thread runs for that long, C code holds the interpreter's lock: then faulthandler's own thread,
        # which needs no lock, writes the stacks.
        frozen_seconds = max(self._heartbeat.minimum_stall_seconds, 3 * row["interval_seconds"])
        faulthandler.dump_traceback_later(frozen_seconds, file=self._stacks.file)
        self._answer_other_ranks(row)
        limit, size = row["stall_limit_seconds"], self._stacks.size()
        entry = self._heartbeat.current_phase()
        age = row["phase_seconds"] - row["compile_seconds"]
        if limit is not None and age > limit and entry != self._stalled:
            self._stalled = entry
            self._report_stall(row)
        elif size > self._stacks_size:
            self._dump("asked", "was asked for its stacks", row)
        self._stacks_size = size

    def _report_stall(self, row: Row) -> None:
        expected, limit = row["expected_phase_seconds"], row["stall_limit_seconds"]
        what = (
            f"is stalled in {row['phase']} for {duration(row['phase_seconds'])} "
            f"(usually {expected:.2g} s, limit {limit:.0f} s)"
        )
        with self._locked_dumps():
            # Another rank may have begun a dump since this one last looked.
            self._answer_other_ranks(row)
            folder = self._current_stall() or self._dump("stalled", what, row)
        sentence = f"rank {self._rank} {what}, at {row['where']}; see {folder / 'summary.md'}"
        if self._on_stall is None:
            logger.warning("%s", sentence)
        else:
            self._on_stall(sentence)

    @contextlib.contextmanager
    def _locked_dumps(self) -> Iterator[None]:
        """Keep the other ranks from beginning a dump of a stall; without locks in the file system, go on unlocked."""
        try:
            directory = os.open(self.directory / "dumps", os.O_RDONLY)
        except OSError:
            yield
            return
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_LOCK_SECONDS / 100)
                except OSError:
                    break
            yield
        finally:
            os.close(directory)

    def _current_stall(self) -> Path | None:
        """The dump that another rank has just begun, and that already has this rank's answer."""
        for folder in self._seen:
            try:
                recent = time.time() - folder.stat().st_mtime < _SAME_STALL_SECONDS
            except OSError:
                continue
            if recent and folder.name.startswith("stalled_") and f"_rank{self._rank}_" not in folder.name:
                return folder
        return None

    def _dump(self, reason: str, what: str, row: Row) -> Path:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = self.directory / "dumps" / f"{reason}_step_{row['step']:08}_rank{self._rank}_{stamp}"
        self._seen.add(folder)
        try:
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
            write_stacks(folder, self._rank)
            self._write_summary(folder, what, row)
        except OSError as error:
            logger.warning("cannot write the dump %s (%s); training goes on", folder, error)
        else:
            # Not in the heartbeat's thread, which must keep writing rows.
            self._in_background(self._complete, folder, what, row)
        return folder

    def _complete(self, folder: Path, what: str, row: Row) -> None:
        """Add the slow parts, and rewrite the summary as the other ranks answer."""
        write_details(folder, self._rank, row, self._device)
        others = self._running_ranks() - {self._rank}
        deadline = time.monotonic() + _ANSWER_INTERVALS * row["interval_seconds"] + _ANSWER_SECONDS
        answered = -1
        while True:
            here = len(others & read_answers(folder).keys())
            if here > answered:
                answered = here
                self._write_summary(folder, what, row)
            if answered == len(others) or time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)

    def _running_ranks(self) -> set[int]:
        try:
            run = read_run(self.directory, live=True)
        except (UserError, OSError):
            return set()
        return {rank for rank, rows in run.heartbeats.items() if rows[-1]["status"] == "running"}

    def _write_summary(self, folder: Path, what: str, row: Row) -> None:
        text = stall_summary(self.directory, folder, self._rank, what, row, read_answers(folder))
        write_whole(folder / "summary.md", text)

    def _answer_other_ranks(self, row: Row) -> None:
        """Add this rank's part to the dumps that other ranks began."""
        for folder in self._folders():
            if folder not in self._seen:
                self._seen.add(folder)
                write_stacks(folder, self._rank)
                self._in_background(write_details, folder, self._rank, row, self._device)

    def _in_background(self, action: Callable[..., None], *arguments: object) -> None:
        def guarded() -> None:
            try:
                action(*arguments)
            except Exception:
                logger.warning("a dump of rank %d is not complete; training goes on", self._rank, exc_info=True)

        threading.Thread(target=guarded, name="trifocal-dump", daemon=True).start()

    def _folders(self) -> list[Path]:
        return [path for path in (self.directory / "dumps").glob("*_rank*") if path.is_dir()]

    def __enter__(self) -> Self:
        self._heartbeat.observers.append(self.observe)
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeat.observers.remove(self.observe)
        self._stacks.close()
        # Last: the heartbeat's thread may have set the timer again, and the closed file's number may be reused.
        faulthandler.cancel_dump_traceback_later()
