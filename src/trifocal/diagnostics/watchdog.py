"""Notices a stall from inside, and leaves behind what a person needs to understand it.

Past the limit that the heartbeat has learned for the phase (never in `start` or `compile`, never before a phase has
ended once), or on SIGUSR1, `dumps/` gets a folder with

- `summary.md`: one page in words: which rank is stuck in what, since when, where, and what the others do;
- `stacks_rank*.txt`: the stacks of all threads, of every rank whose watchdog is alive.

The training goes on. One dump is made for a stall, however long it lasts.
"""

import faulthandler
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from trifocal.diagnostics.heartbeat import Heartbeat
from trifocal.diagnostics.jsonl import Row, logger
from trifocal.diagnostics.progress import duration
from trifocal.diagnostics.run import read_run
from trifocal.diagnostics.stacks import StackDump
from trifocal.diagnostics.verdict import judge
from trifocal.errors import UserError

_LAST_ROWS = 3
_HINTS = {
    "data": "The loader gives no batch: look at the source (a network, a disk) and at the loader's thread.",
    "forward": "If it stands in a collective, another rank did not come: compare the ranks' stacks below.",
    "backward": "Look for a hook or a collective at the top of the stacks; with several ranks, compare them.",
    "optimizer": "On a GPU the host waits here for everything queued before: the cause may be an earlier kernel.",
    "checkpoint": "The disk does not take the checkpoint: look at free space and at the file system.",
    "evaluate": "The validation source or a collective does not answer.",
    "telemetry": "A forward pass of one sequence that looks at the attention: compare the ranks' stacks below.",
    "sample": "The model is writing a sample: look whether it is still adding tokens.",
}


class Watchdog:
    """Watches the process's own heartbeat; a context manager inside the heartbeat's.

    Args:
        heartbeat: The heartbeat of this process; its thread does the watching.
        run_directory: Dumps go to `dumps` in it.
        on_stall: Called in the heartbeat's thread with a sentence and the dump's folder, once for each stall: the
            place to write an event. Without it the sentence is logged as a warning.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        run_directory: str | os.PathLike[str],
        *,
        on_stall: Callable[[str, Path], None] | None = None,
    ) -> None:
        self.directory = Path(run_directory)
        self._heartbeat = heartbeat
        self._on_stall = on_stall
        self._rank = heartbeat.rank
        self._stacks = StackDump(self.directory / "dumps", self._rank)
        self._stacks_size = self._stacks.path.stat().st_size
        self._stalled: tuple[str, float] | None = None
        self._seen: set[Path] = set(self._folders())

    def observe(self, row: Row) -> None:
        """Look at one heartbeat row; called by the heartbeat's thread."""
        # If no thread of Python's gets to run for that long, C code holds the interpreter's lock: faulthandler's own
        # thread, which needs no lock, writes the stacks.
        frozen_seconds = max(self._heartbeat.minimum_stall_seconds, 3 * row["interval_seconds"])
        faulthandler.dump_traceback_later(frozen_seconds, file=self._stacks.file)
        self._answer_other_ranks()
        limit = row["stall_limit_seconds"]
        if limit is not None and row["phase_seconds"] > limit:
            entry = self._heartbeat.current_phase()
            if entry != self._stalled:
                self._stalled = entry
                self._report_stall(row)
        elif self._stacks.path.stat().st_size > self._stacks_size:
            self._stacks_size = self._stacks.path.stat().st_size
            self._dump("asked", "was asked for its stacks", row)

    def _report_stall(self, row: Row) -> None:
        expected, limit = row["expected_phase_seconds"], row["stall_limit_seconds"]
        what = (
            f"is stalled in {row['phase']} for {duration(row['phase_seconds'])} "
            f"(usually {expected:.2g} s, limit {limit:.0f} s)"
        )
        folder = self._dump("stalled", what, row)
        sentence = f"rank {self._rank} {what}, at {row['where']}; see {folder / 'summary.md'}"
        if self._on_stall is None:
            logger.warning("%s", sentence)
        else:
            self._on_stall(sentence, folder)

    def _dump(self, reason: str, what: str, row: Row) -> Path:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = self.directory / "dumps" / f"{reason}_step_{row['step']:08}_rank{self._rank}_{stamp}"
        folder.mkdir(parents=True, exist_ok=True)
        self._seen.add(folder)
        self._write_stacks(folder)
        (folder / "summary.md").write_text(self._summary(what, row), encoding="utf-8")
        return folder

    def _answer_other_ranks(self) -> None:
        """Add this rank's stacks to the dumps that other ranks began."""
        for folder in self._folders():
            if folder not in self._seen:
                self._seen.add(folder)
                self._write_stacks(folder)

    def _folders(self) -> list[Path]:
        return [path for path in (self.directory / "dumps").glob("*_rank*") if path.is_dir()]

    def _write_stacks(self, folder: Path) -> None:
        with (folder / f"stacks_rank{self._rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)

    def _summary(self, what: str, row: Row) -> str:
        lines = [
            f"# Rank {self._rank} {what}",
            "",
            f"At step {row['step']:,}, {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}, "
            f"process {row['pid']} on {row['host']}.",
            "",
            f"- Where: {row['where'] or 'unknown'}",
            f"- Last loss: {_value(row['loss'])}, {_value(row['tokens_per_second'])} tokens/s",
            f"- Memory: {_gib(row['memory_allocated_bytes'])} allocated, {_gib(row['memory_reserved_bytes'])} reserved",
        ]
        hint = _HINTS.get(row["phase"])
        if hint is not None:
            lines.append(f"- Hint: {hint}")
        lines += ["", "The stacks of all threads are in `stacks_rank*.txt`, the most recent call first.", ""]
        try:
            run = read_run(self.directory, whole_heartbeats=False)
        except UserError as error:
            return "\n".join([*lines, f"The rest of the run cannot be read: {error}", ""])
        lines += ["## Ranks", "", "| rank | verdict | step | why |", "|---|---|---|---|"]
        for rank, rows in run.heartbeats.items():
            verdict = judge(rows[-1])
            lines.append(f"| {rank} | {verdict.state} | {rows[-1]['step']:,} | {verdict.reason} |")
        lines += ["", "## Last metrics", ""]
        lines += [f"    {last}" for last in run.rows[-_LAST_ROWS:]] or ["None yet."]
        return "\n".join([*lines, ""])

    def __enter__(self) -> Self:
        self._heartbeat.observers.append(self.observe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeat.observers.remove(self.observe)
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()


def _value(number: float | None) -> str:
    return "unknown" if number is None else f"{number:,.4g}"


def _gib(number: int | None) -> str:
    return "unknown" if number is None else f"{number / 2**30:.2f} GiB"
