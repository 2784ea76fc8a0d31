"""Finds a stall from inside the process, and writes a dump about it.

When a phase passes the limit that the heartbeat has learned for it, or when asked, `dumps/` gets a folder with the
files of `dump.py` from every rank with a live watchdog. Training continues, also on a full disk. A stall has one dump
for all of its ranks and its whole length.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, TextIO

from trifocal.errors import UserError
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.runlog.jsonl import Row, logger
from trifocal.runlog.progress import duration
from trifocal.runlog.run import read_run
from trifocal.runlog.stalls.dump import read_answers, stall_summary, write_details, write_stacks
from trifocal.runlog.whole_files import write_whole

# A rank that stalls this soon after another adds to the other's dump.
_SAME_STALL_SECONDS = 60.0
# The other ranks check for dumps with every row of their heartbeats.
_ANSWER_INTERVALS = 2.0
_ANSWER_SECONDS = 15.0
_POLL_SECONDS = 0.2


class FatalStacks:
    """Has faulthandler write the Python stacks of all threads into the run's dumps on the fatal signals SIGSEGV,
    SIGABRT, SIGBUS, SIGFPE and SIGILL.

    Not at a time, nor on a signal that the process outlives: without the interpreter's lock it reads frames that
    threads are changing, and the process may die.
    """

    def __init__(self, directory: Path, rank: int = 0) -> None:
        path = directory / f"stacks_rank{rank}.txt"
        self._file: TextIO
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")
        except OSError as error:
            logger.warning("cannot open %s (%s); training continues, stacks go to standard error", path, error)
            # A copy, which close() may close.
            self._file = os.fdopen(os.dup(2), "w")
        self._path = path
        self._was_enabled = faulthandler.is_enabled()
        faulthandler.enable(file=self._file, all_threads=True)

    def close(self) -> None:
        """Restore the signals and close the file; an empty one is removed."""
        faulthandler.disable()
        if self._was_enabled and sys.__stderr__ is not None:
            faulthandler.enable(file=sys.__stderr__)
        self._file.close()
        with contextlib.suppress(OSError):
            if self._path.stat().st_size == 0:
                self._path.unlink()


class Watchdog:
    """Watches the process's own heartbeat, in its thread; `on_stall` gets a sentence with the dump, once a stall."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        run_directory: str | os.PathLike[str],
        *,
        on_stall: Callable[[str], None] = logger.warning,
    ) -> None:
        self._directory, self._dumps = Path(run_directory), Path(run_directory) / "dumps"
        self._heartbeat, self._rank = heartbeat, heartbeat.rank
        self._on_stall = on_stall
        self._fatal_stacks = FatalStacks(self._dumps, self._rank)
        self._asked = False
        self._stalled: tuple[str, float] | None = None
        self._seen = set(self._folders())

    def ask(self) -> None:
        """Have the next row make a dump."""
        self._asked = True

    def observe(self, row: Row) -> None:
        """Check one heartbeat row; called by the heartbeat's thread."""
        self._answer_other_ranks(row)
        limit, entry = row["stall_limit_seconds"], self._heartbeat.current_phase()
        if limit is not None and row["phase_seconds"] > limit and entry != self._stalled:
            self._stalled = entry
            what = (
                f"is stalled in {row['phase']} for {duration(row['phase_seconds'])} "
                f"(usually {row['expected_phase_seconds']:.2g} s, limit {limit:.0f} s)"
            )
            folder = self._current_stall() or self._dump(f"stalled_step_{row['step']:08}_%Y%m%d-%H%M", what, row)
            self._on_stall(f"rank {self._rank} {what}, at {row['where']}; see {folder / 'summary.md'}")
        elif self._asked:
            self._asked = False
            self._dump(f"asked_step_{row['step']:08}_rank{self._rank}_%Y%m%d-%H%M%S", "was asked for its stacks", row)

    def _current_stall(self) -> Path | None:
        """The dump that another rank has just begun, and that already has this rank's answer."""
        for folder in self._seen:
            with contextlib.suppress(OSError):
                if folder.name.startswith("stalled") and time.time() - folder.stat().st_mtime < _SAME_STALL_SECONDS:
                    return folder
        return None

    def _dump(self, name: str, what: str, row: Row) -> Path:
        """Begin a dump. If ranks stall in the same step and minute, the first one begins it, the others add to it."""
        folder = self._dumps / time.strftime(name)
        try:
            # Not its parents: a run's folder that was moved is not made again.
            self._dumps.mkdir(exist_ok=True)
            folder.mkdir()
            self._seen.add(folder)
            write_stacks(folder, self._rank)
            self._write_summary(folder, what, row)
            # Not in the heartbeat's thread, which must keep writing rows.
            self._in_background(self._complete, folder, what, row)
        except OSError as error:
            if isinstance(error, FileExistsError) and folder.is_dir():
                self._answer_other_ranks(row)
            else:
                logger.warning("cannot write the dump %s (%s); training continues", folder, error)
        return folder

    def _complete(self, folder: Path, what: str, row: Row) -> None:
        """Add the slow parts, and rewrite the summary as the other ranks answer."""
        write_details(folder, self._rank, row)
        others = self._running_ranks() - {self._rank}
        deadline = time.monotonic() + _ANSWER_INTERVALS * row["interval_seconds"] + _ANSWER_SECONDS
        answered = -1
        while answered < len(others) and time.monotonic() < deadline:
            here = len(others & read_answers(folder).keys())
            if here > answered:
                answered = here
                self._write_summary(folder, what, row)
            time.sleep(_POLL_SECONDS)

    def _running_ranks(self) -> set[int]:
        try:
            run = read_run(self._directory, live=True)
        except (UserError, OSError):
            return set()
        return {rank for rank, rows in run.heartbeats.items() if rows[-1]["status"] == "running"}

    def _write_summary(self, folder: Path, what: str, row: Row) -> None:
        text = stall_summary(self._directory, folder, self._rank, what, row)
        write_whole(folder / "summary.md", text)

    def _answer_other_ranks(self, row: Row) -> None:
        """Add this rank's part to the dumps that other ranks began."""
        for folder in self._folders():
            if folder not in self._seen:
                self._seen.add(folder)
                if folder.name.startswith("asked"):
                    # All ranks may be asked at once: one dump has the answers of all.
                    self._asked = False
                write_stacks(folder, self._rank)
                self._in_background(write_details, folder, self._rank, row)

    def _in_background(self, action: Callable[..., None], *arguments: object) -> None:
        def guarded() -> None:
            try:
                action(*arguments)
            except Exception:
                logger.warning("a dump of rank %d is not complete; training continues", self._rank, exc_info=True)

        threading.Thread(target=guarded, name="trifocal-dump", daemon=True).start()

    def _folders(self) -> list[Path]:
        return [path for reason in ("stalled", "asked") for path in self._dumps.glob(f"{reason}_*") if path.is_dir()]

    def __enter__(self) -> Self:
        self._heartbeat.observers.append(self.observe)
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeat.observers.remove(self.observe)
        self._fatal_stacks.close()
