"""Reads a run directory, of a finished, running or broken run."""

import itertools
import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trifocal.errors import UserError
from trifocal.runlog.jsonl import Row, read_lines
from trifocal.runlog.valid_rows import HEARTBEAT_FIELDS, is_number, valid_heartbeats, valid_metrics

# A heartbeat row is well under 2 KiB, so this much of the end has the last row.
_TAIL_BYTES = 65536


@dataclass
class Run:
    """The content of a run's files."""

    directory: Path
    name: str
    rows: list[Row]
    """All metric rows in order."""
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    heartbeats: dict[int, list[Row]] = field(default_factory=dict)
    """Rows of every rank; only the last row with `whole_heartbeats=False`."""
    samples: list[tuple[int, str]] = field(default_factory=list)
    """Step and text, in order of steps."""
    pictures: list[Path] = field(default_factory=list)
    """Files of telemetry/attention_picture.py, in order of steps."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Files of `trifocal evaluate`, in order of steps; see `read_evaluation`."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of rows without the required fields, by file."""

    def of_kind(self, kind: str) -> list[Row]:
        """The metric rows of one kind."""
        return [row for row in self.rows if row.get("kind") == kind]

    def series(self, kind: str, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, from the rows where it exists and is finite."""
        rows = [row for row in self.of_kind(kind) if is_number(row.get(name))]
        return [row["step"] for row in rows], [float(row[name]) for row in rows]

    def last_telemetry(self) -> list[Row]:
        """The last telemetry rows, one for each layer; empty without telemetry."""
        rows = self.of_kind("telemetry")
        return sorted((row for row in rows if row["step"] == rows[-1]["step"]), key=lambda row: row["layer"])

    @property
    def total_steps(self) -> int | None:
        """Steps in the config."""
        steps = self.config.get("train", {}).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def last_step(self) -> int:
        """The last step in any row."""
        beats = [rows[-1]["step"] for rows in self.heartbeats.values() if rows]
        return max([row["step"] for row in self.rows] + beats, default=0)

    def note_left_out(self, file: str, rows: int) -> None:
        """Note the number of rows of a file that are left out."""
        if rows:
            self.left_out[file] = rows

    def left_out_notes(self) -> list[str]:
        """A sentence for each file with rows that are left out."""
        return [
            f"{rows:,} row{'s' if rows > 1 else ''} of {file} lack{'' if rows > 1 else 's'} required fields, "
            f"and {'are' if rows > 1 else 'is'} left out"
            for file, rows in self.left_out.items()
        ]

    def phase_seconds(self, rank: int = 0) -> dict[str, float]:
        """Time of a rank by phase, over all processes (resumes) that wrote its heartbeat."""
        totals: dict[str, float] = {}
        rows = self.heartbeats.get(rank, [])
        for row, following in itertools.zip_longest(rows, rows[1:]):
            # Only a process's last row counts: it has the totals of that process.
            if following is None or following["pid"] != row["pid"] or following["host"] != row["host"]:
                for phase, seconds in row["total_seconds"].items():
                    totals[phase] = totals.get(phase, 0.0) + seconds
        return totals


def read_run(directory: str | Path, *, whole_heartbeats: bool = True) -> Run:
    """Read a run directory.

    Args:
        directory: The run directory.
        whole_heartbeats: False reads only the last row of every rank, for watching.

    Returns:
        The run. Parts that do not exist are empty.

    Raises:
        UserError: If there is no run, or a file cannot be read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"no run directory at {directory}")
    metrics, heartbeat = directory / "metrics.jsonl", directory / "heartbeat"
    if not metrics.exists() and not heartbeat.is_dir():
        raise UserError(f"{directory} is not a run: it has neither metrics.jsonl nor heartbeat/")
    # Not read_metrics, which refuses rows that this reader leaves out and counts.
    rows = read_lines(metrics, required=("kind", "step")) if metrics.is_file() else []
    run = Run(directory, directory.resolve().name, valid_metrics(rows))
    run.note_left_out(metrics.name, len(rows) - len(run.rows))
    config = directory / "config.toml"
    if config.is_file():
        try:
            run.config_text = config.read_text(encoding="utf-8")
            run.config = tomllib.loads(run.config_text)
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UserError(f"{config} is not valid TOML: {error}") from error
    environment = directory / "env.json"
    if environment.is_file():
        try:
            run.environment = json.loads(environment.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{environment} is not valid JSON: {error}") from error
        if not isinstance(run.environment, dict):
            raise UserError(f"{environment} holds no JSON object; remove it")
    for path in _files(heartbeat, "rank*.jsonl"):
        match = re.fullmatch(r"rank(\d+)\.jsonl", path.name)
        last_bytes = None if whole_heartbeats else _TAIL_BYTES
        rows = read_lines(path, last_bytes=last_bytes, required=HEARTBEAT_FIELDS) if match else []
        beats = valid_heartbeats(rows)
        run.note_left_out(f"heartbeat/{path.name}", len(rows) - len(beats))
        if match and beats:
            run.heartbeats[int(match[1])] = beats if whole_heartbeats else beats[-1:]
    run.heartbeats = dict(sorted(run.heartbeats.items()))
    for path in _files(directory / "samples", "*.txt"):
        match = re.search(r"(\d+)", path.stem)
        run.samples.append((int(match[1]) if match else 0, path.read_text(encoding="utf-8", errors="replace")))
    run.samples.sort(key=lambda sample: sample[0])
    run.pictures = sorted(_files(directory / "attention", "step_*.npz"))
    for path in sorted(_files(directory / "evaluation", "*.json")):
        if evaluation := read_evaluation(path):
            run.evaluations.append(evaluation)
        else:
            run.note_left_out(f"evaluation/{path.name}", 1)
    return run


def read_evaluation(path: Path) -> dict[str, Any] | None:
    """Read a file of `trifocal evaluate`.

    Returns:
        Its content: `step` (or None), further facts about the model, and `rows`, each with `task`, `length`, `status`
        and finite figures. None if there is no such content.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content["rows"]
        kept = [
            {name: value for name, value in row.items() if isinstance(value, str) or is_number(value)}
            for row in rows
            if isinstance(row["task"], str) and isinstance(row["status"], str) and is_number(row["length"])
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    step = content.get("step")
    return {**content, "step": step if is_number(step) else None, "rows": kept}


def _files(folder: Path, pattern: str) -> list[Path]:
    # Only files: reading a pipe that somebody put there would block.
    return [path for path in folder.glob(pattern) if path.is_file()]
