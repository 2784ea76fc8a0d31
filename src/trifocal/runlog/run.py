"""Reads a run directory, of a finished, running or broken run."""

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from trifocal.errors import UserError
from trifocal.paths import check_run_folder, read_file, read_json, read_text, read_toml
from trifocal.runlog.heartbeat import HEARTBEAT_FIELDS
from trifocal.runlog.jsonl import Row, Rows, is_number, read_lines
from trifocal.runlog.metrics import METRICS_FIELDS

# A heartbeat row is well under 2 KiB, so this much of the end has the last row.
_TAIL_BYTES = 65536
# A live view is drawn every two seconds: of metrics, it has some ten thousand rows.
_LIVE_BYTES = 2**23
# A report has the end of a larger log.
_REPORT_BYTES = 2**26
# What is no figure in a row of an evaluation.
_TEXTS = ("task", "status", "source", "name", "rows", "beside")


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
    """Rows of every rank; only the last row in a live view."""
    samples: list[tuple[int, str]] = field(default_factory=list)
    """Step and text, in order of steps."""
    pictures: list[Path] = field(default_factory=list)
    """Files of telemetry/attention_picture.py, in order of steps."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Files of `trifocal evaluate`, in order of steps; see `read_evaluation`."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of damaged entries, by file."""

    def of_kind(self, kind: str) -> list[Row]:
        """The metric rows of one kind."""
        return [row for row in self.rows if row.get("kind") == kind]

    def series(self, kind: str, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, from the rows where it exists and is finite."""
        rows = [row for row in self.of_kind(kind) if is_number(row.get(name))]
        return [row["step"] for row in rows], [float(row[name]) for row in rows]

    def of_sources(self, kind: str, name: str) -> dict[str, float]:
        """The last values of a metric of each source, where there are several."""
        row = (self.of_kind(kind) or [{}])[-1]
        return {
            key.removeprefix(f"{name}/"): float(value)
            for key, value in row.items()
            if key.startswith(f"{name}/") and is_number(value)
        }

    def last_telemetry(self) -> list[Row]:
        """The last telemetry rows, one for each layer; empty without telemetry."""
        rows = self.of_kind("telemetry")
        return sorted((row for row in rows if row["step"] == rows[-1]["step"]), key=lambda row: row["layer"])

    def telemetry_means(self) -> dict[str, float]:
        """Means over the layers of the figures in the last telemetry."""
        last = self.last_telemetry()
        names = {name for row in last for name, value in row.items() if is_number(value)}
        return {name: fmean(row[name] for row in last if is_number(row.get(name))) for name in names}

    @property
    def total_steps(self) -> int | None:
        """Steps in the config."""
        steps = self.setting("train", "steps")
        return steps if isinstance(steps, int) else None

    @property
    def last_step(self) -> int:
        """The last step in any row."""
        beats = [rows[-1]["step"] for rows in self.heartbeats.values() if rows]
        return max([row["step"] for row in self.rows] + beats, default=0)

    def setting(self, section: str, name: str) -> int | float | None:
        """A number of the config; None without one."""
        value = self.config.get(section, {}).get(name)
        return value if is_number(value) else None

    def crash_stacks(self, rank: int) -> Path | None:
        """The stacks that a rank wrote on a signal, the last thing of one that died; None without any."""
        path = self.directory / "dumps" / f"stacks_rank{rank}.txt"
        return path if path.is_file() and path.stat().st_size else None

    def left_out_notes(self) -> list[str]:
        """A sentence for each file with entries that are left out."""
        return [
            f"{entries:,} damaged {'entries' if entries > 1 else 'entry'} of {file} left out"
            for file, entries in self.left_out.items()
        ]

    def phase_seconds(self, rank: int = 0) -> dict[str, float]:
        """Time of a rank by phase, over all processes (resumes) that wrote its heartbeat."""
        totals: dict[str, float] = {}
        rows = self.heartbeats.get(rank, [])
        for row, following in itertools.zip_longest(rows, rows[1:]):
            # Only a process's last row counts: it has the totals of that process. A container gives its ids again.
            if following is None or any(following[name] != row[name] for name in ("pid", "process_start", "host")):
                for phase, seconds in row["total_seconds"].items():
                    totals[phase] = totals.get(phase, 0.0) + seconds
        return totals


def read_run(directory: str | Path, *, live: bool = False) -> Run:
    """Read a run directory; `live` reads only the end of the metrics, config and the last heartbeat of every rank. What
    does not exist is empty; damaged entries are left out and counted.
    """
    directory = Path(directory)
    check_run_folder(directory)
    metrics, heartbeat, config = (directory / name for name in ("metrics.jsonl", "heartbeat", "config.toml"))
    if not metrics.exists() and not heartbeat.is_dir():
        raise UserError(f"{directory} is not a run: it has neither metrics.jsonl nor heartbeat/")
    rows = Rows()
    if metrics.is_file():
        rows = read_lines(metrics, last_bytes=_LIVE_BYTES if live else _REPORT_BYTES, fields=METRICS_FIELDS)
    run = Run(directory, directory.resolve().name, rows, left_out=Counter({metrics.name: rows.skipped}))
    if config.is_file():
        run.config_text, content = read_text(config), read_toml(config)
        run.config = {name: section for name, section in content.items() if isinstance(section, dict)}
    for path in _files(heartbeat, "rank*.jsonl"):
        if match := re.fullmatch(r"rank(\d+)\.jsonl", path.name):
            beats = read_lines(path, last_bytes=_TAIL_BYTES if live else _REPORT_BYTES, fields=HEARTBEAT_FIELDS)
            run.left_out[f"heartbeat/{path.name}"] = beats.skipped
            if beats:
                run.heartbeats[int(match[1])] = beats[-1:] if live else beats
    run.heartbeats = dict(sorted(run.heartbeats.items()))
    if not live:
        _read_the_rest(run)
    # Without the files that are whole.
    run.left_out = +run.left_out
    return run


def _read_the_rest(run: Run) -> None:
    for path in _files(run.directory, "env.json"):
        content = _read_json(path)
        run.environment = content if _is_environment(content) else {}
        run.left_out[path.name] = int(not run.environment)
    for path in _files(run.directory / "samples", "step_*.txt"):
        try:
            run.samples.append((int(path.stem.removeprefix("step_")), read_file(path).decode(errors="replace")))
        except ValueError:
            run.left_out[f"samples/{path.name}"] = 1
    run.pictures = _files(run.directory / "attention", "step_*.npz")
    for path in _files(run.directory / "evaluation", "*.json"):
        if evaluation := read_evaluation(path):
            run.evaluations.append(evaluation)
        else:
            run.left_out[f"evaluation/{path.name}"] = 1


def read_evaluation(path: Path) -> dict[str, Any] | None:
    """A file of `trifocal evaluate`: `step`, facts about the model, and rows with `task`, `length`, `status`, finite
    figures, and `beside`, what they are compared with; None if it has no such row.
    """
    content = _read_json(path)
    if not isinstance(content.get("rows"), list):
        return None
    beside = {"beside": str(content.get("beside", ""))}
    rows = [
        ({} if "agreement" not in row else beside)
        | {name: value for name, value in row.items() if name in _TEXTS or is_number(value)}
        for row in content["rows"]
        if isinstance(row, dict)
        and all(isinstance(row.get(name, ""), str) for name in _TEXTS)
        and {"task", "status"} <= row.keys()
        and is_number(row.get("length"))
    ]
    return {"step": None, **content, "rows": rows} if rows else None


def _is_environment(content: dict[str, Any]) -> bool:
    """Whether the parts of an `env.json` that the report reads have their types, where they are there."""
    gpus = content.get("gpus", [])
    return (
        all(isinstance(content.get(name, {}), dict) for name in ("trifocal", "cpu", "variables"))
        and isinstance(gpus, list)
        and all(isinstance(gpu, dict) and "name" in gpu for gpu in gpus)
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if it cannot be read."""
    try:
        return read_json(path)
    except UserError:
        return {}


def _files(folder: Path, pattern: str) -> list[Path]:
    # Only files: reading a pipe that somebody put there would block.
    return sorted(path for path in folder.glob(pattern) if path.is_file())
